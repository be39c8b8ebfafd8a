"""What tests with real processes share: commands that never outlive a test, their lines and their files."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from blocktrain.cli.options import read_spec
from blocktrain.swarm.coordinator.initial_files import initial_blocks_folder
from blocktrain.swarm.initial_blocks import make_initial_blocks

LIMIT_S = 250.0  # below the limit of a test: then it says what it waited for
POLL_S = 0.02


class Command(subprocess.Popen[str]):
    """A command of blocktrain. Its lines of both streams are read in order."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "blocktrain", *map(str, arguments)]
        pipe = subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def line_with(self, words: str) -> str:
        """Reads on to the next line that has the words."""
        assert self.stdout is not None
        read = []
        for line in self.stdout:
            read.append(line)
            if words in line:
                return line
        raise AssertionError(f"it ended without printing {words!r}: {''.join(read)}")

    def file(self, path: Path) -> str:
        """The contents of a file, once this command has written it."""
        give_up_s = time.monotonic() + LIMIT_S
        while not path.exists():
            if self.poll() is not None or time.monotonic() > give_up_s:
                self.kill()
                raise AssertionError(f"{path} was not written: {self.communicate()[0]}")
            time.sleep(POLL_S)
        return path.read_text()

    def stop(self) -> None:
        self.kill()  # does nothing if it has ended
        self.wait()
        for stream in (self.stdin, self.stdout):
            assert stream is not None
            stream.close()


class Listening(Command):
    """A stage, gateway or serve, with an address file."""

    def __init__(self, address_file: Path, *arguments: object) -> None:
        self._address_file = address_file
        super().__init__(*arguments, "--address-file", address_file)

    @property
    def address(self) -> str:
        """Where it listens, as soon as it does."""
        return str(json.loads(self.file(self._address_file))["address"])


@contextmanager
def starting() -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(*arguments: object) -> Command:
        started.append(Command(*arguments))
        return started[-1]

    yield start
    for command in started:
        command.stop()


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    """Starts commands. None outlives the test."""
    with starting() as start:
        yield start


@pytest.fixture(scope="module")
def start_for_all() -> Iterator[Callable[..., Command]]:
    """Starts commands that several tests of a file use. None outlives the file."""
    with starting() as start:
        yield start


@pytest.fixture(scope="session")
def coordinator_of() -> Callable[..., list[object]]:
    """The command of a coordinator, whose initial blocks are made here, where torch is loaded: it starts sooner. The
    demo, the tutorial and the wheel start coordinators that make them."""

    def coordinator_of(text: Path, folder: Path, *settings: str) -> list[object]:
        spec = read_spec(None, "tiny", str(text), None, list(settings))
        make_initial_blocks(spec, initial_blocks_folder(folder, spec.digest()))
        changes = [part for setting in settings for part in ("--set", setting)]
        return ["coordinator", "--preset", "tiny", "--corpus", text, "--dir", folder, *changes]

    return coordinator_of


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[Callable[..., Listening]]:
    """Starts commands that have an address. None outlives the test."""
    started: list[Listening] = []

    def listen(*arguments: object) -> Listening:
        started.append(Listening(tmp_path / f"address-{len(started)}.json", *arguments))
        return started[-1]

    yield listen
    for command in started:
        command.stop()
