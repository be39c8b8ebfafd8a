"""Rounds: when a round closes, and what a late update weighs. Pure: no socket, disk or clock. The time is an argument,
and every answer says why. A phase has one open round at a time; its leases train the same steps on different shards of
the data. A worker alone trains shard 0 step by step, as local training does.
Next: leases.py, which worker gets which work; averaging/table.py, which merges a round's updates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from statistics import median
from typing import Literal

from blocktrain.spec import Phase, RunSpec, SwarmSpec

WINDOW = 32  # past rounds that a time limit is learned from
MIN_SAMPLES = 3
SLACK_SHARE = 0.5  # of the median: rounds that always took the same time may once take longer
NEWCOMER_PATIENCE = 4.0  # times as long as the others took, a round may wait for a worker that never delivered
LEAST_OVERDUE_SHARE = 0.05  # of the time that the others took, that every lease may be late
LONGEST_LIMITS = 4.0  # from its first delivered lease on, no round waits longer, whatever others claim to be doing


@dataclass(frozen=True)
class Lease:
    """A shard given to a worker. `steps_done` may stay below `steps`: a worker stops in time to report."""

    shard: int
    worker: str
    steps: int
    granted_s: float
    due_s: float  # when it should report, at the worker's speed
    deadline_at_s: float
    reported_s: float | None = None
    steps_done: int = 0
    owed: int = 0  # updates that its worker owes: the round does not wait for it (track_record.py)
    delivered: int = 0  # updates of its worker before


@dataclass(frozen=True)
class LateUpdate:
    """An update from an earlier round of the phase that is merged in this one."""

    worker: str
    number: int  # of the round it was leased in
    shard: int


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
    deadline_at_s: float
    reason: str
    granted_s: float | None = None  # of a lease that is renewed, which keeps its times; None: now
    owed: int = 0
    delivered: int = 0

    def lease(self, now_s: float) -> Lease:
        return Lease(
            shard=self.shard,
            worker=self.worker,
            steps=self.steps,
            granted_s=now_s if self.granted_s is None else self.granted_s,
            due_s=self.due_s,
            deadline_at_s=self.deadline_at_s,
            owed=self.owed,
            delivered=self.delivered,
        )


@dataclass(frozen=True)
class Round:
    phase: int
    number: int
    base: Mapping[int, int]  # block: version that the leases start from
    step_start: int  # position in the phase's learning-rate schedule
    steps: int
    opened_s: float
    limit_s: float  # from the first lease to the deadline
    deadline_at_s: float
    leases: tuple[Lease, ...] = ()
    late: tuple[LateUpdate, ...] = ()

    @cached_property
    def reported(self) -> tuple[Lease, ...]:
        return tuple([lease for lease in self.leases if lease.reported_s is not None])

    # What every request asks for, and only a change of the round changes. A round may have thousands of leases: lists
    # are made in half the time of generators.

    @cached_property
    def _unreported(self) -> tuple[Lease, ...]:
        return tuple([lease for lease in self.leases if lease.reported_s is None])

    @cached_property
    def _first_dead_s(self) -> float:
        return min([lease.deadline_at_s for lease in self._unreported], default=inf) + self.limit_s

    @cached_property
    def _owing_nothing(self) -> tuple[Lease, ...]:
        return tuple([lease for lease in self._unreported if not lease.owed])

    @cached_property
    def _proven(self) -> tuple[Lease, ...]:
        return tuple([lease for lease in self._owing_nothing if lease.delivered])

    @cached_property
    def _by_worker(self) -> Mapping[str, Lease]:
        return {lease.worker: lease for lease in self.leases}

    def lease_of(self, worker: str) -> Lease | None:
        """A worker has one lease per round."""
        return self._by_worker.get(worker)

    def is_at_work(self, worker: str, now_s: float) -> bool:
        """Whether the worker's lease is one of those at work."""
        lease = self.lease_of(worker)
        return lease is not None and lease.reported_s is None and now_s < lease.deadline_at_s + self.limit_s

    @property
    def advance(self) -> int:
        """Steps by which the phase advances when this round closes: those of the replica that did most."""
        return max((lease.steps_done for lease in self.reported), default=0)

    @property
    def took_s(self) -> float | None:
        """First lease to last report: the sample that time limits are learned from. The time until the round closed
        cannot be used: with one dead worker it is the deadline itself, and the limit would grow forever."""
        if not self.reported:
            return None
        last_s = max(lease.reported_s or 0.0 for lease in self.reported)
        return max(0.0, last_s - min(lease.granted_s for lease in self.reported))

    def at_work(self, now_s: float) -> tuple[Lease, ...]:
        """Leases that may still report. One that missed its deadline by a whole round is taken for dead. If it
        reports after all, its update counts."""
        if now_s < self._first_dead_s:
            return self._unreported
        return tuple([x for x in self._unreported if now_s < x.deadline_at_s + self.limit_s])

    def awaited(self, now_s: float, spec: SwarmSpec) -> tuple[Lease, ...]:
        """The leases at work that the round waits for. It does not wait for workers that owe updates. For workers that
        never delivered it waits until it has enough updates and is a few times as old as the delivered leases took,
        and for the others until they are overdue."""
        patience = self._patience(now_s, spec)
        patient = now_s < patience.newcomers_until_s
        if now_s < self._first_dead_s:
            candidates = self._owing_nothing if patient else self._proven
        else:
            candidates = tuple([x for x in self.at_work(now_s) if not x.owed and (x.delivered or patient)])
        if patience.overdue_s == inf:
            return candidates
        return tuple([x for x in candidates if not x.delivered or now_s < x.due_s + patience.overdue_s])

    def _patience(self, now_s: float, spec: SwarmSpec) -> Patience:
        if not self.reported or len(self.reported) + len(self.late) < spec.min_updates:
            return Patience()
        took_s = max([(x.reported_s or 0.0) - x.granted_s for x in self.reported])
        first_s, counts = min([x.granted_s for x in self.reported]), (len(self.reported), self._num_missing(now_s))
        return patience(self, first_s, took_s, *counts, now_s, spec)

    def _num_missing(self, now_s: float) -> int:
        """The leases at work whose workers owe nothing."""
        if now_s < self._first_dead_s:
            return len(self._owing_nothing)
        return sum([not x.owed for x in self.at_work(now_s)])

    def overdue_at_s(self, now_s: float, spec: SwarmSpec) -> float:
        """When the first of the awaited leases is overdue. Nobody asks for anything then."""
        overdue_s = self._patience(now_s, spec).overdue_s
        if overdue_s == inf:
            return inf
        return min((x.due_s + overdue_s for x in self.awaited(now_s, spec) if x.delivered), default=inf)

    @property
    def ceiling_at_s(self) -> float:
        """When the round closes with what it has. Nothing moves it."""
        return min([x.granted_s for x in self.reported], default=inf) + LONGEST_LIMITS * self.limit_s

    def with_grant(self, grant: Grant, now_s: float) -> Round:
        """The round with a lease of this grant. A worker has one lease per round. Asking again renews it and moves
        nothing."""
        own = self.lease_of(grant.worker)
        if own and own.reported_s is not None:
            return self
        others = [x for x in self.leases if x is not own] if own else self.leases
        leases = (*others, grant.lease(now_s))
        return replace(self, leases=leases, deadline_at_s=max(self.deadline_at_s, grant.deadline_at_s))

    def with_report(self, worker: str, steps_done: int, now_s: float) -> Round:
        """The round with this worker's update. A second report, or one without a step or a lease, changes nothing."""
        if steps_done < 1:
            return self
        leases = [
            replace(x, reported_s=now_s, steps_done=min(steps_done, x.steps), owed=0, delivered=0)
            if x.worker == worker and x.reported_s is None
            else x
            for x in self.leases
        ]
        return replace(self, leases=tuple(leases))

    def with_late(self, update: LateUpdate, owed: int = 0, delivered: int = 0) -> Round:
        """The round with this update, after which its worker owes and has delivered so many."""
        if update in self.late:
            return self
        leases = [
            replace(x, owed=owed, delivered=delivered) if x.worker == update.worker and x.reported_s is None else x
            for x in self.leases
        ]
        return replace(self, leases=tuple(leases), late=(*self.late, update))


