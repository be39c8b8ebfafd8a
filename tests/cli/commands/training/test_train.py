"""train and reference, in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.cli.shared import training
from blocktrain.cli.shared.signals import StopOnInterrupt
from blocktrain.data.corpus import load_corpus
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.spec import Denoise, Stacked, preset


def test_training_prints_what_it_will_do_and_what_it_did(run, tiny, tmp_path):
    result = run("train", *tiny)
    assert result.exit_code == 0
    assert "parameters  114,816 (block 0: 28,704, " in result.stderr
    assert "blocks 0+1 for 3 steps; blocks 1+2 for " in result.stderr
    assert "phase 3 of 3, blocks 2+3: step 1/" in result.stderr
    assert result.stdout.startswith(f"{tmp_path / 'run'} holds trained blocks 0, 1, 2, 3 of 4;")


def test_a_finished_run_is_reported_and_not_changed(run, trained):
    blocks, _ = trained
    before = (blocks / "manifest.json").read_bytes()
    result = run(
        "train", "--preset", "tiny", "--corpus", blocks.parent / "text.txt", "--set", "train.steps=3", "--out", blocks
    )
    assert (result.exit_code, (blocks / "manifest.json").read_bytes()) == (0, before)
    assert f"{blocks} is finished: nothing is left to train" in result.stderr


def test_the_next_command_can_be_copied_although_the_directory_has_a_space(run, tiny, tmp_path):
    result = run("train", *tiny, "--block", 0, "--out", tmp_path / "mein Lauf")
    assert result.stdout.endswith(f"next: blocktrain eval '{tmp_path / 'mein Lauf'}'\n")


def test_a_pipe_gets_plain_text(run, tiny):
    result = run("train", *tiny)
    assert not {"\x1b", "\r"} & set(result.stdout + result.stderr)


def test_a_toml_file_and_options_describe_the_run_together(run, text, tmp_path):
    file, out = tmp_path / "run.toml", tmp_path / "run"
    file.write_text('preset = "tiny"\n[objective]\nkind = "denoise"\nsigma_max = 5.0\n[train]\nsteps = 2\n')
    changes = ["--set", "objective.sigma_min=2", "--set", "name=mine", "--seed", 7, "--corpus", text]
    assert run("train", file, "--block", 2, *changes, "--out", out).exit_code == 0
    spec = RunDirectory.open(out).spec
    assert (spec.name, spec.seed, spec.objective) == ("mine", 7, Denoise(sigma_min=2.0, sigma_max=5.0))
    assert list(RunDirectory.open(out).manifest().blocks) == [2]


@pytest.mark.parametrize(
    "settings",
    [["objective.kind=denoise", "objective.span_share=0.5"], ["objective.span_share=0.5", "objective.kind=denoise"]],
)
def test_another_objective_can_be_chosen_in_any_order_of_its_settings(run, tiny, tmp_path, settings):
    changes = [part for setting in settings for part in ("--set", setting)]
    assert run("train", *tiny, *changes, "--block", 0).exit_code == 0
    assert RunDirectory.open(tmp_path / "run").spec.objective == Denoise(span_share=0.5)


def test_a_removed_setting_is_named_and_has_no_effect(run, tiny, tmp_path):
    removed = ["--set", "objective.kind=denoise", "--set", "objective.partition=lognormal"]
    result = run("train", *tiny, *removed, "--block", 0)
    assert result.exit_code == 0
    assert "warning: the changed settings: objective.partition was removed and has no effect" in result.stderr
    assert RunDirectory.open(tmp_path / "run").spec.objective == Denoise()


def test_the_reference_shows_its_parameters_beside_those_of_the_blocks(run, tiny, tmp_path):
    result = run("reference", *tiny, "--set", "objective.kind=denoise")
    assert result.exit_code == 0
    assert "total         120,836     114,816" in result.stderr
    assert RunDirectory.open(tmp_path / "run").spec.train.steps > 3


def test_steps_of_the_reference_may_be_given(run, tiny, tmp_path):
    assert run("reference", *tiny, "--steps", 1).exit_code == 0
    assert RunDirectory.open(tmp_path / "run").spec.train.steps == 1


class StopAtOnce(StopOnInterrupt):
    def __call__(self) -> bool:
        return True


def test_a_stopped_run_exits_with_130_and_prints_how_to_continue(run, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "StopOnInterrupt", StopAtOnce)
    result = run("train", *tiny)
    assert result.exit_code == 130
    assert f"stopped: everything is saved in {tmp_path / 'run'}, run the same command again" in result.stderr


def test_jobs_that_cannot_help_are_not_started(run, tiny):
    result = run("train", *tiny, "--jobs", 4)
    assert result.exit_code == 0
    assert "--jobs 4 has no effect" in result.stderr


def test_every_step_is_on_record(trained: tuple[Path, Path]):
    run = RunDirectory.open(trained[0])
    steps = [(phase.index, step + 1) for phase in run.spec.phases for step in range(phase.steps)]
    assert [(record["phase"], record["step"]) for record in run.metrics()] == steps


def test_a_text_that_is_not_plain_is_named_before_the_training(run, tiny, text):
    text.write_bytes(text.read_text().encode("utf-16"))
    result = run("train", *tiny)
    assert result.exit_code == 0
    assert "warning: the text text.txt is UTF-16 text: convert it with iconv -f UTF-16 -t UTF-8" in result.stderr


def test_the_same_prompts_are_continued_after_every_phase(run, tiny, tmp_path):
    result = run("train", *tiny)
    records = RunDirectory.open(tmp_path / "run").samples()
    assert [records[at]["where"].split(",")[0] for at in (0, -1)] == ["phase 1 of 3", "phase 3 of 3"]
    assert len({tuple(sample["prompt"] for sample in record["samples"]) for record in records}) == 1
    assert f"held-out loss {records[-1]['nats_per_byte']:.3f} nats/byte" in result.stderr
    page = tmp_path / "page.html"
    assert run("report", tmp_path / "run", "--out", page, "--no-png").exit_code == 0
    assert "What it wrote" in page.read_text()


def test_looking_at_a_run_takes_a_small_share_of_the_time(run, tiny, tmp_path, text):
    assert run("train", *tiny, "--block", 0).exit_code == 0
    folder = RunDirectory.open(tmp_path / "run")
    seconds = iter([0.0, 10.0, 10.0, 100.0, 211.0, 212.0, 212.0])  # a look of 10 s, one asked for too soon, one in time
    before = len(folder.samples())
    look = training.Look(folder, load_corpus(folder.spec.corpus, 64), clock=lambda: next(seconds))
    for taken in (1, 1, 2):
        look()
        assert len(folder.samples()) == before + taken


@pytest.mark.parametrize(
    "memory, said",
    [
        ("20MB", None),
        ("5MB", "it trains with 2 windows at once ("),
        ("3MB", "it trains with 4 windows at once and one block in memory at a time ("),
    ],
)
def test_training_says_how_it_fits_the_memory(run, tiny, tmp_path, memory, said):
    result = run("train", *tiny, "--set", "objective.schedule=whole", "--memory", memory)
    assert result.exit_code == 0
    assert said in result.stderr if said else "of memory" not in result.stderr
    assert sorted(RunDirectory.open(tmp_path / "run").manifest().blocks) == [0, 1, 2, 3]


def test_training_is_refused_if_no_way_fits_the_memory(run, tiny, tmp_path):
    result = run("train", *tiny, "--memory", "500kB")
    assert result.exit_code == 2
    assert "is available; the minimum is " in result.stderr
    assert ": use a smaller model or more blocks, or give more memory with --memory" in result.stderr
    assert not (tmp_path / "run").exists()


def test_training_says_which_settings_choose_the_same(run, tiny):
    result = run("train", *tiny, "--block", 0, "--memory", "2MB")
    assert "it trains with 1 window at once (" in result.stderr
    assert " MB; train.micro_windows = 1)" in result.stderr


def test_a_run_is_not_looked_at_where_its_training_needs_the_memory(tmp_path):
    paper = preset("paper").with_(objective=Stacked())
    assert training.has_room_to_look(paper, paper.phases, None)
    assert training.has_room_to_look(paper, paper.phases, 10**12)
    assert not training.has_room_to_look(paper, paper.phases, 6 * 10**9)


def test_a_finished_run_is_trained_further_into_another_directory(run, trained, tmp_path):
    blocks, _ = trained
    before = (blocks / "manifest.json").read_bytes()
    result = run("train", "--from", blocks, "--set", "train.steps=2", "--out", tmp_path / "longer")
    assert result.exit_code == 0
    assert "starts from a model with sha256 " in result.stderr
    assert "blocks 0+1 for 2 steps" in result.stderr
    assert (blocks / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--set", "train.steps=9"], "to train its model further, give --from"),
        (["--set", "train.freeze=[0]"], "give that model with --from, or leave train.freeze out"),
    ],
)
def test_changed_settings_of_a_finished_run_are_refused_with_the_way_to_go_on(run, trained, options, complaint):
    blocks, _ = trained
    text = blocks.parent / "text.txt"
    result = run("train", "--preset", "tiny", "--corpus", text, *options, "--out", blocks)
    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())


def test_a_run_is_not_trained_further_in_place(run, trained):
    blocks, _ = trained
    result = run("train", "--from", blocks, "--out", blocks)
    assert result.exit_code == 2
    assert "name another --out, a model stays as it is" in result.stderr
