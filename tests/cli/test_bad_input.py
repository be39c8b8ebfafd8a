"""What bad input gets: exit code 2, one sentence that names the thing, and nothing overwritten."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from blocktrain.io.checkpoint import RunDirectory
from blocktrain.io.tensor_file import load_tensors, save_tensors

PRESET = ["--preset", "tiny"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def assert_refused(result, *words: str) -> None:
    assert (result.exit_code, result.stdout) == (2, "")
    (sentence,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert all(word in sentence for word in words), sentence
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["train", "reference", "compare"])
@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], ["no settings were given"]),
        (["--preset", "tony"], ['no preset "tony"', "tiny"]),
        (["run.toml", *PRESET], ["both run.toml and --preset tiny"]),
        (["no.toml"], ["no.toml does not exist"]),
        (["tiny"], ["tiny is the name of a preset and no file: write --preset tiny"]),
        (["short.txt"], ["not a readable TOML file", "to train on its text, give it with --corpus short.txt"]),
        (["--preset", "novels"], ['corpus "novels" stands for a text of your own', "--corpus"]),
        ([*PRESET, "--set", "train.stepz=3"], ["unknown key train.stepz", "steps"]),
        ([*PRESET, "--set", "trains.steps=3"], ["unknown key trains"]),
        ([*PRESET, "--set", "seed.x=3"], ["seed = {'x': 3}"]),
        ([*PRESET, "--set", "train.steps"], ["--set train.steps is not KEY=VALUE"]),
        ([*PRESET, "--set", "train.steps=few"], ["train.steps = 'few'"]),
        ([*PRESET, "--set", "model.layers=5"], ["model.layers = 5 is not divisible by model.blocks = 4"]),
        (
            [*PRESET, "--set", "objective.kind=denoise", "--set", "objective.sigma_min=10"],
            ["objective.sigma_min = 10.0 must be below objective.sigma_max = 10.0"],
        ),
        ([*PRESET, "--corpus", "no-such-text"], ['corpus "no-such-text"']),
        ([*PRESET, "--corpus", ""], ['corpus "" is the name of nothing']),
        ([*PRESET, "--corpus", "empty.txt"], ['corpus "empty.txt" is empty']),
        ([*PRESET, "--corpus", "model"], ['corpus "model" holds a trained model, not text']),
        ([*PRESET, "--corpus", "swarm"], ['corpus "swarm" holds the run of a coordinator, not text']),
        ([*PRESET, "--corpus", "short.txt"], ['split of corpus "short.txt" has', "needs 65"]),
    ],
)
def test_bad_settings_are_refused_before_training(run, tmp_path, monkeypatch, command, arguments, words):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("too short")
    for path in (Path("model/manifest.json"), Path("swarm/ledger.db")):
        path.parent.mkdir()
        path.touch()
    assert_refused(run(command, *arguments, "--out", "out"), *words)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["worker", "bt://127.0.0.1:1/#a-token-for-nobody-at-all", "--cache", "2"],
        ["coordinator", *PRESET, "--dir", "state", "--max-storage", "2"],
    ],
)
def test_a_size_without_a_unit_is_refused(run, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert_refused(run(*arguments), f"{arguments[-2]} 2 has no unit", "2GB")


def test_a_folder_instead_of_a_file_of_settings_is_named(run, tmp_path):
    assert_refused(run("train", tmp_path, "--out", tmp_path / "out"), f"{tmp_path} is a folder", "--from")


@pytest.mark.parametrize(
    "options, words",
    [
        (["--block", "9"], ["--block 9 has no phase of its own"]),
        (["--block", "2"], ["block 2 stands on blocks", "0, 1"]),
        (["--jobs", "0"], ["--jobs 0 is too small"]),
    ],
)
def test_a_block_that_cannot_be_trained_alone_is_named(run, tiny, options, words):
    assert_refused(run("train", *tiny, *options), *words)


@pytest.mark.parametrize(
    "changed, word", [(["--seed", "1"], "seed = 1"), (["--set", "model.width=64"], "model.width = 64")]
)
def test_the_directory_of_another_run_is_left_alone(run, trained, changed, word):
    blocks, _ = trained
    before = contents(blocks)
    options = [*PRESET, "--corpus", blocks.parent / "text.txt", "--set", "train.steps=3", "--out", blocks]
    assert_refused(run("train", *options, *changed), str(blocks), word)
    assert contents(blocks) == before


def test_a_model_and_a_coordinator_do_not_share_a_directory(run, trained, tiny, tmp_path):
    refused = run("coordinator", *PRESET, "--dir", trained[0])
    assert_refused(refused, "holds a trained model", f"add --from {trained[0]}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "ledger.db").touch()
    assert_refused(run("train", *tiny), "is the directory of a coordinator")


@pytest.fixture
def copy(trained: tuple[Path, Path], tmp_path: Path) -> Path:
    """A trained run to damage."""
    return Path(shutil.copytree(trained[0], tmp_path / "copy"))


def block_file(folder: Path) -> Path:
    (path,) = folder.glob("block-1-*.safetensors")
    return path


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_a_truncated_block_is_named(run, copy, command):
    path = block_file(copy)
    path.write_bytes(path.read_bytes()[:-10])
    before = contents(copy)
    assert_refused(run(command, copy), path.name, "is damaged")
    assert contents(copy) == before


@pytest.mark.parametrize("command", ["eval", "generate"])
@pytest.mark.parametrize("change", ["missing", "extra"])
def test_a_block_with_other_tensors_than_its_own_is_named(run, copy, command, change):
    path = block_file(copy)
    tensors, metadata = load_tensors(path)
    if change == "missing":
        del tensors["readout"]
    else:
        tensors["another"] = tensors["gain"].clone()
    save_tensors(path, tensors, metadata)
    renamed = adopt(copy, path)
    assert_refused(run(command, copy), renamed.name, "readout" if change == "missing" else "another")


def adopt(folder: Path, path: Path) -> Path:
    """The manifest now vouches for the file as it is."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["blocks"]["1"]["sha256"] = digest
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return path.rename(folder / f"block-1-{digest[:12]}.safetensors")


