"""What the commands' tests share: a text, a way to run a command, and two trained runs that tests only read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from blocktrain.cli.main import app

SENTENCES = [f"{n} bottles of beer on the wall, {n} bottles of beer. " for n in range(400)]
Run = Callable[..., Result]


def run_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def write_text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(SENTENCES))
    return path


@pytest.fixture(autouse=True)
def _no_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting one takes seconds; tests/test_figures.py does."""
    monkeypatch.setenv("BROWSER_PATH", "/no/such/browser")


@pytest.fixture
def run() -> Run:
    return run_command


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path)


@pytest.fixture
def tiny(text: Path, tmp_path: Path) -> list[object]:
    """Options of the smallest run, into tmp_path / "run"."""
    return ["--preset", "tiny", "--corpus", text, "--set", "train.steps=3", "--out", tmp_path / "run"]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(blocks, reference)"""
    folder = tmp_path_factory.mktemp("trained")
    options = ["--preset", "tiny", "--corpus", write_text(folder), "--set", "train.steps=3"]
    for command, name in (("train", "run"), ("reference", "ref")):
        result = run_command(command, *options, "--out", folder / name)
        assert result.exit_code == 0, result.stderr
    return folder / "run", folder / "ref"
