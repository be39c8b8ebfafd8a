"""The ledger in a real SQLite file and in a real PostgreSQL. Faults are planned: a process ends at
its n-th statement, or before the commit, without another step."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from blocktrain.errors import ConfigError, LedgerConflict, LedgerUnavailable, StorageError
from blocktrain.spec import Phase, SwarmSpec
from blocktrain.swarm.ledger import database as ledger_database
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import MergeWeight, NewUpdate, NewVersion, RoundLoss, Run
from blocktrain.swarm.policy.rounds import Grant, LateUpdate, Round, next_round, open_round

ADA, BOB, EVE = (name * 64 for name in "abe")
SPEC = SwarmSpec(round_steps=10)
PHASE = Phase(0, blocks=(0, 1), below=(), ahead=(), steps=25)
FIRST = open_round(PHASE, 0, {0: 0, 1: 0}, step_start=0, limit_s=60.0, now_s=100.0, spec=SPEC)
RUN = Run(spec="name = 'r'", spec_digest="5" * 64, corpus_sha256="c" * 64, protocol=1, created_s=1.0)


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("postgres") if request.param == "postgresql" else tmp_path / "ledger.db")


@pytest.fixture
def ledger(where: str) -> Iterator[Ledger]:
    with closing(Ledger(where)) as ledger:
        yield ledger


@pytest.fixture
def started(ledger: Ledger) -> Ledger:
    start(ledger)
    return ledger


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def start(ledger: Ledger, first: Round = FIRST) -> None:
    ledger.add_initial_blocks({block: sha256(f"initial {block}") for block in PHASE.blocks}, now_s=99.0)
    for worker in (ADA, BOB, EVE):
        ledger.see_worker(worker, worker[:1], "cpu", 10**12, 2.5, now_s=100.0, nonce=1)
    ledger.open_phase(first)


def lease(ledger: Ledger, worker: str, now_s: float = 101.0) -> str:
    """A lease in the open round, on the shard after those that are taken."""
    round = ledger.open_rounds()[0]
    shard = len(round.leases)
    grant = Grant(worker, 0, round.number, round.base, shard, round.step_start, round.steps, now_s + 4, now_s + 60, "")
    granted = ledger.grant(grant, round, now_s)
    assert granted is not None
    return granted.id


def an_update(lease_id: str, worker: str = ADA, text: str = "", **changes: Any) -> NewUpdate:
    facts = NewUpdate(
        id=sha256(f"{lease_id}{text}"),
        lease=lease_id,
        worker=worker,
        phase=0,
        base={0: 0, 1: 0},
        tokens=5 * 10**9,
        steps=10,
        codec="int8",
        num_bytes=3 * 10**9,
        norm=0.5,
        lag=0,
        weight=1.0,
        loss=2.25,
        received_s=110.0,
        signature="00" * 64,
    )
    return replace(facts, **changes)


def report(ledger: Ledger, worker: str) -> str:
    """An update of a new lease, recorded."""
    return ledger.record_update(an_update(lease(ledger, worker), worker))[0].id


def versions_after(round: Round, name: str = "") -> list[NewVersion]:
    return [
        NewVersion(block=block, version=version + 1, sha256=sha256(f"{block} {version + 1} {name}"))
        for block, version in round.base.items()
    ]


def merge(ledger: Ledger, closed: Round, update_ids: list[str], name: str = "") -> bool:
    following = next_round(closed, PHASE, 60.0, 200.0, SPEC)
    weights = [MergeWeight(update, 1.0, 1.0) for update in update_ids]
    return ledger.merge(closed, versions_after(closed, name), weights, following, 200.0, "all in")


def newest(ledger: Ledger) -> dict[int, int]:
    return ledger.consistent_manifest().versions


# The run, tokens, workers


def test_a_run_is_there_when_the_ledger_is_opened_again(ledger, where):
    assert ledger.run() is None
    assert ledger.create_run(replace(RUN, corpus={"train": "d" * 64})).corpus == {"train": "d" * 64}
    assert ledger.set_paused(True, now_s=1.0)
    with closing(Ledger(where)) as again:
        assert again.create_run(RUN) == again.run() == replace(RUN, corpus={"train": "d" * 64}, paused=True)


@pytest.mark.parametrize(
    "other, what",
    [({"spec_digest": "6" * 64}, "spec"), ({"corpus_sha256": "d" * 64}, "corpus")],
)
def test_a_ledger_of_another_run_is_refused_with_the_remedy(ledger, other, what):
    ledger.create_run(RUN)
    with pytest.raises(ConfigError, match=f"another {what}.*: continue that run .* or give this one another ledger"):
        ledger.create_run(replace(RUN, **other))
    assert ledger.run() == RUN


def test_a_run_of_a_newer_protocol_is_refused_and_one_of_an_older_protocol_goes_on(ledger):
    ledger.create_run(RUN)
    with pytest.raises(ConfigError, match="speaks 0: install the version that founded the run, or a later one"):
        ledger.create_run(replace(RUN, protocol=0))
    assert ledger.create_run(replace(RUN, protocol=2)) == RUN


def test_a_token_opens_its_role_until_it_is_revoked(ledger):
    ledger.add_access_token("first", "admin", "secret-1", now_s=1.0)
    ledger.add_access_token("second", "worker", "secret-2", now_s=2.0)
    assert (ledger.role_of("secret-1"), ledger.role_of("secret-2"), ledger.role_of("x")) == ("admin", "worker", None)
    assert ledger.revoke_access_token("first", now_s=3.0)
    assert not ledger.revoke_access_token("first", now_s=4.0)
    assert (ledger.role_of("secret-1"), ledger.role_of("secret-2")) == (None, "worker")
    assert [(x.name, x.role, x.revoked_s) for x in ledger.access_tokens()] == [
        ("first", "admin", 3.0),
        ("second", "worker", None),
    ]


def test_a_name_is_of_one_access_token_until_that_is_revoked(ledger):
    ledger.add_access_token("lab", "worker", "secret-1", now_s=1.0)
    remedy = "choose another name, or revoke that one first"
    with pytest.raises(ConfigError, match=f'an access token "lab" already: {remedy}'):
        ledger.add_access_token("lab", "admin", "secret-2", now_s=2.0)
    ledger.revoke_access_token("lab", now_s=3.0)
    ledger.add_access_token("lab", "viewer", "secret-3", now_s=4.0)
    assert (ledger.role_of("secret-2"), ledger.role_of("secret-3")) == (None, "viewer")


def test_an_unknown_role_is_refused_with_those_there_are(ledger):
    with pytest.raises(ConfigError, match='no role "root": choose one of admin, worker, viewer'):
        ledger.add_access_token("lab", "root", "secret", now_s=1.0)


def test_a_token_itself_is_nowhere_in_the_database(tmp_path):
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        ledger.add_access_token("lab", "worker", "the-secret-itself", now_s=1.0)
    assert not any(b"the-secret-itself" in path.read_bytes() for path in tmp_path.iterdir())


def test_a_worker_is_what_it_last_said_and_all_it_contributed(started):
    assert started.see_worker(ADA, "ada", "cuda", 2**40, 9.0, now_s=500.0, nonce=2)
    first = report(started, ADA)
    merge(started, started.open_rounds()[0], [first])
    report(started, ADA)
    started.record_update(an_update(lease(started, BOB), BOB, refused="absurd norm"))
    ada, bob, _ = started.workers()
    assert (ada.name, ada.device, ada.memory_bytes, ada.steps_per_s) == ("ada", "cuda", 2**40, 9.0)
    assert (ada.first_seen_s, ada.last_seen_s) == (100.0, 500.0)
    assert (ada.updates, ada.tokens, bob.updates, bob.tokens) == (2, 10**10, 0, 0)


# Rounds and leases


def test_a_round_comes_back_as_the_decisions_left_it(started):
    mine = started.open_rounds()[0]
    assert mine == FIRST
    grant = Grant(ADA, 0, 0, mine.base, 0, 0, 8, 105.0, 161.0, "because")
    granted = started.grant(grant, mine, now_s=101.0)
    assert started.open_rounds()[0] == mine.with_grant(grant, 101.0)
    started.record_update(an_update(granted.id, steps=7))
    assert started.open_rounds()[0] == mine.with_grant(grant, 101.0).with_report(ADA, 7, 110.0)


def test_a_phase_opens_once(started):
    assert not started.open_phase(replace(FIRST, number=7))
    assert started.open_rounds() == {0: FIRST}


def test_asking_again_renews_the_lease(started):
    assert lease(started, ADA, now_s=101.0) == lease(started, ADA, now_s=150.0)
    (renewed,) = started.open_rounds()[0].leases
    assert (renewed.granted_s, renewed.deadline_at_s) == (150.0, 210.0)


def test_a_grant_decided_on_an_older_state_is_not_given(started):
    seen = started.open_rounds()[0]
    lease(started, ADA)
    late_decision = Grant(BOB, 0, 0, seen.base, 0, 0, 10, 105.0, 161.0, "shard 0 was free")
    assert started.grant(late_decision, seen, now_s=102.0) is None
    assert [x.worker for x in started.open_rounds()[0].leases] == [ADA]


def test_what_another_coordinator_writes_is_seen_in_a_round_that_was_read_before(started, where):
    lease(started, ADA)
    with closing(Ledger(where)) as other:
        lease(other, BOB)
        report(other, BOB)
        assert started.open_rounds() == other.open_rounds()
    assert [x.worker for x in started.open_rounds()[0].reported] == [BOB]


def test_a_round_that_is_known_is_the_one_in_the_database(started, where):
    """What a ledger keeps in memory after its own writes is what another ledger reads."""
    for now_s, who in enumerate((ADA, BOB, ADA)):
        lease(started, who, now_s=101.0 + now_s)
    report(started, ADA)
    with closing(Ledger(where)) as other:
        assert started.open_rounds() == other.open_rounds()


def test_the_writes_of_a_transaction_are_kept_together_or_not_at_all(started):
    before = started.open_rounds()

    def fail() -> None:
        with started.transaction() as transaction:
            lease(transaction, ADA)
            assert [x.worker for x in transaction.open_rounds()[0].leases] == [ADA]
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert started.open_rounds() == before
    with started.transaction() as transaction:
        lease(transaction, ADA)
    assert [x.worker for x in started.open_rounds()[0].leases] == [ADA]


def test_two_coordinators_never_give_one_shard_twice(started, where):
    seen, barrier = started.open_rounds()[0], Barrier(2)

    def race(worker: str) -> bool:
        with closing(Ledger(where)) as coordinator:
            barrier.wait()
            grant = Grant(worker, 0, 0, seen.base, 0, 0, 10, 105.0, 161.0, "")
            return coordinator.grant(grant, seen, 101.0) is not None

    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(race, [ADA, BOB])) == [False, True]
    assert [x.shard for x in started.open_rounds()[0].leases] == [0]


def test_a_round_is_extended_once_by_the_first_coordinator(started):
    seen = started.open_rounds()[0]
    assert started.extend_round(seen, 300.0, "too few")
    assert not started.extend_round(seen, 360.0, "too few")
    (record,) = started.rounds(0)
    assert (record.round.deadline_at_s, record.extensions, record.reason) == (300.0, 1, "too few")


# Updates


def test_sending_the_same_update_twice_gives_the_first_back(started):
    new = an_update(lease(started, ADA))
    recorded, duplicate = started.record_update(new)
    assert not duplicate
    assert started.record_update(replace(new, received_s=999.0)) == (recorded, True)
    assert started.waiting_updates(0) == (recorded,)


def test_an_update_reports_its_lease_and_a_refused_one_does_not(started):
    mine, other = lease(started, ADA), lease(started, BOB)
    started.record_update(an_update(mine))
    started.record_update(an_update(other, BOB, refused="NaN in block 0"))
    assert (started.lease(mine).state, started.lease(other).state) == ("reported", "open")
    assert [x.worker for x in started.open_rounds()[0].reported] == [ADA]
    assert [x.lease for x in started.waiting_updates(0)] == [mine]


def test_after_a_refusal_the_lease_may_report_something_better(started):
    mine = lease(started, ADA)
    started.record_update(an_update(mine, text="wild", refused="absurd norm"))
    assert started.record_update(an_update(mine, text="tame"))[1] is False


def test_a_second_update_for_one_lease_is_refused_with_the_remedy(started):
    mine = lease(started, ADA)
    started.record_update(an_update(mine, text="one"))
    with pytest.raises(LedgerConflict, match=f"lease {mine} has reported .*: .* ask for a new one"):
        started.record_update(an_update(mine, text="two"))
    assert len(started.waiting_updates(0)) == 1


def test_an_update_without_a_lease_changes_nothing(started):
    with pytest.raises(LedgerConflict, match="refused a contradiction"):
        started.record_update(an_update("no-such-lease"))
    assert started.contributions() == ()


def test_deadlines_are_learned_from_the_times_of_closed_rounds_without_their_late_updates(started):
    in_time, late = lease(started, ADA), lease(started, BOB)
    merge(started, started.open_rounds()[0], [started.record_update(an_update(in_time))[0].id])
    second = started.record_update(an_update(late, BOB, received_s=900.0))[0].id
    merge(started, started.open_rounds()[0], [second, report(started, EVE), report(started, ADA)])
    closed = [record.round for record in started.rounds(0) if record.closed_s is not None]
    assert started.past_round_times_s(0) == [round.took_s for round in closed] == [9.0, 9.0]


def test_an_update_after_its_round_waits_for_the_next_as_a_late_one(started):
    in_time, late = lease(started, ADA), lease(started, BOB)
    first = started.record_update(an_update(in_time))[0].id
    assert merge(started, started.open_rounds()[0], [first])
    assert started.lease(late).state == "expired"
    second = started.record_update(an_update(late, BOB, received_s=900.0))[0].id
    assert started.open_rounds()[0].late == (LateUpdate(BOB, 0, 1),)
    assert [x.round.took_s for x in started.rounds(0)] == [9.0, None]
    third = report(started, EVE)
    assert merge(started, started.open_rounds()[0], [second, third])
    assert [[x.worker for x in record.round.reported] for record in started.rounds(0)] == [[ADA], [EVE], []]
    assert started.rounds(0)[1].round.late == (LateUpdate(BOB, 0, 1),)


def test_contributions_are_listed_in_order_page_by_page(started):
    ids = [report(started, ADA), report(started, BOB)]
    refused = started.record_update(an_update(lease(started, EVE), EVE, refused="too stale"))[0].id
    merge(started, started.open_rounds()[0], ids)
    first, second = started.contributions(limit=2)
    (third,) = started.contributions(after=second.update.number)
    assert [x.update.id for x in (first, second, third)] == [*ids, refused]
    assert [(x.worker_name, x.round, x.shard, x.update.merged_round) for x in (first, second, third)] == [
        ("a", 0, 0, 0),
        ("b", 0, 1, 0),
        ("e", 0, 2, None),
    ]


def test_norms_are_those_of_the_updates_merged_last(started):
    for norm in (1.0, 2.0):
        ids = [started.record_update(an_update(lease(started, ADA), norm=norm))[0].id]
        merge(started, started.open_rounds()[0], ids)
    report(started, ADA)
    assert started.recent_norms(0) == (2.0, 1.0)
    assert started.recent_norms(0, limit=1) == (2.0,)


def test_the_loss_of_a_round_is_that_of_its_updates_weighed_by_tokens(started):
    ids = [
        started.record_update(an_update(lease(started, worker), worker, loss=loss, tokens=tokens))[0].id
        for worker, loss, tokens in ((ADA, 1.0, 10**12), (BOB, 4.0, 2 * 10**12))
    ]
    merge(started, started.open_rounds()[0], ids)
    report(started, EVE)  # not merged yet
    expected = RoundLoss(phase=0, round=0, step=0, at_s=200.0, loss=3.0, updates=2, tokens=3e12)
    assert started.round_losses() == (expected,)


# Merging


def test_a_merge_closes_the_round_and_opens_the_next(started):
    closed_ids = [report(started, ADA), report(started, BOB)]
    closed = started.open_rounds()[0]
    assert merge(started, closed, closed_ids)
    assert newest(started) == {0: 1, 1: 1}
    assert started.open_rounds()[0] == next_round(closed, PHASE, 60.0, 200.0, SPEC)
    assert started.waiting_updates(0) == ()
    assert {started.update(id).merged_round for id in closed_ids} == {0}
    assert [(x.closed_s, x.reason) for x in started.rounds(0)] == [(200.0, "all in"), (None, "open")]
    assert [(x.step, x.finished) for x in started.phases()] == [(10, False)]
    assert [(x.version, x.parent, x.round) for x in started.versions(1)] == [(0, None, None), (1, 0, 0)]


def test_the_last_merge_finishes_the_phase(started):
    for _ in range(3):
        ids = [report(started, ADA)]
        merge(started, started.open_rounds()[0], ids)
    assert started.open_rounds() == {}
    assert [(x.step, x.finished) for x in started.phases()] == [(PHASE.steps, True)]
    assert newest(started) == {0: 3, 1: 3}


def test_merging_a_round_twice_merges_it_once(started):
    ids = [report(started, ADA)]
    closed = started.open_rounds()[0]
    assert merge(started, closed, ids, name="first")
    assert not merge(started, closed, ids, name="second")
    assert newest(started) == {0: 1, 1: 1}
    assert started.version(0, 1).sha256 == sha256("0 1 first")


def test_coordinators_that_race_merge_exactly_once(started, where):
    for number in range(2):
        ids, barrier = [report(started, ADA), report(started, BOB)], Barrier(4)
        closed = started.open_rounds()[0]

        def race(name: str, closed: Round = closed, ids: list[str] = ids, barrier: Barrier = barrier) -> bool:
            with closing(Ledger(where)) as coordinator:
                barrier.wait()
                return merge(coordinator, closed, ids, name)

        with ThreadPoolExecutor() as pool:
            assert sorted(pool.map(race, "wxyz")) == [False, False, False, True]
        assert newest(started) == {0: number + 1, 1: number + 1}
        assert len({started.version(block, number + 1).sha256 for block in (0, 1)}) == 2


@pytest.mark.parametrize("version", [0, 1, 3])
def test_versions_follow_each_other_or_nothing_is_merged(started, version):
    ids = [report(started, ADA)]
    merge(started, started.open_rounds()[0], ids)
    ids, closed = [report(started, ADA)], started.open_rounds()[0]
    wrong = [NewVersion(block=0, version=version, sha256=sha256("wrong"))]
    with pytest.raises(LedgerConflict, match="versions follow each other"):
        started.merge(closed, wrong, [MergeWeight(x, 1.0, 1.0) for x in ids], None, 300.0, "")
    assert newest(started) == {0: 1, 1: 1}
    assert started.open_rounds()[0] == closed
    assert [x.id for x in started.waiting_updates(0)] == ids


def test_an_update_is_merged_at_most_once_or_nothing_is_merged(started):
    ids = [report(started, ADA)]
    merge(started, started.open_rounds()[0], ids)
    closed = started.open_rounds()[0]
    with pytest.raises(LedgerConflict, match="1 of 1 updates do not wait to be merged in phase 1"):
        merge(started, closed, ids)
    assert started.open_rounds()[0] == closed
    assert newest(started) == {0: 1, 1: 1}


@pytest.fixture
def ending(ledger: Ledger) -> Ledger:
    """The ten steps of its open round end the phase."""
    start(ledger, replace(FIRST, step_start=15))
    return ledger


def test_a_phase_does_not_end_without_an_update_that_came_meanwhile(ending):
    theirs = an_update(lease(ending, BOB), BOB)
    mine = report(ending, ADA)
    decided_on = ending.open_rounds()[0]
    ending.record_update(theirs)
    assert not merge(ending, decided_on, [mine])
    assert [x.id for x in ending.waiting_updates(0)] == [mine, theirs.id]
    assert merge(ending, ending.open_rounds()[0], [mine, theirs.id])
    assert ending.phases()[0].finished


def test_nothing_is_taken_into_a_phase_that_has_ended(ending):
    late = an_update(lease(ending, BOB), BOB)
    mine = report(ending, ADA)
    assert merge(ending, ending.open_rounds()[0], [mine])
    assert ending.record_update(late) is None
    assert ending.waiting_updates(0) == ()


@pytest.mark.parametrize("attempt", range(3))
def test_at_the_end_of_a_phase_an_update_is_merged_or_not_acknowledged(ending, where, attempt):
    late = an_update(lease(ending, BOB), BOB)
    mine, barrier = report(ending, ADA), Barrier(2)
    decided_on = ending.open_rounds()[0]

    def take_in() -> bool:
        with closing(Ledger(where)) as another:
            barrier.wait()
            return another.record_update(late) is not None

    def close() -> bool:
        barrier.wait()
        return merge(ending, decided_on, [mine])

    with ThreadPoolExecutor() as pool:
        acknowledged, closed = pool.submit(take_in), pool.submit(close)
        assert acknowledged.result() != closed.result()


def test_a_refused_update_is_never_merged(started):
    refused = started.record_update(an_update(lease(started, ADA), refused="bad signature"))[0].id
    with pytest.raises(LedgerConflict, match="do not wait to be merged"):
        merge(started, started.open_rounds()[0], [refused])


def test_an_initial_block_is_given_once(started):
    started.add_initial_blocks({0: sha256("initial 0"), 2: sha256("initial 2")}, now_s=500.0)
    assert newest(started) == {0: 0, 1: 0, 2: 0}
    with pytest.raises(LedgerConflict, match=r"block 0 began as .*: use the ledger's, or another ledger"):
        started.add_initial_blocks({0: sha256("other")}, now_s=500.0)


def test_reopening_keeps_everything(started, where):
    started.create_run(RUN)
    merge(started, started.open_rounds()[0], [report(started, ADA)])
    report(started, BOB)
    reads: list[Callable[[Ledger], object]] = [
        Ledger.run,
        Ledger.workers,
        Ledger.phases,
        Ledger.open_rounds,
        Ledger.consistent_manifest,
        Ledger.contributions,
        lambda ledger: ledger.rounds(0),
        lambda ledger: ledger.waiting_updates(0),
    ]
    before = [read(started) for read in reads]
    started.close()
    with closing(Ledger(where)) as again:
        assert [read(again) for read in reads] == before


# Evaluations, events, pruning


def test_a_manifest_has_the_newest_versions_and_no_composition_of_others(started):
    assert started.consistent_manifest().combine == {}
    evaluating = started.grant_evaluation(ADA, newest(started), now_s=1.0, deadline_at_s=60.0)
    assert started.evaluation_lease() == evaluating
    scores = [{"path": "stack", "ce": 1.5}]
    assert started.record_evaluation(evaluating.id, "valid", scores, {"stack": (0.25, 0.75)}, now_s=2.0)
    assert not started.record_evaluation(evaluating.id, "valid", [], {"stack": (1.0, 0.0)}, now_s=3.0)
    assert started.consistent_manifest().combine == {"stack": (0.25, 0.75)}
    merge(started, started.open_rounds()[0], [report(started, ADA)])
    manifest = started.consistent_manifest()
    assert manifest.versions == {0: 1, 1: 1}
    assert manifest.combine == {}
    assert manifest.evaluation.versions == {0: 0, 1: 0}
    assert started.evaluations() == (manifest.evaluation,)
    assert (manifest.evaluation.worker, manifest.evaluation.scores) == (ADA, scores)
    assert started.evaluation_lease(evaluating.id) == replace(evaluating, reported=True)


def test_live_blobs_are_what_someone_may_still_need(started):
    started.create_run(replace(RUN, corpus={"train": "d" * 64}))
    for number in range(2):
        closed, ids = started.open_rounds()[0], [report(started, ADA)]
        new = [
            replace(x, momentum_sha256=sha256(f"m{number}"), difference_sha256=sha256(f"d{number}"))
            for x in versions_after(closed)
        ]
        weights = [MergeWeight(x, 1.0, 1.0) for x in ids]
        started.merge(
            closed, new, weights, next_round(closed.with_report(ADA, 10, 1.0), PHASE, 60.0, 1.0, SPEC), 1.0, ""
        )
    newest = {sha256("0 2 "), sha256("1 2 "), sha256("m1"), sha256("d1"), "d" * 64}
    assert started.live_blobs(keep_versions=1) == newest
    started.grant_evaluation(ADA, {0: 1, 1: 0}, now_s=1.0, deadline_at_s=2.0)
    evaluated = {sha256("0 1 "), sha256("d0"), sha256("initial 1")}
    assert started.live_blobs(keep_versions=1) == newest | evaluated


@pytest.mark.parametrize(
    "base, built_on",
    [(0, ("initial 0", "initial 1")), (2, ("0 2 ", "1 2 ", "0 1 ", "1 1 "))],
)
def test_the_versions_that_a_waiting_update_goes_by_are_kept_until_it_is_merged(started, base, built_on):
    for _ in range(2):
        merge(started, started.open_rounds()[0], [report(started, ADA)])
    late = an_update(lease(started, BOB), BOB, base={0: base, 1: base}, lag=2 - base)
    waiting = started.record_update(late)[0].id
    assert {*map(sha256, built_on), waiting} <= started.live_blobs(keep_versions=1)


def test_events_are_paged_and_only_the_newest_are_kept(ledger):
    for number in range(5):
        ledger.add_event("lease", f"event {number}", now_s=float(number), data={"n": number})
    last_two = ledger.events(limit=2)
    assert [x.text for x in last_two] == ["event 3", "event 4"]
    assert [x.text for x in ledger.events(before=last_two[0].number, limit=2)] == ["event 1", "event 2"]
    assert [x.data for x in ledger.events(after=last_two[0].number)] == [{"n": 4}]
    assert ledger.prune_events(keep=2) == 3
    assert ledger.prune_events(keep=2) == 0
    assert ledger.events() == last_two


# Faults


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

        event.listen(ledger.database.engine, "after_cursor_execute", planned)
        event.listen(ledger.database.engine, "commit", planned)
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
    with pytest.raises(LedgerUnavailable, match=r"127\.0\.0\.1:1/x does not answer .*: try again"):
        Ledger("postgresql+psycopg://user:secret@127.0.0.1:1/x")


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
    with closing(Ledger(tmp_path / "ledger.db")) as ledger, ledger.database.reading() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {x}").scalar() for x in ("journal_mode", "synchronous")]
        ledger.add_event("kind", "while another reads", now_s=1.0)
    assert pragmas == ["wal", 2]


@pytest.mark.parametrize("synced, level", [(True, 2), (False, 1)])
def test_what_a_power_cut_may_take_is_not_synced_and_the_next_that_it_may_not_take_is(tmp_path, synced, level):
    def look(synced: bool) -> int:
        with ledger.transaction(synced) as transaction, transaction._writing() as connection:
            return connection.exec_driver_sql("PRAGMA synchronous").scalar()

    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        assert look(not synced) == 3 - level
        assert look(synced) == level


def test_a_new_file_that_another_is_opening_is_waited_for(tmp_path, monkeypatch):
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(ledger_database.time, "sleep", lambda seconds: other.execute("ROLLBACK"))
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