def test_a_truncated_progress_file_is_named(run, tiny, tmp_path):
    folder = tmp_path / "run"
    assert run("train", *tiny, "--block", 0).exit_code == 0
    directory = RunDirectory.open(folder)
    directory.save_progress(1, {}, {"step": "1"})
    path = folder / "progress" / "phase-1.safetensors"
    path.write_bytes(path.read_bytes()[:5])
    assert_refused(run("train", *tiny), str(path))


@pytest.mark.parametrize("command", ["eval", "generate"])
def test_a_directory_without_a_run_is_named(run, tmp_path, command):
    assert_refused(run(command, tmp_path), f"{tmp_path} is not a run directory")


def test_debug_shows_where_an_error_came_from(run, tmp_path):
    result = run("--debug", "eval", tmp_path)
    assert type(result.exception).__name__ == "CheckpointError"


def test_an_unexpected_error_is_one_line_and_exit_code_1(run, trained, monkeypatch):
    monkeypatch.setattr("blocktrain.cli.shared.scoring.load_model", lambda run: 1 / 0)
    result = run("eval", trained[0])
    assert result.exit_code == 1
    assert (
        result.stderr
        == "error: unexpected ZeroDivisionError: division by zero (run blocktrain --debug COMMAND … to see where)\n"
    )


@pytest.mark.parametrize(
    "out, words",
    [
        ("text.txt", "is not a report page: name another file"),
        (".", "is a folder: name a file, for example report.html"),
        ("nowhere/page.html", "is in a folder that does not exist: make nowhere, or name another file"),
        ("text.txt/page.html", "is in a folder that does not exist: make text.txt"),
    ],
)
def test_a_report_overwrites_no_file_that_is_not_a_page(run, trained, tmp_path, monkeypatch, out, words):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("years of work")
    assert_refused(run("report", trained[0], "--out", out, "--no-png"), f"--out {out} {words}")
    assert contents(tmp_path) == {"text.txt": b"years of work"}


def test_an_older_report_is_written_anew(run, trained, tmp_path):
    for _ in range(2):
        options = ("--out", tmp_path / "page.html", "--no-png", "--max-windows", 1)
        assert run("report", trained[0], *options).exit_code == 0


def test_an_address_instead_of_the_url_of_a_gateway_is_corrected(run):
    assert_refused(
        run("generate", "localhost:8000"), "localhost:8000 is not a directory", "write http://localhost:8000"
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["generate", "run/", "The president"], ["generate takes RUN", "for example --prompt TEXT"]),
        (["presets", "tiny"], ["presets takes no argument"]),
        (
            ["train", *PRESET, "--steps", "10"],
            ["No such option: --steps", "--set KEY=VALUE: did you mean train.steps?"],
        ),
        (["train", *PRESET, "--batch-size", "8"], ["--set KEY=VALUE: here it is train.windows"]),
        (["train", *PRESET, "--nonsense"], ["No such option: --nonsense"]),
        (["status", "swarm/", "--steps", "10"], ["No such option: --steps"]),
    ],
)
def test_a_command_line_that_cannot_be_read_says_how_it_is_meant(run, arguments, words):
    result = run(*arguments)
    said = " ".join(result.stderr.replace("│", " ").split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert all(word in said for word in words), said
