"""The ledger and faults, planned: a process ends at its n-th statement or before the commit, without another step;
databases that are locked, broken or not there; steps in any order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any

import psycopg.pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_steps import (
    ADA,
    BOB,
    EVE,
    FIRST,
    PHASE,
    RUN,
    SPEC,
    an_update,
    lease,
    merge,
    newest,
    report,
    start,
)
from sqlalchemy import text

from blocktrain.errors import ConfigError, LedgerUnavailable, StorageError
from blocktrain.swarm.ledger.drivers import postgres as ledger_postgres
from blocktrain.swarm.ledger.drivers import sqlite as ledger_sqlite
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import NewUpdate
from blocktrain.swarm.policy.rounds import Round, next_round


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_dies_inside_a_merge_leaves_the_old_state(started, where):
    ids = [report(started, ADA), report(started, BOB)]
    closed, before = started.open_rounds()[0], started.contributions()
    started.close()

    def end_at(statement: int) -> None:
        ledger, statements = Ledger(where), count()

        def planned(*arguments: object) -> None:
            if next(statements) == statement:
                os._exit(9)

        ledger.database.watch(statement=planned, commit=planned)
        merge(ledger, closed, ids)
        os._exit(0)

    for statement in count():
        process = multiprocessing.get_context("fork").Process(target=end_at, args=(statement,))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == 9
        with closing(Ledger(where)) as ledger:
            assert newest(ledger) == {0: 0, 1: 0}
            assert ledger.open_rounds()[0] == closed
            assert ledger.contributions() == before
    assert statement > 5
    with closing(Ledger(where)) as ledger:
        assert newest(ledger) == {0: 1, 1: 1}


def test_a_locked_ledger_may_be_tried_again(tmp_path):
    path = tmp_path / "ledger.db"
    with closing(Ledger(path, lock_timeout_s=0.01)) as ledger:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LedgerUnavailable, match=r"db does not answer \(database is locked\): .* try again"):
                ledger.add_event("kind", "text", now_s=1.0)
            assert ledger.events() == ()
        ledger.add_event("kind", "text", now_s=1.0)


def test_a_database_that_cannot_be_reached_may_be_tried_again():
    pytest.importorskip("psycopg")
    with pytest.raises(LedgerUnavailable, match=r"127\.0\.0\.1:1/x does not answer .*: .* try again"):
        Ledger("postgresql+psycopg://user:secret@127.0.0.1:1/x")


def test_a_server_that_keeps_the_connection_and_never_answers_is_given_up(postgres, monkeypatch):
    with closing(Ledger(postgres)) as ledger, ExitStack() as after:

        def stop_the_server(connection: Any) -> None:
            server = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
            after.callback(os.kill, server, signal.SIGCONT)
            os.kill(server, signal.SIGSTOP)
            monkeypatch.setattr(ledger_postgres, "ANSWER_LIMIT_S", 0.0)

        never_answered = pytest.raises(LedgerUnavailable, match=r"does not answer \(no answer in 0 s\): .* try again")
        with never_answered, ledger.transaction() as transaction, transaction._writing() as connection:
            stop_the_server(connection)
            transaction.add_event("kind", "never answered", now_s=1.0)
        monkeypatch.undo()
        ledger.add_event("kind", "on a new connection", now_s=2.0)
        assert [event.text for event in ledger.events()] == ["on a new connection"]


@pytest.mark.parametrize("fresh_s", [0.0, 3600.0], ids=["it is asked first", "it was just used"])
def test_a_connection_that_the_server_ended_costs_at_most_one_try(postgres, monkeypatch, fresh_s):
    monkeypatch.setattr(ledger_postgres, "FRESH_S", fresh_s)
    with closing(Ledger(postgres)) as ledger, closing(Ledger(postgres)) as other:
        with ledger.database.reading() as connection:
            server = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        with other.database.writing() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:server, 10000)"), {"server": server})
        with pytest.raises(LedgerUnavailable) if fresh_s else nullcontext():
            ledger.run()
        assert ledger.run() is None


def test_a_single_statement_on_postgresql_begins_no_transaction(postgres):
    with closing(Ledger(postgres)) as ledger, ledger.database.reading(single=True) as connection:
        connection.execute(text("SELECT 1"))
        driver: Any = connection.connection.driver_connection
        assert driver.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_a_file_that_is_no_database_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "ledger.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StorageError, match=r"ledger\.db cannot be used \(file is not a database\): .* restore it"):
        Ledger(tmp_path / "ledger.db")


def test_a_folder_that_is_not_there_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(StorageError, match=r"cannot be used .*: make it readable and writable"):
        Ledger(tmp_path / "missing" / "ledger.db")


@pytest.mark.parametrize("url", ["nonsense://x", "://", "postgresql+nonsense://x/y"])
def test_a_url_that_can_hold_no_ledger_is_refused_with_an_example(url):
    with pytest.raises(ConfigError, match=r"give a file's path, or .* postgresql://user@host/name"):
        Ledger(url)


def test_sqlite_syncs_every_commit_and_lets_readers_read(tmp_path):
    with closing(Ledger(tmp_path / "ledger.db")) as ledger, ledger.database.quick_reading() as connection:
        pragmas = [connection.execute(text(f"PRAGMA {x}")).scalar() for x in ("journal_mode", "synchronous")]
        ledger.add_event("kind", "while another reads", now_s=1.0)
    assert pragmas == ["wal", 2]


@pytest.mark.parametrize("synced, level", [(True, 2), (False, 1)])
def test_what_a_power_cut_may_take_is_not_synced_and_the_next_that_it_may_not_take_is(tmp_path, synced, level):
    def look(synced: bool) -> int:
        with ledger.transaction(synced) as transaction, transaction._writing() as connection:
            return connection.execute(text("PRAGMA synchronous")).scalar()

    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        assert look(not synced) == 3 - level
        assert look(synced) == level


def test_a_new_file_that_another_is_opening_is_waited_for(tmp_path, monkeypatch):
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(ledger_sqlite.time, "sleep", lambda seconds: other.execute("ROLLBACK"))
        Ledger(tmp_path / "ledger.db", lock_timeout_s=0.01).close()


def test_coordinators_may_start_at_the_same_instant(where):
    barrier = Barrier(4)

    def begin(number: int) -> None:
        barrier.wait()
        with closing(Ledger(where)) as coordinator:
            coordinator.create_run(RUN)
            start(coordinator)

    with ThreadPoolExecutor() as pool:
        list(pool.map(begin, range(4)))
    with closing(Ledger(where)) as ledger:
        assert (ledger.run(), ledger.open_rounds(), newest(ledger)) == (RUN, {0: FIRST}, {0: 0, 1: 0})


def test_a_worker_s_request_counts_once_and_an_older_one_not_at_all(started):
    assert started.see_worker(ADA, "ada", "cpu", 1, 9.0, now_s=500.0, nonce=7)
    for nonce in (7, 6):
        assert not started.see_worker(ADA, "eve", "cpu", 1, 9.0, now_s=600.0, nonce=nonce)
    assert [(x.name, x.last_seen_s) for x in started.workers() if x.id == ADA] == [("ada", 500.0)]


def test_threads_may_share_a_ledger(ledger):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: ledger.see_worker(ADA, f"{n}", "cpu", 1, 1.0, now_s=1.0, nonce=n), range(40)))
    assert [x.id for x in ledger.workers()] == [ADA]


# Any order

steps = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.sampled_from([ADA, BOB, EVE])),
        st.tuples(st.just("again"), st.integers(0, 9)),
        st.tuples(st.just("merge"), st.integers(0, 3)),
        st.tuples(st.just("old merge"), st.integers(0, 9)),
    ),
    max_size=12,
)


@settings(max_examples=25)
@given(steps)
def test_in_any_order_versions_grow_by_one_and_no_acknowledged_update_is_lost(steps):
    with tempfile.TemporaryDirectory() as folder, closing(Ledger(Path(folder) / "ledger.db")) as ledger:
        start(ledger)
        sent: dict[str, NewUpdate] = {}
        closed: list[Round] = []
        for action, choice in steps:
            _take(ledger, action, choice, sent, closed)
            _check(ledger, sent, len(closed))


def _take(ledger: Ledger, action: str, choice: Any, sent: dict[str, NewUpdate], closed: list[Round]) -> None:
    round = ledger.open_rounds().get(0)
    if action == "update" and round and choice not in {x.worker for x in round.reported}:
        new = an_update(lease(ledger, choice), choice)
        sent[ledger.record_update(new)[0].id] = new
    if action == "again" and sent:
        new = list(sent.values())[choice % len(sent)]
        assert ledger.record_update(new)[1]
    if action == "merge" and round and round.reported:
        waiting = [x.id for x in ledger.waiting_updates(0)]
        if merge(ledger, round, waiting[choice:]):
            closed.append(round)
        else:
            assert next_round(round, PHASE, 60.0, 200.0, SPEC) is None
            assert choice > 0
    if action == "old merge" and closed:
        assert not merge(ledger, closed[choice % len(closed)], list(sent))


def _check(ledger: Ledger, sent: dict[str, NewUpdate], num_merges: int) -> None:
    for block in PHASE.blocks:
        assert [x.version for x in ledger.versions(block)] == list(range(num_merges + 1))
    assert {x.update.id for x in ledger.contributions()} == set(sent)
    merged = {x.update.id for x in ledger.contributions() if x.update.merged_round is not None}
    assert {x.id for x in ledger.waiting_updates(0)} == set(sent) - merged


def test_one_database_holds_several_runs_each_in_a_schema_of_its_own(postgres):
    with closing(Ledger(postgres)) as one, closing(Ledger(f"{postgres}_b")) as other:
        one.create_run(RUN)
        assert other.create_run(replace(RUN, spec_digest="6" * 64)).spec_digest == "6" * 64
        start(one)
        assert (len(one.workers()), len(other.workers())) == (3, 0)
        with pytest.raises(ConfigError, match=r"another spec.*another\s+schema"):
            other.create_run(RUN)


@pytest.mark.parametrize("schema", ["Run-A", "a;drop", "x" * 64])
def test_a_schema_with_a_strange_name_is_refused(schema):
    with pytest.raises(ConfigError, match="not the name of a schema"):
        Ledger(f"postgresql://nobody@127.0.0.1:1/none?schema={schema}")
