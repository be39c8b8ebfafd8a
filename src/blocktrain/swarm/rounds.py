"""Rounds: when a round closes, who gets which work, what a late update weighs. Pure: no socket, disk or clock; the
time is an argument, and every answer says why. A phase has one open round at a time; its leases train the same steps on
different shards of the data. Alone, a worker trains shard 0 step by step, as local training does.
Next: averaging.py, which merges a closed round's updates; ledger.py, which keeps rounds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import count
from math import inf
from statistics import median
from typing import Literal

from blocktrain.spec import Phase, RunSpec, SwarmSpec

WINDOW = 32  # past rounds that a deadline is learned from
MIN_SAMPLES = 3
SLACK_SHARE = 0.5  # of the median: even rounds that always took the same time may once take longer
FILL_SHARE = 0.8  # of the time to the deadline that a lease may plan to use
JOIN_SHARE = 0.5  # of a whole lease's time that a worker must find in a running round to join it
RETRY_SHARE = 0.05  # of a round, until a waiting worker asks again when its end is overdue
ROUNDING = 1e-9


@dataclass(frozen=True)
class Lease:
    """A shard given to a worker. `steps_done` may stay below `steps`: a worker stops in time to report."""

    shard: int
    worker: str
    steps: int
    granted_s: float
    due_s: float  # when it should be in, at the worker's speed
    deadline_s: float
    reported_s: float | None = None
    steps_done: int = 0


@dataclass(frozen=True)
class LateUpdate:
    """An update from an earlier round of the phase, taken into this one."""

    worker: str
    number: int  # of the round it was leased in
    shard: int


@dataclass(frozen=True)
class Round:
    phase: int
    number: int
    base: Mapping[int, int]  # block: version that the leases start from
    step_start: int  # position in the phase's learning-rate schedule
    steps: int
    opened_s: float
    limit_s: float  # from the first lease to the deadline
    deadline_s: float
    leases: tuple[Lease, ...] = ()
    late: tuple[LateUpdate, ...] = ()

    @property
    def reported(self) -> tuple[Lease, ...]:
        return tuple(lease for lease in self.leases if lease.reported_s is not None)

    @property
    def advance(self) -> int:
        """Steps that the phase moves on when this round closes: those of its furthest replica."""
        return max((lease.steps_done for lease in self.reported), default=0)

    @property
    def took_s(self) -> float | None:
        """First lease to last report: the sample to learn deadlines from. The time until the round closed would not do:
        with one dead worker it is the deadline itself, and the deadline would grow for ever."""
        if not self.reported:
            return None
        last_s = max(lease.reported_s or 0.0 for lease in self.reported)
        return max(0.0, last_s - min(lease.granted_s for lease in self.reported))

    def at_work(self, now_s: float) -> tuple[Lease, ...]:
        """Leases that may still report. One that missed its deadline by a whole round is taken for dead; should it
        report after all, that counts."""
        return tuple(x for x in self.leases if x.reported_s is None and now_s < x.deadline_s + self.limit_s)

    def with_grant(self, grant: Grant, now_s: float) -> Round:
        """The round with a lease of this grant. A worker has one lease a round: asking again renews it."""
        if any(x.worker == grant.worker for x in self.reported):
            return self
        lease = Lease(grant.shard, grant.worker, grant.steps, now_s, grant.due_s, grant.deadline_s)
        others = tuple(x for x in self.leases if x.worker != grant.worker)
        return replace(self, leases=(*others, lease), deadline_s=grant.deadline_s)

    def with_report(self, worker: str, steps_done: int, now_s: float) -> Round:
        """The round with this worker's update. A second report, or one without a step or a lease, changes nothing."""
        if steps_done < 1:
            return self
        leases = tuple(
            replace(x, reported_s=now_s, steps_done=min(steps_done, x.steps))
            if x.worker == worker and x.reported_s is None
            else x
            for x in self.leases
        )
        return replace(self, leases=leases)

    def with_late(self, update: LateUpdate) -> Round:
        return self if update in self.late else replace(self, late=(*self.late, update))


@dataclass(frozen=True)
class Decision:
    action: Literal["wait", "close", "extend"]
    reason: str
    deadline_s: float  # the round's from now on


def decide(round: Round, now_s: float, spec: SwarmSpec) -> Decision:
    """A round closes when every lease at work is in, or at the deadline with `min_updates`. It needs one update of its
    own: late ones alone would make a version without moving the schedule."""
    at_work, fresh, late = len(round.at_work(now_s)), len(round.reported), len(round.late)
    updates = fresh + late
    tally = f"{updates} {'update' if updates == 1 else 'updates'} in" + (f" ({late} late)" if late else "")
    if not fresh and not at_work:
        silent = f"none of the {len(round.leases)} leases was heard of again" if round.leases else "nobody has a lease"
        return Decision("wait", f"{silent}: waiting for a worker", round.deadline_s)
    if not at_work:
        dead = len(round.leases) - fresh
        given_up = f", {dead} given up" if dead else ""
        return Decision("close", f"all leases are in: {tally}{given_up}", round.deadline_s)
    if now_s < round.deadline_s:
        return Decision("wait", f"{tally}, {at_work} at work, {round.deadline_s - now_s:.0f} s left", round.deadline_s)
    if fresh and updates >= spec.min_updates:
        return Decision("close", f"deadline passed with {tally}, {at_work} missing", round.deadline_s)
    needed = f"min_updates = {spec.min_updates}" if fresh else "one of this round"
    return Decision("extend", f"deadline passed with {tally}, {needed} needed", now_s + round.limit_s)


