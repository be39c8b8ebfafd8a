"""The processes of the demo: each is a command of blocktrain with its own log. They are found by the files they write,
never by what they print. Next: training.py and serving.py, which start them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from os import environ
from pathlib import Path
from typing import TypeVar

from blocktrain.cli.console import duration, say
from blocktrain.cli.shared.signals import interrupts_delayed
from blocktrain.errors import EXIT_USER_ERROR, BlockTrainError
from blocktrain.io.address_file import POLL_S
from blocktrain.io.files import make_folder

Found = TypeVar("Found")
START_LIMIT_S = 1800.0  # a slow machine may take minutes until a process listens
GRACE_S = 20.0
ERROR = "error: "  # how a command begins its last line when the user can mend it
LAST_LINES = 5  # of a log, shown when its process failed


class DemoFailed(BlockTrainError):
    """One of the processes failed. The message ends with the end of its log."""


def tell(text: str) -> None:
    """Sentences are wrapped. Indented lines are addresses and commands, which people copy."""
    for line in text.split("\n"):
        say(line)


class Process:
    """A command of blocktrain, running. What it prints beside its result goes to its log."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.name, self._popen, self._log = name, popen, log

    @property
    def pid(self) -> int:
        return self._popen.pid

    def wait_until(self, look: Callable[[], Found | None], limit_s: float = START_LIMIT_S) -> Found:
        """What `look` finds, as soon as it finds something. Fails when the process ends first, or after `limit_s`."""
        give_up_s = time.monotonic() + limit_s
        while True:
            self.check(may_end=False)
            if (found := look()) is not None:
                return found
            if time.monotonic() > give_up_s:
                raise DemoFailed(f"{self.name} is not ready after {duration(limit_s)}: {self._remedy()}")
            time.sleep(POLL_S)

    def check(self, *, may_end: bool) -> None:
        """Raises if the process has failed; also if it has ended at all, unless it may."""
        code = self._popen.poll()
        if code is None or (may_end and code == 0):
            return
        said = self._last_lines()[-1]
        if code == EXIT_USER_ERROR and said.startswith(ERROR):  # a sentence with its own remedy
            raise DemoFailed(said.removeprefix(ERROR))
        raise DemoFailed(f"{self.name} exited with code {code}: {self._remedy()}")

    def _last_lines(self) -> list[str]:
        return self._log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:] or ["(it is empty)"]

    def _remedy(self) -> str:
        return "\n  ".join([f"read the end of {self._log}, then run the same command again", *self._last_lines()])

    def kill(self) -> None:
        """As kill -9 does: the process can save and send nothing."""
        self._popen.kill()
        self._popen.wait()

    def stop(self) -> None:
        self._popen.send_signal(signal.SIGINT)  # a worker submits what it has trained
        try:
            self._popen.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()


def start(
    stack: ExitStack, folder: Path, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Process:
    """Leaving the stack stops it. It has its own session, so the terminal's Ctrl-C reaches only the demo."""
    log = folder / "logs" / f"{name}.log"
    make_folder(log.parent)
    with log.open("wb") as messages, interrupts_delayed():
        popen = subprocess.Popen(
            [sys.executable, "-m", "blocktrain", "--with-parent", *arguments],
            stdin=subprocess.PIPE,  # ends when the demo does, even by kill -9
            stdout=subprocess.DEVNULL,  # a coordinator prints its invite, which is a secret
            stderr=messages,
            start_new_session=True,
            env={**(environment or {}), **environ},
        )
        process = Process(name, popen, log)
        stack.callback(process.stop)
    return process
