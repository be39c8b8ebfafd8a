"""Stage processes, as a user starts them, for the experiments that serve."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def blocktrain_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs until it is told to stop."""
    command = [sys.executable, "-m", "blocktrain", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextmanager
def stage_process(model: Path, blocks: range, threads: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    own = ["--blocks", f"{blocks[0]}-{blocks[-1]}", "--threads", str(threads)]
    with blocktrain_process("stage", str(model), *own, *options) as process:
        yield process


def address_of(process: subprocess.Popen[str]) -> str:
    """The first word that it prints once it listens."""
    assert process.stdout is not None
    if not (words := process.stdout.readline().split()):
        raise RuntimeError(f"a process of this experiment ended with code {process.wait()} before it listened")
    return words[0]
