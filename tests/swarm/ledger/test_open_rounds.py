"""Open rounds as several coordinators of one ledger see them: what each keeps in memory is what is in the database, and
a change costs as much in a large round as in a small one."""

from __future__ import annotations

import random
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_steps import ADA, BOB, EVE, PHASE, SPEC, an_update, lease, merge, report, start, versions_after
from sqlalchemy import event

from blocktrain.errors import LedgerConflict
from blocktrain.swarm.ledger.drivers.sqlite import QuickConnection
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.open_rounds import mark_after
from blocktrain.swarm.ledger.records import MergeWeight
from blocktrain.swarm.policy.rounds import Grant, LateUpdate, Round, next_round
from blocktrain.swarm.policy.track_record import after_a_miss

LONG = replace(PHASE, steps=10**6)


@pytest.fixture
def other(started: Ledger, where: str) -> Iterator[Ledger]:
    with closing(Ledger(where)) as other:
        yield other


@contextmanager
def not_kept(ledger: Ledger) -> Iterator[Ledger]:
    """A transaction that fails in the end."""
    with suppress(_Planned), ledger.transaction() as transaction:
        yield transaction
        raise _Planned


class _Planned(Exception):
    pass


def read_anew(where: str) -> dict[int, Round]:
    with closing(Ledger(where)) as new:
        return new.open_rounds()


# What a change costs


