"""Plans of many workers: the policy decides on a sample of a round's leases as it does on all of them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from blocktrain.errors import ConfigError
from blocktrain.sim.plan import Conditions, Sizes, plan, usual_rounds
from blocktrain.sim.plan_round import PlannedRound
from blocktrain.spec import Phase, SwarmSpec, preset
from blocktrain.swarm.policy.leases import OpenPhase, WorkerFacts, choose_work
from blocktrain.swarm.policy.rounds import Grant, decide, open_round

SPEC = SwarmSpec(round_steps=10, min_updates=2, deadline_floor_s=5.0, deadline_ceiling_s=60.0)
PHASE = Phase(0, blocks=(0,), below=(), ahead=(), steps=95)
SIZES = Sizes(10**5, 10**5, 10**6, 0)


def offer(worker: WorkerFacts, round, now_s: float):
    """All of an offer but the number of its shard and, of a refusal, its words."""
    found = choose_work(worker, [OpenPhase(PHASE, 0, 0.5)], {0: round}, now_s, SPEC)
    return (replace(found, shard=0), found) if isinstance(found, Grant) else ("wait", found)


@pytest.mark.parametrize("seed", range(40))
def test_the_policy_decides_on_a_sample_as_on_all_leases(seed):
    draw, now_s = random.Random(seed), 0.0
    full = open_round(PHASE, 3 * (seed % 2), {0: 3}, 20, 30.0, 0.0, SPEC)  # a first round waits longer
    sampled = PlannedRound(full, SPEC)
    for step in range(60):
        now_s += draw.expovariate(1.0)
        name = f"w{draw.randrange(15)}"
        facts = WorkerFacts(
            name, 0, draw.choice([None, 0.2, 0.5, 2.0]), owed=draw.choice([0, 0, 2]), delivered=draw.choice([0, 3])
        )
        at_work = [x.worker for x in full.leases if x.reported_s is None]
        mine, whole = offer(facts, full, now_s)
        assert offer(facts, sampled.view(name, now_s), now_s)[0] == mine, step
        if mine != "wait":
            full = full.with_grant(whole, now_s)
            sampled.grant(whole, now_s)
        if at_work and draw.random() < 0.3:
            reporter = draw.choice(at_work)
            full = full.with_report(reporter, 5, now_s)
            sampled.report(reporter, 5, now_s)
        one, other = decide(full, now_s, SPEC), decide(sampled.view(None, now_s), now_s, SPEC)
        assert (one.action, one.deadline_at_s) == (other.action, other.deadline_at_s), step
        if one.action == "extend":
            full = replace(full, deadline_at_s=one.deadline_at_s)
            sampled.extend(one.deadline_at_s)


def test_a_plan_without_failures_merges_everything_and_one_with_failures_less():
    calm = plan(preset("tiny"), Conditions(workers=20, rounds=3), lambda _: SIZES)
    churning = plan(preset("tiny"), Conditions(workers=20, rounds=3, churn=60.0, liars=0.3), lambda _: SIZES)
    assert calm.goodput == pytest.approx(1.0)
    assert calm.merged_updates == 20 * calm.rounds
    assert churning.left > 0
    assert churning.goodput < 0.95


def test_one_seed_gives_one_plan():
    one, other = (plan(preset("tiny"), Conditions(workers=30, churn=5.0, rounds=3), lambda _: SIZES) for _ in range(2))
    assert one == other


@pytest.mark.parametrize(
    "name, value", [("workers", 0), ("liars", 1.0), ("churn", -1), ("steps_per_s", 0), ("rounds", 0)]
)
def test_conditions_out_of_range_are_refused_with_the_range(name, value):
    with pytest.raises(ConfigError, match=f"{name} = {value:g} is out of range: give"):
        Conditions(**{name: value})


@pytest.mark.parametrize("workers, rounds", [(0, 20), (100, 20), (3000, 20), (6000, 10), (10_000, 6), (100_000, 5)])
def test_a_plan_of_many_workers_has_fewer_rounds_unless_their_number_is_given(workers, rounds):
    assert usual_rounds(workers) == rounds
