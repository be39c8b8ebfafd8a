"""Leases: which worker gets which work. Pure: no socket, disk or clock. The time is an argument, and every answer says
why. Next: rounds.py, what leases belong to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from blocktrain.spec import Phase, SwarmSpec
from blocktrain.swarm.policy.rounds import Grant, Lease, Round, decide
from blocktrain.swarm.policy.track_record import after_a_miss

FILL_SHARE = 0.8  # of the time to the deadline that a lease may plan to use
UPLOAD_SHARE = 0.1  # of the time to the deadline, which a worker keeps for the upload
JOIN_SHARE = 0.5  # of a whole lease's time that a worker must find in a running round to join it
RETRY_SHARE = 0.02  # of the time that a round has taken, until a waiting worker asks again: it loses no more
SHORTEST_WAIT_S = 0.1
FEW_WAIT_S = 0.01  # for each worker of the round, if that is shorter: a few may ask often
WAITED_FOR_STEPS = 0.5  # of a worker that joins: without it, asking a moment later would cost a whole step
PACE_SLACK = 1.25  # a worker that is slower than usual by less than this gets whole leases
NEWCOMER_SHARE = 1 / 4  # of the usual speed, that a worker is assumed to have before its first update
FEWEST_SHARE = 1 / 16  # of a round's steps that also the slowest worker gets: its downloads should pay
ROUNDING = 1e-9


@dataclass(frozen=True)
class WorkerFacts:
    name: str
    memory_bytes: int
    steps_per_s: float | None = None  # measured from its updates; None before the first
    blocks: frozenset[int] = frozenset()  # trained last: their optimiser state is warm
    owed: int = 0
    delivered: int = 0


@dataclass(frozen=True)
class OpenPhase:
    phase: Phase
    memory_bytes: int  # that training it takes
    usual_steps_per_s: float | None = None  # of the workers that deliver; None while nobody has
    held: bool = False  # its round could close, and waits for workers that computed audits

    def pace_s(self, round: Round) -> float:
        """The time that a lease of the round should take: slower workers get fewer steps."""
        return PACE_SLACK * round.steps / self.usual_steps_per_s if self.usual_steps_per_s else inf


@dataclass(frozen=True)
class NoWork:
    reason: str
    retry_s: float  # when asking again may help, at the latest


def choose_work(
    worker: WorkerFacts, phases: Sequence[OpenPhase], rounds: Mapping[int, Round], now_s: float, spec: SwarmSpec
) -> Grant | NoWork:
    """The best lease for this worker. It stays with the blocks it has, even if it must wait for their next round,
    unless others work on them too and no worker is left on another phase. `rounds` holds the open round of each
    phase."""
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
    ranked = sorted(_candidates(worker, fitting, rounds, now_s, spec), key=lambda x: x.order)
    offers = [_offer(worker, x, now_s, spec) for x in ranked]
    if ranked[0].order[0] < Wish.BEHIND:
        return offers[0]
    return next((offer for offer in offers if isinstance(offer, Grant)), offers[0])


class Wish(IntEnum):
    """Why a worker would get a phase. The smaller, the better."""

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
    worker: WorkerFacts, phases: Sequence[OpenPhase], rounds: Mapping[int, Round], now_s: float, spec: SwarmSpec
) -> Iterator[_Candidate]:
    at_work = {x.phase.index: rounds[x.phase.index].awaited(now_s, spec) for x in phases}
    warm = {x.phase.index for x in phases if worker.blocks.issuperset(x.phase.blocks)}
    spare = any(lease.worker != worker.name for index in warm for lease in at_work[index])
    for x in phases:
        index, round = x.phase.index, rounds[x.phase.index]
        wish = Wish.WARM if index in warm else Wish.BEHIND
        if spare and not at_work[index] and now_s > round.opened_s + round.limit_s:
            wish = Wish.DESERTED
        if round.is_at_work(worker.name, now_s):
            wish = Wish.RENEWED
        yield _Candidate(x, round, (wish, round.step_start / x.phase.steps, len(at_work[index]), index))


def _offer(worker: WorkerFacts, candidate: _Candidate, now_s: float, spec: SwarmSpec) -> Grant | NoWork:
    """A lease in the phase's open round, sized to end with the others, or the reason to wait for the next round."""
    round, why = candidate.round, f"block {candidate.open.phase.block}: {WISHES[candidate.order[0]]}"
    at_work, awaited = round.at_work(now_s), round.awaited(now_s, spec)
    lease = round.lease_of(worker.name)
    own = lease if round.is_at_work(worker.name, now_s) else None
    held = candidate.open.held
    if decide(round, now_s, spec).action == "close" and not held:
        return NoWork(f"round {round.number} is being merged", _retry_s(round, awaited, now_s))
    if lease and lease.reported_s is not None:
        waits_for = f"its update of round {round.number} is in, {len(at_work)} still at work"
        return NoWork(waits_for, _retry_s(round, awaited, now_s))
    if own and now_s < own.deadline_at_s:
        return _renewed(own, round, why)
    others = [x for x in (*awaited, *round.reported) if x.worker != worker.name]
    speed = _speed(worker, candidate.open, round)
    fewest_s = max(1.0, FEWEST_SHARE * round.steps) / speed
    pace_s = max(candidate.open.pace_s(round), fewest_s)
    time_s = min(_time_left_s(worker, round, () if held else others, candidate.open, now_s, spec), pace_s)
    useful_s = JOIN_SHARE * min(round.steps / speed, pace_s, round.limit_s)
    if others and not own and time_s < useful_s:
        left = f"round {round.number} has {max(0.0, time_s):.1f} s left, joining is worth it from {useful_s:.1f} s on"
        return NoWork(f"{left}: waiting for the next", _retry_s(round, awaited, now_s))
    in_time = speed * time_s + (WAITED_FOR_STEPS if others and not worker.owed else 0.0)
    steps = max(1, int(min(round.steps, in_time) + ROUNDING))
    taken = {x.shard for x in (*at_work, *round.reported) if x.worker != worker.name}
    return Grant(
        worker=worker.name,
        phase=round.phase,
        number=round.number,
        base=round.base,
        shard=own.shard if own and own.shard not in taken else _lowest_free(taken),
        step_start=round.step_start,
        steps=steps,
        due_s=now_s + steps / speed,
        deadline_at_s=round.deadline_at_s if others and not held else now_s + round.limit_s,
        reason=why,
        owed=after_a_miss(worker.owed) if lease else worker.owed,
        delivered=worker.delivered,
    )


