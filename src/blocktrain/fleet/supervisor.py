"""One command of blocktrain, kept running in a folder of its own: started again when it ends, and asked to stop by the
end of its stdin. The same happens when this process is killed, so a worker submits its work in every case.
No Ray here. Next: member.py, which uses it; cli/shared/signals.py, which turns the end of stdin into SIGTERM."""

from __future__ import annotations

import fcntl
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from blocktrain.errors import BlockTrainError, StorageError
from blocktrain.io.address_file import read_address
from blocktrain.io.private import OWNER_ONLY
from blocktrain.io.restarts import next_pause_s

ADDRESS_FILE, LOCK_FILE, LOG_FILE = "address.json", ".process.lock", "log"
LOG_BYTES = 10 * 2**20  # a longer log is renamed when the command is started again
TAIL_BYTES = 2000
TICK_S = 0.2
FIRST_PAUSE_S = 0.5
TAKEOVER_S = 120.0  # how long an earlier process of this folder may take to submit its work
# The shell stays between. When Ray ends an actor it kills the processes that the actor started, but not their children:
# the command sees the end of its stdin instead, and stops in order.
SHELL = ("sh", "-c", '"$@"; exit $?', "sh")


@dataclass(frozen=True)
class Launch:
    """The words after `blocktrain`, where it runs, and what its files of secrets hold, as a hash."""

    words: tuple[str, ...]
    work_folder: Path | None = None
    secrets_sha256: str = ""


@dataclass(frozen=True)
class CommandState:
    """`state` is waiting, running, failing, finished or stopped; `note` says why."""

    state: str = "waiting"
    note: str = ""
    starts: int = 0
    address: str | None = None


class Supervisor:
    """`launch` says how to start the command, or why it cannot be started yet, and is asked again. With `follow_s`, it
    is also asked that often while the command runs, which is started again when the answer changes. With `may_finish`,
    the command is done when it exits with 0. `report` gets every new state."""

    def __init__(
        self,
        folder: Path,
        launch: Callable[[], Launch | str],
        *,
        follow_s: float | None = None,
        may_finish: bool = False,
        report: Callable[[CommandState], None] = lambda state: None,
    ) -> None:
        self.folder, self._launch, self._report = folder, launch, report
        self._follow_s, self._may_finish = follow_s, may_finish
        self._state, self._stopping, self._abort = CommandState(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    @property
    def state(self) -> CommandState:
        running = self._state.state == "running"
        return replace(self._state, address=read_address(self.folder / ADDRESS_FILE) if running else None)

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_s: float) -> bool:
        """Asks the command to stop and waits for it. Returns False if it had to be killed."""
        self._stopping.set()
        self._thread.join(grace_s)
        in_order = not self._thread.is_alive()
        self._abort.set()
        self._thread.join()
        return in_order

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            began_s = time.monotonic()
            try:
                code = self._run_once()
            except (BlockTrainError, OSError) as error:
                self._set("failing", str(error))
            else:
                if code == 0 and self._may_finish and not self._stopping.is_set():
                    self._set("finished")
                    return
                if code is not None:
                    self._set("failing", f"exit code {code}: {self._last_line()}")
            failed = self._state.state == "failing"
            pause_s = next_pause_s(pause_s, FIRST_PAUSE_S, time.monotonic() - began_s) if failed else FIRST_PAUSE_S
            self._stopping.wait(pause_s)
        self._set("stopped")

    def _run_once(self) -> int | None:
        """The exit code of the command; None if it was not started, or was stopped to be started differently."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._alone() as lock:
            if lock is None:
                return None
            launch = self._launch()
            if isinstance(launch, str):
                self._set("waiting", launch)
                return None
            (self.folder / ADDRESS_FILE).unlink(missing_ok=True)
            with self._log() as log:
                process = start(launch, lock, log)
            os.pwrite(lock, b"%-20d" % process.pid, 0)
            self._set("running", starts=1)
            return self._watch(process, launch)

    def _watch(self, process: subprocess.Popen[bytes], launch: Launch) -> int | None:
        """Until it ends. Nothing here raises: a process that nobody watches would stay."""
        assert process.stdin is not None
        replaced, pause_s = False, math.inf if self._follow_s is None else self._follow_s
        look_s = time.monotonic() + pause_s
        while process.poll() is None:
            if self._abort.is_set():
                kill_group(process.pid)
            elif self._stopping.is_set() or replaced:
                process.stdin.close()
            elif time.monotonic() > look_s:
                replaced, look_s = self._changed(launch), time.monotonic() + pause_s
            (self._abort if self._stopping.is_set() else self._stopping).wait(TICK_S)
        process.stdin.close()
        return None if replaced else process.returncode

    def _changed(self, launch: Launch) -> bool:
        with suppress(BlockTrainError, OSError):
            wanted = self._launch()
            return isinstance(wanted, Launch) and wanted != launch
        return False

    @contextmanager
    def _alone(self) -> Iterator[int | None]:
        """Holds the folder's lock. The command inherits it and keeps it when this process is killed, so that its
        successor waits until the command has submitted what is done. Gives None if told to stop meanwhile."""
        lock = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, OWNER_ONLY)
        try:
            yield lock if self._acquired(lock) else None
        finally:
            os.close(lock)

    def _acquired(self, lock: int) -> bool:
        give_up_s = time.monotonic() + TAKEOVER_S
        while not self._stopping.is_set():
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            self._set("waiting", "the process before it submits its work")
            if time.monotonic() > give_up_s:
                process = os.pread(lock, 20, 0).decode().strip() or "unknown"
                raise StorageError(
                    f"process {process} still uses {self.folder}: end it, or give this fleet another --dir and --name"
                )
            self._stopping.wait(TICK_S)
        return False

    @contextmanager
    def _log(self) -> Iterator[IO[bytes]]:
        path = self.folder / LOG_FILE
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_name(f"{LOG_FILE}.1"))
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, OWNER_ONLY), "ab") as file:
            yield file

    def _last_line(self) -> str:
        with suppress(OSError), (self.folder / LOG_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
            return lines[-1].removeprefix("error: ") if lines else "it printed nothing"
        return f"read {self.folder / LOG_FILE}"

    def _set(self, state: str, note: str = "", starts: int = 0) -> None:
        self._state = CommandState(state, note, self._state.starts + starts)
        self._report(self._state)


def start(launch: Launch, lock: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*SHELL, sys.executable, "-m", "blocktrain", "--with-parent", *launch.words],
        stdin=subprocess.PIPE,  # closes with this process
        stdout=subprocess.DEVNULL,  # a coordinator prints its invite, which is a secret
        stderr=log,
        start_new_session=True,
        pass_fds=[lock],
        env=environment(os.environ),
        cwd=launch.work_folder,
    )


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """Without Ray's variables, one of which may hold its access token."""
    return {name: value for name, value in own.items() if not name.startswith("RAY_")}


def kill_group(number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal.SIGKILL)
