"""The supervisor of a real command: started again, stopped by the end of its stdin, one process per folder."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blocktrain.fleet import supervisor
from blocktrain.fleet.supervisor import CommandState, Launch, Supervisor, environment
from blocktrain.io import restarts

LIMIT_S = 100.0


class Watched(Supervisor):
    """Its states can be waited for."""

    def __init__(self, folder: Path, launch: Callable[[], Launch | str], **options: Any) -> None:
        self._states: queue.Queue[CommandState] = queue.Queue()
        super().__init__(folder, launch, report=self._states.put, **options)
        self.start()

    def until(self, state: str, note: str = "") -> CommandState:
        while True:
            found = self._states.get(timeout=LIMIT_S)
            if found.state == state and note in found.note:
                return found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "LONGEST_PAUSE_S", 0.01)
    for name in ("FIRST_PAUSE_S", "TICK_S"):
        monkeypatch.setattr(supervisor, name, 0.01)


def waits_for_stdin() -> Launch:
    """A command that runs until its stdin ends."""
    return Launch(("status", "-"))


def test_a_command_that_fails_is_started_again_and_says_why(tmp_path):
    watched = Watched(tmp_path, lambda: Launch(("status", "nonsense")))
    watched.until("failing", "exit code 2: this is not an invite")
    assert watched.until("failing").starts == 2
    assert watched.stop(LIMIT_S)
    assert watched.state.state == "stopped"


def test_a_command_that_may_finish_is_not_started_again(tmp_path):
    watched = Watched(tmp_path, lambda: Launch(("keys", str(tmp_path / "key"))), may_finish=True)
    assert watched.until("finished").starts == 1


def test_a_command_that_cannot_start_yet_says_what_it_waits_for(tmp_path):
    watched = Watched(tmp_path, lambda: "no coordinator yet")
    watched.until("waiting", "no coordinator yet")
    assert watched.stop(LIMIT_S)


def test_two_of_one_folder_run_one_after_the_other(tmp_path):
    first = Watched(tmp_path, waits_for_stdin)
    first.until("running")
    second = Watched(tmp_path, waits_for_stdin)
    second.until("waiting", "the process before it submits")
    assert first.stop(LIMIT_S)
    second.until("running")
    assert second.stop(LIMIT_S)


def test_a_command_is_started_again_when_what_it_depends_on_changes(tmp_path):
    launches = iter([waits_for_stdin(), "not known now", Launch(("keys", str(tmp_path / "key")))])
    last = Launch(("keys", str(tmp_path / "key")))
    watched = Watched(tmp_path, lambda: next(launches, last), follow_s=0.01, may_finish=True)
    assert watched.until("finished").starts == 2


def test_the_command_gets_nothing_of_ray():
    own = {"PATH": "/bin", "RAY_AUTH_TOKEN": "secret", "OMP_NUM_THREADS": "2"}
    assert environment(own) == {"PATH": "/bin", "OMP_NUM_THREADS": "2"}