def _renewed(own: Lease, round: Round, why: str) -> Grant:
    """The same lease once more: a worker that was restarted goes on with it. Its times stay, and so does the round's
    deadline. Only after its own deadline does a worker get another lease, and then it has missed one."""
    return Grant(
        worker=own.worker,
        phase=round.phase,
        number=round.number,
        base=round.base,
        shard=own.shard,
        step_start=round.step_start,
        steps=own.steps,
        due_s=own.due_s,
        deadline_at_s=own.deadline_at_s,
        reason=why,
        granted_s=own.granted_s,
        owed=own.owed,
        delivered=own.delivered,
    )


def _speed(worker: WorkerFacts, open: OpenPhase, round: Round) -> float:
    """The worker's steps per second. Before its first update it is taken for slower than usual, and for slower still
    after a miss, so that it has a small lease to show its speed. If nobody's speed is known, it is assumed to finish a
    whole lease just in time."""
    if worker.steps_per_s is not None and 0 < worker.steps_per_s < inf:
        return worker.steps_per_s
    if open.usual_steps_per_s:
        return NEWCOMER_SHARE / (1 + worker.owed) * open.usual_steps_per_s
    return round.steps / (FILL_SHARE * round.limit_s)


def _time_left_s(
    worker: WorkerFacts, round: Round, others: Sequence[Lease], open: OpenPhase, now_s: float, spec: SwarmSpec
) -> float:
    """Until the others should report, or one of the usual speed would have: a worker that joins keeps nobody waiting
    but those that are, or claim to be, faster than usual. Not so long if the worker owes updates, since nobody waits
    for it. Longer if the round has too few updates, or was extended because it had."""
    if not others:
        return FILL_SHARE * round.limit_s
    time_left_s = FILL_SHARE * (round.deadline_at_s - now_s)
    wanted = len(others) < spec.min_updates or round.deadline_at_s > max([x.deadline_at_s for x in others])
    usual_s = open.pace_s(round) if open.usual_steps_per_s and not worker.owed else 0.0
    if wanted:
        return time_left_s
    reported_at_s = max(*[x.due_s for x in others], min([x.granted_s for x in others]) + usual_s)
    return min(time_left_s, reported_at_s - now_s)


def _retry_s(round: Round, awaited: Sequence[Lease], now_s: float) -> float:
    """When the others should have reported. If that estimate is wrong, at most a small share of the round later."""
    since_s = min((x.granted_s for x in round.leases), default=round.opened_s)
    left_s = max((min(x.due_s, round.deadline_at_s) for x in awaited), default=now_s) - now_s
    share_s = RETRY_SHARE * (now_s - since_s)
    shortest_s = min(SHORTEST_WAIT_S, FEW_WAIT_S * max(1, len(round.leases)))
    return max(shortest_s, min(share_s, left_s) if left_s > 0 else share_s)


def _lowest_free(taken: Collection[int]) -> int:
    return min(set(range(len(taken) + 1)).difference(taken))
