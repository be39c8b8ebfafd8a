"""Training in a real process that is interrupted: it stops, continues, and gets the weights of an uninterrupted run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from blocktrain.cli.main import app
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import block_shapes

INTERRUPTER = Path(__file__).with_name("interrupt_at_line.py")
pytestmark = pytest.mark.timeout(300)  # its processes import torch, on a machine that may be busy


def train_command(text: Path, out: Path, *options: str) -> list[str]:
    return ["train", "--preset", "tiny", "--corpus", str(text), "--out", str(out), *options]


def train_and_interrupt(words: str, text: Path, out: Path, *options: str) -> str:
    """Trains in a process group of its own, with a Ctrl-C when it prints `words`. Returns what it prints."""
    command = [sys.executable, str(INTERRUPTER), words, *train_command(text, out, *options)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            printed = process.communicate()[1]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, printed
    return printed


def train_here(text: Path, out: Path, *options: str) -> None:
    """The same run in this process, to its end."""
    result = CliRunner().invoke(app, train_command(text, out, *options))
    assert result.exit_code == 0, result.stderr


def tensors(out: Path) -> dict[int, dict[str, torch.Tensor]]:
    run = RunDirectory.open(out)
    return {block: run.load_block(block, block_shapes(run.spec, block)) for block in run.manifest().blocks}


DENOISE = ["--set", "objective.kind=denoise", "--set", "model.blocks=2", "--set", "model.layers=2"]


def test_an_interrupted_run_continues_to_the_weights_of_one_that_was_not(tmp_path, text):
    stopped, straight, options = tmp_path / "stopped", tmp_path / "straight", ["--set", "train.steps=[20, 40, 20]"]
    printed = train_and_interrupt("phase 2 of 3, blocks 1+2: step 1/40", text, stopped, *options)
    assert f"everything is saved in {stopped}, run the same command again" in printed
    assert sorted(tensors(stopped)) == [0, 1]
    for out in (stopped, straight):
        train_here(text, out, *options)
    assert sorted(tensors(straight)) == [0, 1, 2, 3]
    torch.testing.assert_close(tensors(stopped), tensors(straight), rtol=0, atol=0)


def test_what_two_jobs_began_one_process_ends(tmp_path, text):
    stopped, straight, options = tmp_path / "stopped", tmp_path / "straight", [*DENOISE, "--set", "train.steps=30"]
    train_and_interrupt("phase 1 of 2, block 0: step 1/30", text, stopped, *options, "--jobs", "2")
    for out in (stopped, straight):
        train_here(text, out, *options)
    torch.testing.assert_close(tensors(stopped), tensors(straight), rtol=0, atol=0)
