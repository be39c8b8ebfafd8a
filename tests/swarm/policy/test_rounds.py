"""Rounds: what closes them, and which work workers get."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from blocktrain.spec import Denoise, EndToEnd, ModelSpec, RunSpec, Stacked, SwarmSpec, TrainSpec
from blocktrain.swarm.policy.leases import (
    OpenPhase,
    choose_work,
)
from blocktrain.swarm.policy.rounds import (
    Grant,
    Lease,
    Refusal,
    decide,
    learned_limit_s,
    next_round,
    open_phases,
    staleness_weight,
)

sys.path.insert(0, str(Path(__file__).parent))
from made_rounds import PHASE, SPEC, a_round, worker


@pytest.mark.parametrize(
    "reported, silent, late, now_s, action, reason",
    [
        (0, 0, 0, 1e6, "wait", "nobody has a lease: waiting for a worker"),
        (0, 0, 3, 1e6, "wait", "nobody has a lease: waiting for a worker"),
        (4, 0, 0, 30, "close", "all leases are in: 4 updates in"),
        (1, 0, 0, 30, "wait", "1 update in, min_updates = 2 needed, 30 s left to join"),
        (1, 0, 0, 60, "close", "all leases are in: 1 update in"),
        (3, 1, 0, 41, "wait", "3 updates in, 1 at work, 19 s left"),
        (3, 1, 0, 42, "close", "all leases are in: 3 updates in, 1 not waited for"),
        (2, 2, 0, 59, "wait", "2 updates in, 2 at work, 1 s left"),
        (2, 2, 0, 60, "close", "deadline passed with 2 updates in, 2 missing"),
        (1, 3, 0, 61, "extend", "deadline passed with 1 update in, min_updates = 2 needed"),
        (1, 3, 1, 61, "close", "deadline passed with 2 updates in (1 late), 3 missing"),
        (0, 2, 2, 61, "extend", "deadline passed with 2 updates in (2 late), one of this round needed"),
        (1, 3, 0, 120, "close", "all leases are in: 1 update in, 3 given up"),
        (0, 3, 0, 120, "wait", "none of the 3 leases has reported: waiting for a worker"),
    ],
)
def test_a_round_closes_when_full_or_late_and_never_waits_for_the_dead(reported, silent, late, now_s, action, reason):
    decision = decide(a_round(reported, silent, late), now_s, SPEC)
    assert (decision.action, decision.reason) == (action, reason)
    assert decision.deadline_at_s == (now_s + 60 if action == "extend" else 60)


@pytest.mark.parametrize(
    "silent, now_s, action, reason",
    [
        ({"owed": 2}, 31, "close", "all leases are in: 2 updates in, 1 not waited for"),
        ({"delivered": 0}, 31, "wait", "2 updates in, 1 at work, 169 s left"),
        ({"delivered": 0}, 120, "close", "all leases are in: 2 updates in, 1 not waited for"),
        ({"delivered": 1}, 44, "wait", "2 updates in, 1 at work, 156 s left"),
        ({"delivered": 1}, 45, "close", "all leases are in: 2 updates in, 1 not waited for"),
        ({"delivered": 1, "due_s": 150.0}, 120, "wait", "2 updates in, 1 at work, 80 s left"),
    ],
    ids=["who owes", "a newcomer", "a newcomer for long", "who delivered before", "overdue", "slow but in time"],
)
def test_a_round_waits_for_those_who_deliver_and_a_while_for_newcomers(silent, now_s, action, reason):
    before = a_round(reported=2, silent=1)
    lease = replace(before.leases[2], deadline_at_s=200.0, **silent)
    changed = replace(before, leases=(*before.reported, lease), deadline_at_s=200.0)
    decision = decide(changed, now_s, SPEC)
    assert (decision.action, decision.reason) == (action, reason)


@pytest.mark.parametrize(
    "number, reported, reported_s, now_s, action",
    [
        (0, 2, 1.0, 29, "wait"),
        (0, 2, 0.0, 29, "wait"),
        (0, 2, 0.0, 31, "close"),
        (0, 3, 0.0, 5, "close"),
        (5, 2, 1.0, 5, "close"),
        (5, 2, 1.0, 3, "wait"),
    ],
    ids=["one step", "no step", "too early even so", "half are in", "a later round", "a newcomer's usual wait"],
)
def test_in_a_first_round_a_minority_that_may_have_trained_nothing_does_not_outrun_the_others(
    number, reported, reported_s, now_s, action
):
    leases = [Lease(k, f"w{k}", 10, 0.0, 40.0, 60.0, reported_s if k < reported else None, 10) for k in range(6)]
    round = replace(a_round(), number=number, leases=tuple(leases))
    assert decide(round, now_s, SPEC.model_copy(update={"deadline_floor_s": 2.0})).action == action


@pytest.mark.parametrize(
    "reported, missing, closes_s, changes",
    [
        (9, 1, 41.5, {}),
        (2, 1, 44.4, {}),
        (2, 2, 60.0, {}),
        (1, 3, 60.0, {}),
        (9, 1, 50.0, {"deadline_floor_s": 50.0}),
        (4, 1, 47.5, {"max_lag": 0}),
        (9, 1, 60.0, {"min_updates": 10}),
    ],
    ids=["one of ten", "one of three", "half", "most", "a short round", "late ones are refused", "too few updates"],
)
def test_most_workers_wait_for_overdue_ones_only_while_late_updates_cost_more(reported, missing, closes_s, changes):
    """All were due at 40 s. The deadline is at 60 s, and those that reported took 30 s."""
    spec, before = SPEC.model_copy(update={"min_updates": 1, **changes}), a_round(reported, missing)
    round = replace(before, leases=tuple(replace(x, delivered=1) for x in before.leases))
    assert decide(round, closes_s - 0.1, spec).action == "wait"
    assert decide(round, closes_s + 0.1, spec).action in ("close", "extend")


def test_a_round_says_when_the_first_lease_will_be_overdue():
    before = a_round(reported=9, silent=1)
    round = replace(before, leases=tuple(replace(x, delivered=1) for x in before.leases))
    assert round.overdue_at_s(31.0, SPEC) == 41.5
    assert a_round(reported=1, silent=1).overdue_at_s(31.0, SPEC) == float("inf")


@pytest.mark.parametrize("owed, steps", [(0, 10), (2, 7)])
def test_a_worker_that_nobody_waits_for_gets_what_it_can_do_until_the_others_report(owed, steps):
    """With more, it was a moment too late in every round."""
    opened = [OpenPhase(PHASE, 1000, usual_steps_per_s=0.25)]
    facts = replace(worker(speed=0.25), owed=owed, delivered=3)
    grant = choose_work(facts, opened, {0: a_round(silent=2)}, 10.0, SPEC)
    assert isinstance(grant, Grant)
    assert grant.steps == steps


def test_a_first_round_is_not_held_by_workers_that_owe_updates():
    leases = [Lease(k, f"w{k}", 10, 0.0, 40.0, 60.0, None if k > 1 else 1.0, owed=2 * (k > 1)) for k in range(6)]
    assert decide(replace(a_round(), number=0, leases=tuple(leases)), 2.0, SPEC).action == "close"


def test_a_worker_of_the_usual_speed_joins_beside_one_that_claims_to_be_faster():
    """Workers that trained one step of ten were due at once, and kept all others out of every round."""
    fast = [Lease(k, f"w{k}", 10, 0.0, 1.0, 60.0) for k in range(2)]
    opened = [OpenPhase(PHASE, 1000, usual_steps_per_s=1.0)]
    grant = choose_work(worker(speed=1.0), opened, {0: replace(a_round(), leases=tuple(fast))}, 0.1, SPEC)
    assert isinstance(grant, Grant)
    assert grant.steps == 10


def test_a_round_that_is_held_for_its_auditors_is_joined_by_them():
    opened = [OpenPhase(PHASE, 1000, usual_steps_per_s=0.5, held=True)]
    grant = choose_work(worker(speed=0.5), opened, {0: a_round(reported=3)}, 50.0, SPEC)
    assert isinstance(grant, Grant)
    assert (grant.shard, grant.steps, grant.deadline_at_s) == (3, 10, 110)


def test_a_round_with_too_few_updates_waits_no_longer_than_its_ceiling_for_ever_new_keys():
    round, now_s = a_round(reported=1), 50.0
    while (decision := decide(round, now_s, SPEC)).action != "close":
        deadline_at_s = max(decision.deadline_at_s, now_s + 1)
        grant = Grant(f"key {now_s}", 0, 5, {}, 9, 20, 10, now_s + 1, deadline_at_s, "", delivered=1)
        round = replace(round.with_grant(grant, now_s), deadline_at_s=deadline_at_s)
        now_s += 10
    assert now_s == 4 * 60
    assert decide(round, now_s, SPEC).reason == "the longest time of a round passed with 1 update in"


@pytest.mark.parametrize("speed, steps", [(0.5, 10), (0.41, 10), (0.25, 6), (0.25 / 3, 2), (0.001, 1), (None, 3)])
def test_who_is_slower_than_usual_gets_fewer_steps_however_long_the_round_may_take(speed, steps):
    opened = [OpenPhase(PHASE, 1000, usual_steps_per_s=0.5)]
    grant = choose_work(worker(speed=speed), opened, {0: replace(a_round(), limit_s=1e3 / 9.6)}, 0.0, SPEC)
    assert isinstance(grant, Grant)
    assert grant.steps == steps


def test_a_worker_given_up_may_still_report():
    silent = a_round(silent=1)
    assert decide(silent, 500, SPEC).action == "wait"
    assert decide(silent.with_report("w0", 10, 500), 500, SPEC).action == "close"


@pytest.mark.parametrize(
    "name, steps_done",
    [("w0", 10), ("nobody", 10), ("w1", 0), ("w1", -3)],
    ids=["twice", "without a lease", "without a step", "with fewer"],
)
def test_a_report_changes_nothing_when_sent(name, steps_done):
    before = a_round(reported=1, silent=1)
    assert before.with_report(name, steps_done, 40) == before


def test_a_report_counts_no_more_steps_than_were_leased():
    assert a_round(silent=1).with_report("w0", 10**9, 40).advance == 10


def test_a_round_is_timed_to_its_last_report_not_to_its_close():
    assert a_round(reported=2, silent=1).took_s == 30
    assert a_round(silent=1).took_s is None


@given(st.lists(st.floats(0, 1e4), max_size=40))
def test_a_deadline_lies_between_floor_and_ceiling_and_says_why(times_s):
    seconds, reason = learned_limit_s(times_s, SPEC)
    assert SPEC.deadline_floor_s <= seconds <= SPEC.deadline_ceiling_s
    assert reason


@given(st.floats(0.1, 50), st.lists(st.floats(0, 1), min_size=3, max_size=20), st.floats(1, 3))
def test_a_deadline_grows_with_the_spread(middle_s, offsets, wider):
    def limit_s(scale):
        return learned_limit_s([middle_s + sign * scale * x for x in offsets for sign in (-0.1, 0.1)], SPEC)[0]

    assert limit_s(wider) >= limit_s(1) - 1e-9


@pytest.mark.parametrize(
    "times_s, seconds, reason",
    [
        ([], 60, "the longest allowed, until 3 rounds are timed"),
        ([8, 8], 60, "the longest allowed, until 3 rounds are timed"),
        ([8, 8, 8], 12, "median 8.0 s, spread 0.0 s of 3 rounds"),
        ([8, 9, 10, 11, 500], 16, "median 10.0 s, spread 1.0 s of 5 rounds"),
        ([0.1, 0.1, 0.1], 1, "the shortest allowed; median 0.1 s, spread 0.0 s of 3 rounds"),
        ([50, 50, 50], 60, "the longest allowed; median 50.0 s, spread 0.0 s of 3 rounds"),
        ([500] * 99 + [8] * 32, 12, "median 8.0 s, spread 0.0 s of 32 rounds"),
    ],
)
def test_a_deadline_is_learned_from_the_last_rounds(times_s, seconds, reason):
    assert learned_limit_s(times_s, SPEC) == (seconds, reason)


def test_staleness_weighs_less_and_less_and_then_nothing():
    weights = [staleness_weight(9 - lag, 9, SPEC) for lag in range(5)]
    assert weights[0] == 1.0
    assert weights == sorted(weights, reverse=True)
    assert len(set(weights)) == 5


@pytest.mark.parametrize(
    "built_on, current, reason",
    [
        (3, 9, "update built on version 3, block is at 9, at most 4 behind is accepted: fetch the block again"),
        (9, 3, "update built on version 9, block is only at 3: fetch the block again"),
    ],
)
def test_an_update_too_stale_or_from_elsewhere_is_refused_with_the_remedy(built_on, current, reason):
    assert staleness_weight(built_on, current, SPEC) == Refusal(reason)


@pytest.mark.parametrize(
    "objective, finished, opened",
    [
        (Stacked(), set(), [0]),
        (Stacked(), {0}, [1]),
        (Stacked(), {0, 1, 2}, []),
        (Denoise(), set(), [0, 1, 2, 3]),
        (Denoise(), {1, 2}, [0, 3]),
        (Stacked(schedule="simultaneous", scaffold=0), {3}, [0, 1, 2]),
        (EndToEnd(), set(), [0]),
    ],
)
def test_phases_open_one_by_one_or_all_at_once(objective, finished, opened):
    spec = RunSpec(model=ModelSpec(blocks=4, layers=4), objective=objective, train=TrainSpec(steps=8))
    assert [phase.index for phase in open_phases(spec, finished)] == opened


def test_the_next_round_is_one_version_on_and_starts_where_the_furthest_replica_stopped():
    closed = a_round(silent=2).with_report("w0", 3, 40).with_report("w1", 7, 50)
    opened = next_round(closed, PHASE, 60, 60, SPEC)
    assert opened is not None
    assert (opened.number, opened.base, opened.step_start, opened.steps) == (6, {0: 6, 1: 6}, 27, 10)
    assert next_round(replace(closed, step_start=88), PHASE, 60, 60, SPEC) is None


@pytest.mark.parametrize(
    "wrong, complaint",
    [
        ({"deadline_floor_s": 99, "deadline_ceiling_s": 9}, "swarm.deadline_floor_s = 99 must not exceed"),
        ({"keep_versions": 5, "max_lag": 4}, "keep at least 6, two more than swarm.max_lag"),
        ({"trim_share": 0.5}, "less than or equal to 0.45"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong, complaint):
    with pytest.raises(ValidationError, match=complaint):
        SwarmSpec(**wrong)
