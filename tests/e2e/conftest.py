"""What tests with real processes share: commands that never outlive a test, and what they say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest


class Command(subprocess.Popen[str]):
    """A command of blocktrain. What it says on either stream is read in order."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "blocktrain", *map(str, arguments)]
        pipe = subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def line_with(self, words: str) -> str:
        """Reads on to the next line that has the words."""
        assert self.stdout is not None
        said = []
        for line in self.stdout:
            said.append(line)
            if words in line:
                return line
        raise AssertionError(f"it ended without saying {words!r}: {''.join(said)}")

    def end(self) -> None:
        self.kill()  # does nothing to one that has ended
        self.wait()
        for stream in (self.stdin, self.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    """Starts commands, none of which outlives the test."""
    started: list[Command] = []

    def start(*arguments: object) -> Command:
        started.append(Command(*arguments))
        return started[-1]

    yield start
    for command in started:
        command.end()