def learned_deadline_s(past_round_times_s: Sequence[float], spec: SwarmSpec) -> tuple[float, str]:
    """Seconds that a round of a phase may take, and why: from the times (`Round.took_s`) of its last rounds."""
    recent = past_round_times_s[-WINDOW:]
    if len(recent) < MIN_SAMPLES:
        return spec.deadline_ceiling_s, f"the ceiling: {len(recent)} rounds timed, {MIN_SAMPLES} needed to learn from"
    middle = median(recent)
    spread = median(abs(seconds - middle) for seconds in recent)
    learned = middle + max(spec.deadline_spreads * spread, SLACK_SHARE * middle)
    origin = f"median {middle:.1f} s, spread {spread:.1f} s of {len(recent)} rounds"
    if learned < spec.deadline_floor_s:
        return spec.deadline_floor_s, f"the floor: {origin}"
    if learned > spec.deadline_ceiling_s:
        return spec.deadline_ceiling_s, f"the ceiling: {origin}"
    return learned, origin


def open_round(
    phase: Phase,
    number: int,
    base: Mapping[int, int],
    step_start: int,
    limit_s: float,
    now_s: float,
    spec: SwarmSpec,
) -> Round:
    steps = min(spec.round_steps, phase.steps - step_start)
    return Round(phase.index, number, dict(base), step_start, steps, now_s, limit_s, now_s + limit_s)


def next_round(closed: Round, phase: Phase, limit_s: float, now_s: float, spec: SwarmSpec) -> Round | None:
    """The round after a merge: every block of the phase one version on. None when the phase is finished."""
    step_start = closed.step_start + closed.advance
    if step_start >= phase.steps:
        return None
    base = {block: version + 1 for block, version in closed.base.items()}
    return open_round(phase, closed.number + 1, base, step_start, limit_s, now_s, spec)


@dataclass(frozen=True)
class Refusal:
    reason: str


def staleness_weight(built_on: int, current: int, spec: SwarmSpec) -> float | Refusal:
    """(1 + lag)^-a, the polynomial weight of Xie et al. (2019), "Asynchronous federated optimization"."""
    lag = current - built_on
    if lag < 0:
        return Refusal(f"update built on version {built_on}, block is only at {current}: fetch the block again")
    if lag > spec.max_lag:
        return Refusal(
            f"update built on version {built_on}, block is at {current}, "
            f"at most {spec.max_lag} behind is accepted: fetch the block again"
        )
    return float((1 + lag) ** -spec.staleness_exponent)


def open_phases(
    spec: RunSpec, finished: Collection[int] = (), steps_done: Mapping[int, int] | None = None
) -> tuple[Phase, ...]:
    """The unfinished phases of the first group that has any; none when the run is finished."""
    done = steps_done or {}
    for group in spec.groups:
        if unfinished := tuple(x for x in group if x.index not in finished and done.get(x.index, 0) < x.steps):
            return unfinished
    return ()


@dataclass(frozen=True)
class WorkerFacts:
    name: str
    memory_bytes: int
    steps_per_s: float | None = None  # measured; None before its first lease
    blocks: frozenset[int] = frozenset()  # trained last: their optimiser state is warm


@dataclass(frozen=True)
class OpenPhase:
    phase: Phase
    memory_bytes: int  # that training it takes
    nominal_steps_per_s: float | None = None  # of its fastest worker, as observed


@dataclass(frozen=True)
class Grant:
    worker: str
    phase: int
    number: int
    base: Mapping[int, int]
    shard: int
    step_start: int
    steps: int
    due_s: float
    deadline_s: float
    reason: str


@dataclass(frozen=True)
class NoWork:
    reason: str
    retry_s: float  # when asking again may help, at the latest


def choose_work(
    worker: WorkerFacts, phases: Sequence[OpenPhase], rounds: Mapping[int, Round], now_s: float, spec: SwarmSpec
) -> Grant | NoWork:
    """The best lease for this worker. It stays with the blocks it has, even if it must wait for their next round,
    unless others work on them too and another phase has been left by all. `rounds` holds the open round of each phase,
    as `decide` left it."""
    if not phases:
        return NoWork("every phase is finished", spec.deadline_floor_s)
    fitting = [x for x in phases if x.memory_bytes <= worker.memory_bytes]
    if not fitting:
        least = min(phases, key=lambda x: x.memory_bytes)
        return NoWork(
            f"block {least.phase.block} needs {least.memory_bytes / 1e9:.3g} GB and this worker has "
            f"{worker.memory_bytes / 1e9:.3g} GB: run the worker where there is more, or train smaller blocks",
            spec.deadline_floor_s,
        )
    ranked = sorted(_candidates(worker, fitting, rounds, now_s), key=lambda x: x.order)
    offers = [_offer(worker, x, now_s) for x in ranked]
    if ranked[0].order[0] < Wish.BEHIND:
        return offers[0]
    return next((offer for offer in offers if isinstance(offer, Grant)), offers[0])