@dataclass(frozen=True)
class Patience:
    """For workers that never delivered until a moment, for the others so long after they are due."""

    newcomers_until_s: float = inf
    overdue_s: float = inf


def patience(
    round: Round, first_granted_s: float, took_s: float, reported: int, missing: int, now_s: float, spec: SwarmSpec
) -> Patience:
    """How long a round with enough updates waits for missing leases, if the delivered ones took so long: while the time
    that the others lose is worth less than what the missing updates lose by being late. In the first round nobody has
    shown its speed. A minority that reports first may have trained one step of each lease: the others then need as many
    times longer as a lease has steps. Or it may have trained nothing: less than the shortest time of a round counts as
    that."""
    missing_share, floor_s = missing / reported, spec.deadline_floor_s
    worth = _late_costs(spec) * missing_share  # of a lease's time, for each of those that wait
    if round.number == 0 and missing_share > 1:
        newcomers_s = max(NEWCOMER_PATIENCE, (1 + SLACK_SHARE) * round.steps) * max(floor_s, took_s)
    else:
        newcomers_s = max(floor_s, min(NEWCOMER_PATIENCE, 1 + NEWCOMER_PATIENCE * worth) * took_s)
    waits_for_all = missing_share >= 1 or now_s < first_granted_s + floor_s
    overdue_s = inf if waits_for_all else max(LEAST_OVERDUE_SHARE, worth) * took_s
    return Patience(first_granted_s + newcomers_s, overdue_s)