@contextmanager
def rows_read(ledgers: Sequence[Ledger], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of rows that each statement gives."""
    numbers, execute = list[int](), QuickConnection.execute

    def counted(self: Any, *given: Any) -> Any:
        rows = execute(self, *given)
        numbers.append(len(rows.all()))
        return rows

    def count(connection: Any, cursor: Any, *_: Any) -> None:
        numbers.append(cursor.rowcount if cursor.description else 0)

    with monkeypatch.context() as patch, ExitStack() as after:
        patch.setattr(QuickConnection, "execute", counted)
        for database in (ledger.database for ledger in ledgers if not ledger.database.is_sqlite):
            event.listen(database.engine, "after_cursor_execute", count)
            after.callback(event.remove, database.engine, "after_cursor_execute", count)
        yield numbers


def leased_by_many(ledger: Ledger, number: int) -> list[str]:
    """So many more workers, which have leases in the open round."""
    taken = len(ledger.open_rounds()[0].leases)
    workers = [f"{taken + i:064x}" for i in range(number)]
    with ledger.transaction() as transaction:
        for worker in workers:
            transaction.see_worker(worker, "w", "cpu", 1, 1.0, now_s=100.0, nonce=1)
            lease(transaction, worker)
    return workers


def test_with_two_coordinators_a_lease_and_an_update_read_as_much_in_a_large_round_as_in_a_small_one(
    started, other, monkeypatch
):
    """They take turns: each sees what the other one wrote before it writes."""
    costs = []
    for more in (10, 10, 200):
        workers = leased_by_many(started, more)
        other.open_rounds()
        with rows_read((started, other), monkeypatch) as numbers:
            for turn, worker in enumerate(workers[:4]):
                with (other, started)[turn % 2].transaction() as transaction:
                    transaction.record_update(an_update(f"0-0-{worker}", worker))
                    assert transaction.open_rounds()[0].lease_of(worker).reported_s == 110.0
            for turn, worker in enumerate(workers[4:8]):
                lease((other, started)[turn % 2], worker, now_s=200.0)
        costs.append((len(numbers), sum(numbers)))
    assert costs[1] == costs[2]
    assert sum(numbers) < 100


# What is kept in memory is what is in the database


def test_what_a_failed_transaction_changed_is_not_in_what_is_read_after_the_next_change(started, other, where):
    lease(started, EVE)
    assert other.open_rounds() == started.open_rounds()
    with not_kept(started) as transaction:
        lease(transaction, ADA)
        assert transaction.open_rounds()[0].lease_of(ADA) is not None
    report(other, BOB)  # two changes: the first has the place of the one that was not kept
    assert started.open_rounds() == other.open_rounds() == read_anew(where)
    assert [x.worker for x in started.open_rounds()[0].leases] == [BOB, EVE]


def test_changes_that_the_database_has_lost_are_not_kept_in_memory(tmp_path):
    """As a standby may that takes over before it has everything."""
    path, copy = tmp_path / "ledger.db", tmp_path / "copy.db"
    with closing(Ledger(path)) as one, closing(Ledger(path)) as other:
        start(one)
        lease(one, EVE)
        with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
            source.backup(target)
        lease(one, ADA)
        assert len(other.open_rounds()[0].leases) == 2
        with closing(sqlite3.connect(copy)) as source, closing(sqlite3.connect(path)) as target:
            source.backup(target)
        lease(other, BOB)
        report(other, BOB)
        assert one.open_rounds() == other.open_rounds() == read_anew(path)


def test_an_extended_round_is_read_with_its_new_deadline_and_no_lease_again(started, other, monkeypatch):
    leased_by_many(started, 50)
    seen = other.open_rounds()[0]
    assert started.extend_round(started.open_rounds()[0], 300.0, "too few")
    with rows_read((other,), monkeypatch) as numbers:
        assert other.open_rounds()[0] == replace(seen, deadline_at_s=300.0)
    assert sum(numbers) == 1


def test_a_late_update_shows_what_its_worker_owes_in_the_lease_that_it_has_now(started, other, where):
    late, in_time = lease(started, ADA), report(started, BOB)
    merge(started, started.open_rounds()[0], [in_time])
    lease_with_record(started, ADA, 120.0)
    assert other.open_rounds()[0].lease_of(ADA).owed == 2
    started.record_update(an_update(late, ADA))
    for ledger in (started, other):
        assert ledger.open_rounds() == read_anew(where)
    round = other.open_rounds()[0]
    assert (round.late, round.lease_of(ADA).owed, round.lease_of(ADA).delivered) == ((LateUpdate(ADA, 0, 0),), 1, 1)


def test_updates_that_are_left_out_leave_every_coordinator_s_round(started, other, where):
    in_time, late = report(started, EVE), lease(started, ADA)
    merge(started, started.open_rounds()[0], [in_time])
    started.record_update(an_update(late, ADA))
    report(started, ADA)
    report(started, BOB)
    assert other.open_rounds() == started.open_rounds()
    started.exclude(ADA, "banned", "because", now_s=130.0)
    assert other.open_rounds() == started.open_rounds() == read_anew(where)
    assert ([x.worker for x in other.open_rounds()[0].leases], other.open_rounds()[0].late) == ([BOB], ())


def test_marks_grow_and_two_that_follow_the_same_one_differ():
    mark = "0001" + "0000000a" + "000000ff" + "abcdefabcdef"
    after = mark_after(mark)
    assert (len(after), after[:20]) == (32, "00010000000a00000100")
    assert mark_after(mark) != after > mark


# Several coordinators in any order


def lease_with_record(ledger: Ledger, worker: str, now_s: float) -> str | None:
    """As `choose_work` gives one: it names what the worker owes. None if another coordinator was faster."""
    round, known = ledger.open_rounds()[0], ledger.track_record(worker)
    own = round.lease_of(worker)
    if own and own.reported_s is not None:
        return None
    shard = max((x.shard for x in round.leases), default=-1) + 1
    facts = (worker, 0, round.number, round.base, shard, round.step_start, 10, now_s + 4, now_s + 60)
    owed = after_a_miss(known.owed) if own else known.owed
    granted = ledger.grant(Grant(*facts, "", owed=owed, delivered=known.delivered), round, now_s)
    return granted.id if granted else None


class Life:
    """A run of three coordinators with clocks of their own, in steps that anyone of them takes."""

    def __init__(self, where: str | Path) -> None:
        self.where, self.ledgers = where, [Ledger(where) for _ in range(3)]
        self.now_s, self._excluded = 100.0, set[str]()
        start(self.ledgers[0])

    def close(self) -> None:
        for ledger in self.ledgers:
            ledger.close()

    def step(self, who: int, action: str, worker: str) -> None:
        self.now_s += 1
        ledger, now_s = self.ledgers[who], self.now_s - 3 * who
        if action in ("exclude", "merge", "roll back", "extend", "refused") or worker not in self._excluded:
            getattr(self, f"_{action.replace(' ', '_')}")(ledger, worker, now_s)

    def _lease(self, ledger: Ledger, worker: str, now_s: float) -> None:
        lease_with_record(ledger, worker, now_s)

    def _report(self, ledger: Ledger, worker: str, now_s: float, back: int = 0) -> None:
        number = ledger.open_rounds()[0].number - back
        if ledger.lease(f"0-{number}-{worker}"):
            with suppress(LedgerConflict):  # it has reported
                ledger.record_update(an_update(f"0-{number}-{worker}", worker, text=f"{now_s}", received_s=now_s))

    def _late(self, ledger: Ledger, worker: str, now_s: float) -> None:
        self._report(ledger, worker, now_s, back=1)

    def _refused(self, ledger: Ledger, worker: str, now_s: float) -> None:
        number = ledger.open_rounds()[0].number
        if ledger.lease(f"0-{number}-{worker}"):
            ledger.record_update(an_update(f"0-{number}-{worker}", worker, text=f"{now_s}", refused="absurd norm"))

    def _fail(self, ledger: Ledger, worker: str, now_s: float) -> None:
        with not_kept(ledger) as transaction:
            lease_with_record(transaction, worker, now_s)
            self._report(transaction, worker, now_s)
            transaction.open_rounds()

    def _extend(self, ledger: Ledger, worker: str, now_s: float) -> None:
        round = ledger.open_rounds()[0]
        assert ledger.extend_round(round, round.deadline_at_s + 7, "too few")

    def _exclude(self, ledger: Ledger, worker: str, now_s: float) -> None:
        self._excluded.add(worker)
        ledger.exclude(worker, "banned", "because", now_s)

    def _merge(self, ledger: Ledger, worker: str, now_s: float) -> None:
        round, waiting = ledger.open_rounds()[0], [x.id for x in ledger.waiting_updates(0)]
        if round.reported:
            weights = [MergeWeight(update, 1.0, 1.0) for update in waiting[len(waiting) // 2 :]]
            following = next_round(round, LONG, 60.0, now_s, SPEC)
            assert ledger.merge(round, versions_after(round, f"{now_s}"), weights, following, now_s, "all in")

    def _roll_back(self, ledger: Ledger, worker: str, now_s: float) -> None:
        round = ledger.open_rounds()[0]
        versions = versions_after(round, f"{now_s}")
        base = {block: version + 1 for block, version in round.base.items()}
        following = replace(round, number=round.number + 1, base=base, opened_s=now_s, leases=(), late=())
        assert ledger.roll_back(round, versions, dict.fromkeys(base, 0), following, None, "again", now_s)


ACTIONS = ("lease", "lease", "report", "report", "late", "refused", "fail", "extend", "exclude", "merge", "roll back")
STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(ACTIONS), st.sampled_from([ADA, BOB, EVE]), st.integers(0, 7)),
    max_size=30,
)


def check_any_order(where: str | Path, steps: Sequence[tuple[int, str, str, int]]) -> None:
    with closing(Life(where)) as life:
        for who, action, worker, looking in steps:
            life.step(who, action, worker)
            lookers = [ledger for i, ledger in enumerate(life.ledgers) if looking >> i & 1]
            if lookers:
                anew = read_anew(where)
                assert [ledger.open_rounds() for ledger in lookers] == [anew] * len(lookers)
        assert [ledger.open_rounds() for ledger in life.ledgers] == [read_anew(where)] * 3


@given(STEPS)
def test_in_any_order_every_coordinator_on_sqlite_knows_the_open_round_as_it_is(steps):
    with tempfile.TemporaryDirectory() as folder:
        check_any_order(Path(folder) / "ledger.db", steps)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])  # each has its own schema
@given(STEPS)
def test_in_any_order_every_coordinator_on_postgresql_knows_the_open_round_as_it_is(postgres, steps):
    check_any_order(f"{postgres}_{uuid.uuid4().hex[:8]}", steps)


def test_coordinators_that_commit_at_the_same_time_know_the_open_round_as_it_is(started, where):
    """Each has two threads, which lease, report and fail."""
    workers = leased_by_many(started, 12)

    def work(of: tuple[Ledger, list[str]]) -> None:
        ledger, mine = of
        chance = random.Random(mine[0])
        for worker in chance.choices(mine, k=12):
            if chance.random() < 0.3:
                with suppress(LedgerConflict), not_kept(ledger) as transaction:
                    transaction.record_update(an_update(f"0-0-{worker}", worker, text="not kept"))
            if chance.random() < 0.5:
                lease_with_record(ledger, worker, 130.0 + 10 * chance.random())
            else:
                with suppress(LedgerConflict):  # it has reported
                    ledger.record_update(an_update(f"0-0-{worker}", worker, text=f"{chance.random()}"))
            assert ledger.open_rounds()[0].lease_of(worker) is not None

    with closing(Ledger(where)) as other, ThreadPoolExecutor(4) as pool:
        shares = [workers[i : i + 3] for i in range(0, 12, 3)]
        list(pool.map(work, zip((started, other, started, other), shares, strict=True)))
        anew = read_anew(where)
        assert started.open_rounds() == other.open_rounds() == anew
        assert len(anew[0].reported) == len(started.waiting_updates(0)) > 0
