"""Rounds and leases together: no order, loss or delay of reports breaks a swarm."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blocktrain.spec import Denoise, ModelSpec, Phase, RunSpec, Stacked, SwarmSpec, TrainSpec
from blocktrain.swarm.policy.leases import (
    NoWork,
    OpenPhase,
    WorkerFacts,
    choose_work,
)
from blocktrain.swarm.policy.rounds import (
    Grant,
    LateUpdate,
    Refusal,
    Round,
    decide,
    learned_limit_s,
    next_round,
    open_phases,
    open_round,
    staleness_weight,
)


@dataclass
class Swarm:
    """A coordinator in memory. An update is known by (phase, round, worker); acknowledged ones must be merged once."""

    run: RunSpec
    spec: SwarmSpec
    now_s: float = 0.0
    versions: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, Round] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    times_s: list[float] = field(default_factory=list)
    acknowledged: set[tuple[int, int, str]] = field(default_factory=set)
    merged: list[tuple[int, int, str]] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)

    def phases(self) -> list[Phase]:
        return list(open_phases(self.run, self.finished))

    def settle(self) -> None:
        """What the coordinator does on every event: open, decide, merge."""
        for phase in self.phases():
            if phase.index not in self.rounds:
                base = {block: self.versions.get(block, 0) for block in phase.blocks}
                self.rounds[phase.index] = open_round(phase, 0, base, 0, 60.0, self.now_s, self.spec)
            decision = decide(self.rounds[phase.index], self.now_s, self.spec)
            assert decision.reason
            if decision.action == "close":
                self.merge(phase)
            elif decision.action == "extend":
                assert decision.deadline_at_s > self.now_s
                self.rounds[phase.index] = replace(self.rounds[phase.index], deadline_at_s=decision.deadline_at_s)

    def merge(self, phase: Phase) -> None:
        closed = self.rounds.pop(phase.index)
        self.merged += pending(closed)
        assert 1 <= closed.advance <= closed.steps
        for block, version in closed.base.items():
            assert version == self.versions.get(block, 0)
            self.versions[block] = version + 1
        self.times_s.append(closed.took_s or 0.0)
        following = next_round(closed, phase, learned_limit_s(self.times_s, self.spec)[0], self.now_s, self.spec)
        if following is None:
            self.finished.add(phase.index)
        else:
            self.rounds[phase.index] = following

    def lease(self, facts: WorkerFacts) -> Grant | NoWork:
        self.settle()
        needs = [OpenPhase(phase, 1000 * (1 + phase.index)) for phase in self.phases() if phase.index in self.rounds]
        answer = choose_work(facts, needs, self.rounds, self.now_s, self.spec)
        if isinstance(answer, Grant):
            self.check(answer, facts)
            self.rounds[answer.phase] = self.rounds[answer.phase].with_grant(answer, self.now_s)
            self.grants.append(answer)
        return answer

    def check(self, grant: Grant, facts: WorkerFacts) -> None:
        round, phase = self.rounds[grant.phase], self.run.phases[grant.phase]
        assert facts.memory_bytes >= 1000 * (1 + grant.phase)
        assert 1 <= grant.steps <= round.steps
        assert grant.step_start + grant.steps <= phase.steps
        assert self.now_s <= grant.deadline_at_s <= self.now_s + 2 * self.spec.deadline_ceiling_s
        assert grant.shard not in {x.shard for x in round.at_work(self.now_s) if x.worker != grant.worker}
        assert grant.base == {block: self.versions.get(block, 0) for block in phase.blocks}

    def report(self, grant: Grant, steps_done: int) -> None:
        self.settle()
        key = (grant.phase, grant.number, grant.worker)
        round = self.rounds.get(grant.phase)
        block = self.run.phases[grant.phase].block
        if round is None or isinstance(staleness_weight(grant.base[block], round.base[block], self.spec), Refusal):
            return
        if grant.number == round.number:
            self.rounds[grant.phase] = round.with_report(grant.worker, steps_done, self.now_s)
        elif key not in self.acknowledged:
            self.rounds[grant.phase] = round.with_late(LateUpdate(grant.worker, grant.number, grant.shard))
        self.acknowledged.add(key)
        self.settle()

    def kept(self) -> list[tuple[int, int, str]]:
        return self.merged + [key for round in self.rounds.values() for key in pending(round)]


def pending(round: Round) -> list[tuple[int, int, str]]:
    fresh = [(round.phase, round.number, x.worker) for x in round.reported]
    return fresh + [(round.phase, x.number, x.worker) for x in round.late]


def a_swarm(objective: Stacked | Denoise, **changes: float) -> Swarm:
    run = RunSpec(model=ModelSpec(blocks=3, layers=3), objective=objective, train=TrainSpec(steps=100))
    spec = SwarmSpec(**{"round_steps": 4, "deadline_floor_s": 1.0, "deadline_ceiling_s": 60.0, **changes})
    return Swarm(run, spec)


OBJECTIVES = [Stacked(), Stacked(scaffold=0), Denoise()]


@settings(max_examples=20)  # of hundreds of events each
@given(st.integers(0, 10**9), st.sampled_from(OBJECTIVES), st.integers(1, 3), st.integers(0, 2))
def test_any_order_loss_duplication_and_lateness_of_reports_leaves_a_sound_swarm(seed, objective, min_updates, max_lag):
    swarm, dice = a_swarm(objective, min_updates=min_updates, max_lag=max_lag), random.Random(seed)
    crew = [
        WorkerFacts(
            f"w{k}", dice.choice([999, 1000, 5000, 5000]), dice.choice([None, 0.2, 1.0, 2.0]), frozenset({k % 3})
        )
        for k in range(6)
    ]
    for _ in range(400):
        before = dict(swarm.versions)
        event = dice.random()
        if event < 0.4:
            swarm.lease(dice.choice(crew))
        elif event < 0.7 and swarm.grants:
            grant = dice.choice(swarm.grants[-9:])  # a grant never reported is lost, one reported twice a duplicate
            swarm.report(grant, dice.randint(1, grant.steps))
        else:
            swarm.now_s += dice.choice([0.0, 0.1, 0.1, 0.3, 1.0, 5.0] + [200.0] * (event > 0.97))
            swarm.settle()
        assert all(swarm.versions[block] >= version for block, version in before.items())
        assert sorted(swarm.kept()) == sorted(swarm.acknowledged)
    finish(swarm, WorkerFacts("last", 5000, 1.0))
    assert sorted(swarm.merged) == sorted(swarm.acknowledged)


def finish(swarm: Swarm, alone: WorkerFacts) -> None:
    """Whatever the others did, one good worker finishes the run."""
    for _ in range(500):
        answer = swarm.lease(alone)
        if isinstance(answer, Grant):
            swarm.now_s += answer.steps / (alone.steps_per_s or 1.0)
            swarm.report(answer, answer.steps)
            alone = replace(alone, blocks=frozenset(answer.base))
        elif len(swarm.finished) == len(swarm.run.phases):
            return
        else:
            swarm.now_s += max(answer.retry_s, 5.0)  # to the deadline of a round that is short of updates
    pytest.fail(f"not finished after 500 leases: {swarm.rounds}")


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("speed", [None, 0.01, 3.0])
def test_a_worker_alone_trains_shard_0_step_by_step_like_local_training(objective, speed):
    swarm = a_swarm(objective)
    finish(swarm, WorkerFacts("alone", 5000, speed))
    trained = [(x.phase, x.shard, step) for x in swarm.grants for step in range(x.step_start, x.step_start + x.steps)]
    assert trained == [(phase.index, 0, step) for phase in swarm.run.phases for step in range(phase.steps)]
