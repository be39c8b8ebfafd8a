"""compare: both runs, and the report of them."""

from __future__ import annotations

import json

import pytest

from blocktrain.cli.commands.training.compare_runs import differing_settings, work_of
from blocktrain.cli.shared.story import SwarmStory, history, means
from blocktrain.spec import RunSpec, preset
from blocktrain.train.flops import phase_flops


def test_both_sides_are_trained_measured_and_reported(run, tiny, tmp_path):
    result = run("compare", *tiny, "--max-windows", 4)
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["parameters", "blocks", "reference", "gap"]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    blocks, reference = report["blocks"], report["reference"]
    assert RunSpec.model_validate(blocks["settings"]).digest() == blocks["spec_digest"]
    assert reference["training_bytes"] < blocks["training_bytes"]
    assert reference["training_flops"] == pytest.approx(blocks["training_flops"], rel=0.15)  # in whole steps
    assert report["machine"]["torch"]
    gap = blocks["answer"]["test"]["nats_per_byte"] - reference["answer"]["test"]["nats_per_byte"]
    assert report["gap_nats_per_byte"]["test"] == pytest.approx(gap)


def test_without_a_browser_the_picture_is_skipped_and_the_page_written(run, tiny, tmp_path):
    result = run("compare", *tiny, "--max-windows", 4)
    assert "curves.png was skipped, no Chrome or Chromium was found" in result.stderr
    page = (tmp_path / "run" / "curves.html").read_text()
    assert not (tmp_path / "run" / "curves.png").exists()
    assert "phase 2 of 3, blocks 1+2" in page
    assert 'src="http' not in page


def test_a_comparison_continues_with_what_is_there_and_equal_steps_are_another_one(run, tiny):
    assert run("compare", *tiny, "--max-windows", 1).exit_code == 0
    again, other = run("compare", *tiny, "--max-windows", 1), run("compare", *tiny, "--work", "steps")
    assert again.stderr.count("is finished: nothing is left to train") == 2
    assert (again.exit_code, other.exit_code) == (0, 2)
    assert "train.steps" in other.stderr


def test_after_a_resumption_the_last_record_of_a_step_counts():
    steps = [(0, 1, 5.0), (0, 2, 4.0), (0, 2, 3.0), (1, 1, 2.0)]
    records = [{"phase": p, "step": s, "loss": loss, "seconds": 0.5} for p, s, loss in steps]
    assert history(records) == ({0: [5.0, 3.0], 1: [2.0]}, 1.5)


@pytest.mark.parametrize(
    "losses, middles, means_of",
    [([], [], []), ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0]), ([1.0, 3.0, 5.0], [1.5, 3.0], [2.0, 5.0])],
)
def test_a_long_curve_is_thinned_to_means(losses, middles, means_of):
    assert means(losses, most=2) == (middles, means_of)


def test_runs_that_exist_are_compared_and_the_settings_that_differ_are_named(run, tiny, trained, tmp_path):
    assert run("train", *tiny, "--set", "train.steps=2").exit_code == 0
    result = run("compare", trained[0], tmp_path / "run", "--out", tmp_path / "compared", "--max-windows", 2)
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 3
    page = (tmp_path / "compared" / "compare.html").read_text()
    assert "Settings that differ" in page
    assert "train.steps" in page
    runs = json.loads((tmp_path / "compared" / "compare.json").read_text())["runs"]
    assert [each["settings"]["train"]["steps"] for each in runs][1] == 2


def test_runs_of_different_texts_are_compared_on_the_text_that_is_named(run, text, trained, tmp_path):
    (tmp_path / "other.txt").write_text(text.read_text()[::-1])
    other = [
        "--preset",
        "tiny",
        "--corpus",
        tmp_path / "other.txt",
        "--set",
        "train.steps=1",
        "--out",
        tmp_path / "run",
    ]
    assert run("train", *other).exit_code == 0
    compare = ["compare", trained[0], tmp_path / "run", "--out", tmp_path / "compared", "--max-windows", 2]
    assert "measured on different texts, so their losses cannot be compared: measure" in run(*compare).stderr
    result = run(*compare, "--corpus", text)
    assert result.exit_code == 0, result.stderr
    assert "different texts" not in result.stderr + (tmp_path / "compared" / "compare.html").read_text()


def test_the_work_of_workers_that_are_averaged_is_added_up():
    spec = preset("tiny")
    update = {"phase": 0, "steps": 2, "tokens": 2 * spec.step_tokens}
    story = SwarmStory(spec, [{"update": update}, {"update": update}], [], [], [])
    assert work_of(story) == (4 * spec.step_tokens, 4 * phase_flops(spec, spec.phases[0]))


def test_only_the_settings_that_differ_are_listed():
    one, two = preset("tiny"), preset("tiny").with_(**{"train.steps": 7, "corpus.source": "novel.txt"})
    assert differing_settings([one, two]) == [
        ("corpus.source", ['"sotu"', '"novel.txt"']),
        ("train.steps", ["30", "7"]),
    ]


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--preset", "tiny"], "give --out DIR"),
        (["."], ". is only one run: give the directories of two or more runs"),
        ([".", ".", "--preset", "tiny"], "directories and --preset were both given"),
        ([".", ".", "--seed", "1"], "--seed and --set change nothing in runs that exist"),
        ([".", "missing"], "missing is not a directory"),
        ([".", "."], "has neither spec.toml nor"),
    ],
)
def test_what_cannot_be_compared_is_refused(run, tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    result = run("compare", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
