"""Training in a real process that is interrupted: it stops, continues, and ends as if it had never stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from typer.testing import CliRunner

from blocktrain.cli.main import app
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import block_shapes


def train_command(text: Path, out: Path, *options: str) -> list[str]:
    return ["train", "--preset", "tiny", "--corpus", str(text), "--out", str(out), *options]


@contextmanager
def training(text: Path, out: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A process and its children, none of which outlives the block."""
    command = [sys.executable, "-m", "blocktrain", *train_command(text, out, *options)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def wait_for_line(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    assert any(words in line for line in process.stderr), f"it ended without saying {words!r}"


def train_here(text: Path, out: Path, *options: str) -> None:
    """The same run in this process, to its end."""
    result = CliRunner().invoke(app, train_command(text, out, *options))
    assert result.exit_code == 0, result.stderr


def tensors(out: Path) -> dict[int, dict[str, torch.Tensor]]:
    run = RunDirectory.open(out)
    return {block: run.load_block(block, block_shapes(run.spec, block)) for block in run.manifest().blocks}


DENOISE = ["--set", "objective.kind=denoise", "--set", "model.blocks=2", "--set", "model.layers=2"]


def interrupted(process: subprocess.Popen[str], words: str) -> str:
    """Ctrl-C when it has said `words`; what it says then."""
    wait_for_line(process, words)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all its processes
    assert process.stderr is not None
    return process.stderr.read()


def test_an_interrupted_run_continues_to_the_weights_of_one_that_was_not(tmp_path, text):
    stopped, straight, options = tmp_path / "stopped", tmp_path / "straight", ["--set", "train.steps=[20, 40, 20]"]
    with training(text, stopped, *options) as process:
        rest = interrupted(process, "phase 2 of 3, blocks 1+2: step 1/40")
        assert process.wait() == 130, rest
    assert f"everything is saved in {stopped}, run the same command again" in rest
    assert sorted(tensors(stopped)) == [0, 1]
    with training(text, stopped, *options) as process:
        rest = process.stderr.read()
        assert process.wait() == 0, rest
    train_here(text, straight, *options)
    assert sorted(tensors(straight)) == [0, 1, 2, 3]
    torch.testing.assert_close(tensors(stopped), tensors(straight), rtol=0, atol=0)


def test_what_two_jobs_began_one_process_ends(tmp_path, text):
    stopped, straight, options = tmp_path / "stopped", tmp_path / "straight", [*DENOISE, "--set", "train.steps=30"]
    with training(text, stopped, *options, "--jobs", "2") as process:
        rest = interrupted(process, "phase 1 of 2, block 0: step 1/30")
        assert process.wait() == 130, rest
    for out in (stopped, straight):
        train_here(text, out, *options)
    torch.testing.assert_close(tensors(stopped), tensors(straight), rtol=0, atol=0)
