"""Old bugs, planted again: the simulator finds each of them, with the invariant that it breaks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blocktrain.sim.seeds import report, run_seed, scratch
from blocktrain.swarm.coordinator import server
from blocktrain.swarm.coordinator.merging import Merger
from blocktrain.swarm.ledger import open_rounds
from blocktrain.swarm.ledger import rounds as ledger_rounds
from blocktrain.swarm.ledger.database import LedgerPart
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.rounds import RoundsPart
from blocktrain.swarm.policy import leases
from blocktrain.swarm.run_clock import RunClock


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with scratch() as folder:
        yield folder


def merges_an_update_twice(patch: pytest.MonkeyPatch) -> None:
    """The first of a round goes into the mean a second time."""
    versions = Merger.versions

    def twice(self: Merger, round: Any, updates: Sequence[Any], weights: Any) -> Any:
        return versions(self, round, [*updates, *updates[:1]], weights)

    patch.setattr(Merger, "versions", twice)


def forgets_to_expire_leases(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger_rounds, "_expire_leases", lambda *_: None)


def acknowledges_before_the_commit_is_synced(patch: pytest.MonkeyPatch) -> None:
    transaction = LedgerPart.transaction
    patch.setattr(LedgerPart, "transaction", lambda self, synced=True: transaction(self, synced=False))


def renewals_move_the_deadline(patch: pytest.MonkeyPatch) -> None:
    """A lease that is asked for again is a new one, with all its time, again and again."""
    offer = leases._offer

    def renewing(worker, candidate, now_s, spec):
        grant = offer(worker, candidate, now_s, spec)
        if getattr(grant, "granted_s", None) is None:
            return grant
        return replace(grant, deadline_at_s=now_s + candidate.round.limit_s)

    patch.setattr(leases, "_offer", renewing)


def loses_waiting_updates_on_restart(patch: pytest.MonkeyPatch) -> None:
    """What waits to be merged is kept in memory: a new coordinator does not know it."""
    own: dict[int, set[str]] = {}
    record, waiting = Ledger.record_update, Ledger.waiting_updates

    def recorded(self, new):
        own.setdefault(id(self.database), set()).add(new.id)
        return record(self, new)

    def known(self, phase):
        return tuple(x for x in waiting(self, phase) if x.id in own.get(id(self.database), ()))

    patch.setattr(Ledger, "record_update", recorded)
    patch.setattr(Ledger, "waiting_updates", known)
    patch.setattr(RoundsPart, "merge", _merge_of_a_list(RoundsPart.merge))


def _merge_of_a_list(merge: Callable[..., bool]) -> Callable[..., bool]:
    """The check that a phase ends with all its updates was added against this bug."""

    def merged(self, *args):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(ledger_rounds, "_covers_all_waiting", lambda *_: True)
            return merge(self, *args)

    return merged


def measures_durations_with_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    """Clocks that are there already stay as they are: other tests' coordinators may still run in threads."""
    made, read = RunClock.__init__, RunClock.__call__

    def keep_wall(self, latest_s, wall=time.time, monotonic=time.monotonic):
        made(self, latest_s, wall, monotonic)
        self._wall = wall

    patch.setattr(RunClock, "__init__", keep_wall)
    patch.setattr(RunClock, "__call__", lambda self: self._wall() if hasattr(self, "_wall") else read(self))


def starts_on_a_ledger_that_lost_acknowledged_updates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(server, "_require_head", lambda *_: None)


def misses_a_change_that_another_coordinator_made(patch: pytest.MonkeyPatch) -> None:
    with_changes = open_rounds._with_changes
    patch.setattr(open_rounds, "_with_changes", lambda round, changes: with_changes(round, changes[:-1]))


PLANTED = [  # the bug, the first of the seeds that are tried, and the invariants that it may break
    (merges_an_update_twice, 1, {"updates are merged once"}),
    (forgets_to_expire_leases, 0, {"leases expire"}),
    (acknowledges_before_the_commit_is_synced, 14, {"acknowledged updates are kept"}),
    (renewals_move_the_deadline, 1, {"renewals move nothing"}),
    (loses_waiting_updates_on_restart, 6, {"acknowledged updates are merged", "no round waits past its ceiling"}),
    (starts_on_a_ledger_that_lost_acknowledged_updates, 73, {"no unexpected errors"}),
    (measures_durations_with_the_wall_clock, 625, {"no round waits past its ceiling"}),
    (
        misses_a_change_that_another_coordinator_made,
        4,
        {"no work is given twice", "a new coordinator has the same state"},
    ),
]
MOST_SEEDS = 30


@pytest.mark.parametrize("bug, first, invariants", PLANTED, ids=lambda x: getattr(x, "__name__", None))
def test_the_simulator_finds_a_planted_bug(folder, monkeypatch, bug, first, invariants):
    bug(monkeypatch)
    broken = (run_seed(seed, folder).invariant for seed in range(first, first + MOST_SEEDS))
    assert next(filter(None, broken), None) in invariants


def test_a_failure_is_told_with_its_seed_and_the_shortest_schedule_found(folder, monkeypatch):
    forgets_to_expire_leases(monkeypatch)
    failed, lines = run_seed(0, folder), []
    short = report(failed, folder, lines.append)
    assert lines[0].startswith("seed 0 breaks an invariant: leases expire")
    assert len(short.schedule.faults) < len(failed.schedule.faults)
    assert [line for line in lines if line.startswith("    at ")] == [f"    {x}" for x in short.schedule.faults]
