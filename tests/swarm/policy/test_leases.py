"""Leases: which work a worker gets, and when it is to ask again."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from blocktrain.swarm.policy.leases import (
    FEW_WAIT_S,
    RETRY_SHARE,
    SHORTEST_WAIT_S,
    NoWork,
    WorkerFacts,
)
from blocktrain.swarm.policy.rounds import (
    Grant,
    Lease,
)

sys.path.insert(0, str(Path(__file__).parent))
from made_rounds import OTHER, SPEC, a_round, ask, worker


def test_a_renewed_lease_keeps_its_times_and_moves_no_deadline():
    round = replace(a_round(), leases=(Lease(0, "w0", 10, 0.0, 40.0, 60.0),))
    for now_s in range(1, 60):
        grant = ask(worker("w0", speed=1e9), round, now_s=now_s)
        assert isinstance(grant, Grant)
        assert round.with_grant(grant, now_s) == round


@pytest.mark.parametrize("owed, moved", [(0, 2), (2, 2), (1, 1)])
def test_who_asks_again_after_its_deadline_gets_a_new_lease_and_owes_for_the_old_one(owed, moved):
    round = a_round(silent=1)
    grant = ask(replace(worker("w0"), owed=owed), round, now_s=61)
    assert isinstance(grant, Grant)
    assert (grant.owed, grant.deadline_at_s) == (moved, 121)
    assert not round.with_grant(grant, 61).awaited(61, SPEC)


def test_a_lease_that_nobody_waits_for_keeps_nobody_from_joining():
    """A worker that claimed to be done at once kept all others out of the round."""
    before = a_round(silent=1)
    round = replace(before, leases=(replace(before.leases[0], due_s=0.001, owed=2),))
    grant = ask(worker(), round, now_s=30)
    assert isinstance(grant, Grant)
    assert (grant.shard, grant.steps, grant.deadline_at_s) == (1, 10, 90)


def test_asking_again_never_takes_a_report_back():
    before = a_round(reported=1, silent=1)
    grant = ask(worker("w1"), before, now_s=31)
    assert isinstance(grant, Grant)
    assert before.with_grant(replace(grant, worker="w0"), 31) == before


@pytest.mark.parametrize("speed, steps", [(0.25, 10), (0.5, 10), (0.125, 6), (0.06, 2), (0.001, 1), (None, 10)])
def test_slow_machines_get_fewer_steps_not_later_deadlines(speed, steps):
    grant = ask(worker(speed=speed), a_round())
    assert isinstance(grant, Grant)
    assert (grant.steps, grant.deadline_at_s) == (steps, 60)


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300])
def test_a_speed_that_cannot_be_still_gets_a_sound_lease(speed):
    grant = ask(worker(speed=speed), a_round())
    assert isinstance(grant, Grant)
    assert 1 <= grant.steps <= 10


def test_a_lease_is_planned_to_end_before_even_a_short_deadline():
    grant = ask(worker(speed=0.1), a_round())
    assert isinstance(grant, Grant)
    assert grant.steps == 4  # 48 of 60 s


def test_what_does_not_fit_the_memory_is_never_leased():
    small = WorkerFacts("small", 999)
    refused = ask(small, a_round())
    assert isinstance(refused, NoWork)
    assert refused.reason.startswith("block 0 needs 1e-06 GB and this worker has 9.99e-07 GB: run the worker where")


@pytest.mark.parametrize(
    "facts, first, second, phase, why",
    [
        (worker(blocks=(2,)), 20, 50, 1, "block 2: the worker has its blocks"),
        (worker(blocks=(0, 1)), 50, 20, 0, "block 0: the worker has its blocks"),
        (worker(blocks=(1,)), 50, 20, 1, "block 2: furthest behind of what fits the worker"),
        (worker(), 20, 50, 0, "block 0: furthest behind of what fits the worker"),
        (worker(), 20, 20, 0, "block 0: furthest behind of what fits the worker"),
    ],
)
def test_a_worker_keeps_its_blocks_or_helps_the_furthest_behind(facts, first, second, phase, why):
    grant = ask(facts, replace(a_round(), step_start=first), replace(a_round(phase=OTHER), step_start=second))
    assert isinstance(grant, Grant)
    assert (grant.phase, grant.reason) == (phase, why)


def test_newcomers_spread_over_phases_that_are_equally_far():
    grant = ask(worker(), a_round(silent=1), a_round(phase=OTHER))
    assert isinstance(grant, Grant)
    assert grant.phase == 1


@pytest.mark.parametrize("colleagues, now_s, phase", [(1, 61, 1), (1, 59, 0), (0, 61, 0)])
def test_one_of_several_workers_moves_to_blocks_that_all_have_left(colleagues, now_s, phase):
    mine = replace(a_round(silent=colleagues), deadline_at_s=120.0)  # extended, so that it may be joined
    grant = ask(worker(blocks=(0, 1)), mine, a_round(phase=OTHER), now_s=now_s)
    assert isinstance(grant, Grant)
    assert grant.phase == phase


@pytest.mark.parametrize(
    "now_s, steps",
    [(0, 10), (1, 10), (4, 9), (5, 9), (7, 8), (20, 5), (21, None), (39, None), (59, None)],
)
def test_a_running_round_is_joined_only_while_that_is_useful_and_keeps_nobody_waiting_a_step(now_s, steps):
    answer = ask(worker(), a_round(silent=2), now_s=now_s)
    if steps is None:
        assert isinstance(answer, NoWork)
        assert "waiting for the next" in answer.reason
        assert answer.retry_s > 0
    else:
        assert isinstance(answer, Grant)
        assert (answer.shard, answer.steps, answer.deadline_at_s) == (2, steps, 60)


@pytest.mark.parametrize("reported, silent", [(0, 1), (1, 0)])
def test_a_round_short_of_updates_is_joined_even_when_its_leases_should_be_in(reported, silent):
    answer = ask(worker(), a_round(reported, silent), now_s=35)
    assert isinstance(answer, Grant)
    assert (answer.shard, answer.steps, answer.deadline_at_s) == (1, 5, 60)


def test_a_round_extended_for_want_of_updates_is_joined_to_its_new_deadline():
    extended = replace(a_round(silent=1), deadline_at_s=121.0)
    answer = ask(worker(), extended, now_s=61)
    assert isinstance(answer, Grant)
    assert answer.steps == 10


def test_a_worker_whose_update_is_in_waits_for_the_round():
    answer = ask(worker("w0"), a_round(reported=1, silent=2), now_s=35)
    assert isinstance(answer, NoWork)
    assert answer.reason == "its update of round 5 is in, 2 still at work"


@pytest.mark.parametrize(
    "now_s, retry_s",
    [
        (1, 3 * FEW_WAIT_S),  # three have leases
        (
            30,
            RETRY_SHARE * 30,
        ),  # they are due at 40: no more than a share of the round is lost if they are early
        (39.8, 0.2),  # when they are due
        (50, RETRY_SHARE * 50),  # they are late
    ],
)
def test_who_waits_for_others_asks_again_when_they_should_be_in(now_s, retry_s):
    answer = ask(worker("w0"), a_round(reported=1, silent=2), now_s=now_s)
    assert isinstance(answer, NoWork)
    assert answer.retry_s == pytest.approx(retry_s)


@pytest.mark.parametrize("silent, retry_s", [(1, 2 * FEW_WAIT_S), (8, 9 * FEW_WAIT_S), (50, SHORTEST_WAIT_S)])
def test_many_who_wait_ask_less_often_than_a_few(silent, retry_s):
    answer = ask(worker("w0"), a_round(reported=1, silent=silent), now_s=0.1)
    assert isinstance(answer, NoWork)
    assert answer.retry_s == pytest.approx(retry_s)


def test_a_round_that_is_being_merged_is_joined_by_nobody():
    answer = ask(worker(), a_round(reported=2), now_s=20)
    assert answer == NoWork("round 5 is being merged", RETRY_SHARE * 20)


def test_asking_again_renews_the_same_lease():
    before = a_round(silent=3)
    grant = ask(worker("w1"), before, now_s=30)
    assert isinstance(grant, Grant)
    assert (grant.shard, grant.reason) == (1, "block 0: the lease that the worker already has")
    assert sorted(x.shard for x in before.with_grant(grant, 30).leases) == [0, 1, 2]


def test_a_worker_past_its_deadline_gets_another_shard_if_a_coordinator_whose_clock_is_ahead_gave_its_own_away():
    before = a_round(silent=1)
    ahead = before.with_grant(ask(worker(), before, now_s=125.0), 125.0)
    assert [x.shard for x in ahead.leases] == [0, 0]
    grant = ask(worker("w0"), ahead, now_s=70.0)
    assert (grant.worker, grant.shard) == ("w0", 1)


def test_the_shard_of_a_worker_given_up_is_free_again_and_the_clock_starts_anew():
    grant = ask(worker(), a_round(silent=1), now_s=500)
    assert isinstance(grant, Grant)
    assert (grant.shard, grant.deadline_at_s) == (0, 560)


@pytest.mark.parametrize("now_s, owed", [(59.0, 0), (61.0, 2), (121.0, 2)])
def test_a_worker_that_asks_again_after_its_deadline_has_missed_it_however_long_ago(now_s, owed):
    grant = ask(worker("w0"), a_round(silent=1), now_s=now_s)
    assert isinstance(grant, Grant)
    assert grant.owed == owed