class Wish(IntEnum):
    """Why a worker would be given a phase; the smaller, the better."""

    RENEWED = 0
    DESERTED = 1
    WARM = 2
    BEHIND = 3


WISHES = {
    Wish.RENEWED: "the lease that the worker already has",
    Wish.DESERTED: "nobody works on it, and the worker's own blocks have others",
    Wish.WARM: "the worker has its blocks",
    Wish.BEHIND: "furthest behind of what fits the worker",
}


@dataclass(frozen=True)
class _Candidate:
    open: OpenPhase
    round: Round
    order: tuple[Wish, float, int, int]


def _candidates(
    worker: WorkerFacts, phases: Sequence[OpenPhase], rounds: Mapping[int, Round], now_s: float
) -> Iterator[_Candidate]:
    at_work = {x.phase.index: rounds[x.phase.index].at_work(now_s) for x in phases}
    warm = {x.phase.index for x in phases if worker.blocks.issuperset(x.phase.blocks)}
    spare = any(lease.worker != worker.name for index in warm for lease in at_work[index])
    for x in phases:
        index, round = x.phase.index, rounds[x.phase.index]
        wish = Wish.WARM if index in warm else Wish.BEHIND
        if spare and not at_work[index] and now_s > round.opened_s + round.limit_s:
            wish = Wish.DESERTED
        if any(lease.worker == worker.name for lease in at_work[index]):
            wish = Wish.RENEWED
        yield _Candidate(x, round, (wish, round.step_start / x.phase.steps, len(at_work[index]), index))


def _offer(worker: WorkerFacts, candidate: _Candidate, now_s: float) -> Grant | NoWork:
    """A lease in the phase's open round, sized to end with the others' leases; or the reason to wait for the next."""
    round, wish = candidate.round, candidate.order[0]
    at_work = round.at_work(now_s)
    own = next((x for x in at_work if x.worker == worker.name), None)
    others = [x for x in (*at_work, *round.reported) if x.worker != worker.name]
    speed, nominal = _speeds(worker, candidate.open, round)
    time_s = _time_left_s(round, others, now_s)
    retry_s = max(time_s, RETRY_SHARE * round.limit_s)
    if any(x.worker == worker.name for x in round.reported):
        return NoWork(f"its update of round {round.number} is in, {len(at_work)} still at work", retry_s)
    useful_s = JOIN_SHARE * min(round.steps / nominal, round.limit_s)
    if others and not own and time_s < useful_s:
        left = f"round {round.number} has {max(0.0, time_s):.1f} s left, joining is worth it from {useful_s:.1f} s on"
        return NoWork(f"{left}: waiting for the next", retry_s)
    steps = max(1, int(min(round.steps * speed / nominal, speed * time_s) + ROUNDING))
    return Grant(
        worker=worker.name,
        phase=round.phase,
        number=round.number,
        base=round.base,
        shard=own.shard if own else _lowest_free({x.shard for x in others}),
        step_start=round.step_start,
        steps=steps,
        due_s=now_s + steps / speed,
        deadline_s=round.deadline_s if others else now_s + round.limit_s,
        reason=f"block {candidate.open.phase.block}: {WISHES[wish]}",
    )


def _speeds(worker: WorkerFacts, open: OpenPhase, round: Round) -> tuple[float, float]:
    """Steps a second of this worker and of the fastest. Unknown, a worker is taken to be as fast as the fastest, and
    the fastest to just make it."""
    own = worker.steps_per_s if worker.steps_per_s and 0 < worker.steps_per_s < inf else None
    just_in_time = round.steps / (FILL_SHARE * round.limit_s)
    nominal = max((x for x in (own, open.nominal_steps_per_s) if x), default=just_in_time)
    return own or nominal, nominal


def _time_left_s(round: Round, others: Sequence[Lease], now_s: float) -> float:
    """Until the others' leases should be in: a worker who joins them does not keep them waiting, unless the round was
    extended for want of updates."""
    if not others:
        return FILL_SHARE * round.limit_s
    to_deadline_s = FILL_SHARE * (round.deadline_s - now_s)
    extended = round.deadline_s > max(x.deadline_s for x in others)
    return to_deadline_s if extended else min(to_deadline_s, max(x.due_s for x in others) - now_s)


def _lowest_free(taken: Collection[int]) -> int:
    return next(shard for shard in count() if shard not in taken)
