"""Merges in the ledger: each update and each round once, whoever races; and what a merge leaves to keep."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from threading import Barrier

import pytest
from ledger_steps import (
    ADA,
    BOB,
    FIRST,
    PHASE,
    RUN,
    SPEC,
    an_update,
    lease,
    merge,
    newest,
    report,
    sha256,
    start,
    versions_after,
)

from blocktrain.errors import LedgerConflict
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import MergeWeight, NewVersion
from blocktrain.swarm.policy.rounds import Round, next_round


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