def _late_costs(spec: SwarmSpec) -> float:
    """The share of an update that is lost if it is merged one round late."""
    return 1 - float(2**-spec.staleness_exponent) if spec.max_lag else 1.0


@dataclass(frozen=True)
class Decision:
    action: Literal["wait", "close", "extend"]
    reason: str
    deadline_at_s: float  # of the round from now on


def decide(round: Round, now_s: float, spec: SwarmSpec) -> Decision:
    """A round closes when every awaited lease has reported, or at the deadline with `min_updates`. With fewer updates,
    a round whose leases have all reported waits until its deadline for others to join, and one that waits for leases at
    work until its ceiling. It needs one update of its own: late ones alone would make a version without advancing the
    schedule."""
    at_work, awaited = len(round.at_work(now_s)), len(round.awaited(now_s, spec))
    fresh, late = len(round.reported), len(round.late)
    updates = fresh + late
    tally = f"{updates} {'update' if updates == 1 else 'updates'} in" + (f" ({late} late)" if late else "")
    if not fresh and not at_work:
        silent = f"none of the {len(round.leases)} leases has reported" if round.leases else "nobody has a lease"
        return Decision("wait", f"{silent}: waiting for a worker", round.deadline_at_s)
    enough, left_s = updates >= spec.min_updates, round.deadline_at_s - now_s
    needed = f"min_updates = {spec.min_updates}" if fresh else "one of this round"
    if fresh and not awaited and (enough or left_s <= 0):
        dead = len(round.leases) - fresh
        given_up = f", {dead} not waited for" if at_work else f", {dead} given up" if dead else ""
        return Decision("close", f"all leases are in: {tally}{given_up}", round.deadline_at_s)
    if not at_work:
        return Decision("wait", f"{tally}, {needed} needed, {left_s:.0f} s left to join", round.deadline_at_s)
    if left_s > 0:
        return Decision("wait", f"{tally}, {at_work} at work, {left_s:.0f} s left", round.deadline_at_s)
    if fresh and enough:
        return Decision("close", f"deadline passed with {tally}, {at_work} missing", round.deadline_at_s)
    if now_s >= round.ceiling_at_s:
        return Decision("close", f"the longest time of a round passed with {tally}", round.deadline_at_s)
    extended_s = min(now_s + round.limit_s, round.ceiling_at_s)
    return Decision("extend", f"deadline passed with {tally}, {needed} needed", extended_s)


def lateness(lease: Lease, round: Round, now_s: float) -> str | None:
    """Why a lease of an open round is late. None if it has reported, or may still report in time."""
    slack_s = SLACK_SHARE * (lease.due_s - lease.granted_s)
    if lease.reported_s is not None or now_s <= min(lease.due_s + slack_s, lease.deadline_at_s):
        return None
    if now_s < lease.deadline_at_s:
        return "slower than its speed promised: it should be in by now"
    if now_s < lease.deadline_at_s + round.limit_s:
        return "missed its deadline: counted if it still comes"
    return "silent for a whole round past its deadline: taken for dead"


def learned_limit_s(past_round_times_s: Sequence[float], spec: SwarmSpec) -> tuple[float, str]:
    """Seconds that a round of a phase may take, and why: from the times (`Round.took_s`) of its last rounds."""
    recent = past_round_times_s[-WINDOW:]
    if len(recent) < MIN_SAMPLES:
        return spec.deadline_ceiling_s, f"the longest allowed, until {MIN_SAMPLES} rounds are timed"
    middle = median(recent)
    spread = median(abs(seconds - middle) for seconds in recent)
    learned = middle + max(spec.deadline_spreads * spread, SLACK_SHARE * middle)
    origin = f"median {middle:.1f} s, spread {spread:.1f} s of {len(recent)} rounds"
    if learned < spec.deadline_floor_s:
        return spec.deadline_floor_s, f"the shortest allowed; {origin}"
    if learned > spec.deadline_ceiling_s:
        return spec.deadline_ceiling_s, f"the longest allowed; {origin}"
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
    """The round after a merge, based on the next version of every block. None if the phase is finished."""
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


def open_phases(spec: RunSpec, finished: Collection[int] = ()) -> tuple[Phase, ...]:
    """The unfinished phases of the first group that has any. None if the run is finished."""
    for group in spec.groups:
        if unfinished := tuple(phase for phase in group if phase.index not in finished):
            return unfinished
    return ()
