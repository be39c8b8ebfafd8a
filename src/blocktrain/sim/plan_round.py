"""A round with thousands of leases, as the policy sees it. Its decisions depend on a few leases: the worker's own, the
extremes, and how many there are of each kind. So that a decision takes no longer with 10,000 leases than with ten, the
policy is given a round with these leases and the true counts. A test compares the decisions with those on all leases.
Next: plan.py, which asks; ../swarm/policy/rounds.py and ../swarm/policy/leases.py, which decide."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import inf

from blocktrain.spec import SwarmSpec
from blocktrain.swarm.policy.rounds import Grant, LateUpdate, Lease, Patience, Round, patience

ROUNDING_S = 1e-6


class _Some(tuple[Lease, ...]):
    """Some of many leases. Its length is the number of all."""

    total: int

    def __len__(self) -> int:
        return self.total


def _some(leases: Iterable[Lease], total: int) -> tuple[Lease, ...]:
    some = _Some(leases)
    some.total = total
    return some


@dataclass(frozen=True)
class SampledRound(Round):
    """The leases are a sample; the counts are of all."""

    num_reported: int = 0
    num_at_work: int = 0
    num_awaited: int = 0
    num_missing: int = 0

    @cached_property
    def reported(self) -> tuple[Lease, ...]:
        return _some((x for x in tuple(self.leases) if x.reported_s is not None), self.num_reported)

    def at_work(self, now_s: float) -> tuple[Lease, ...]:
        """A sample is of one moment: the policy asks several times, and it is computed once."""
        return self._once("_at_work", lambda: _some(super(SampledRound, self).at_work(now_s), self.num_at_work))

    def awaited(self, now_s: float, spec: SwarmSpec) -> tuple[Lease, ...]:
        return self._once("_awaited", lambda: _some(super(SampledRound, self).awaited(now_s, spec), self.num_awaited))

    def _num_missing(self, now_s: float) -> int:
        return self.num_missing

    def _once(self, name: str, compute: Callable[[], tuple[Lease, ...]]) -> tuple[Lease, ...]:
        known = self.__dict__.get(name)
        if known is None:
            known = self.__dict__[name] = compute()
        return known


class PlannedRound:
    """All leases of an open round, and what the policy needs of them."""

    def __init__(self, round: Round, spec: SwarmSpec) -> None:
        self.round, self._spec = round, spec
        self.open: dict[str, Lease] = {}  # by worker, also those taken for dead
        self.reported: dict[str, Lease] = {}
        self.late: list[LateUpdate] = []
        self._at_work = [0, 0, 0]  # owed, newcomers, delivered
        self._ends: list[tuple[float, str, float]] = []  # when a lease is taken for dead
        self._dead: set[tuple[str, float]] = set()
        self._awaited: tuple[dict[str, Lease], ...] = ({}, {})  # newcomers, and those that delivered before
        self._due: list[float] = []  # of those that delivered before, in order
        # Newcomers and those that delivered before, by due time and by deadline: the latest first.
        self._latest: tuple[list[tuple[float, str, float]], ...] = ([], [], [], [])
        self.look_s = -inf  # when it is decided about next, although nobody reports
        self._marks: dict[str, Lease] = {}  # extremes of those that reported
        self._extremes: dict[str, float] = {}

    def grant(self, grant: Grant, now_s: float) -> None:
        if grant.granted_s is not None:
            return  # renewed: nothing changes
        lease = grant.lease(now_s)
        self._remove(self.open.get(grant.worker))
        self.open[grant.worker] = lease
        kind = _kind(lease)
        self._at_work[kind] += 1
        heapq.heappush(self._ends, (lease.deadline_at_s + self.round.limit_s, lease.worker, now_s))
        if kind:
            self._awaited[kind - 1][lease.worker] = lease
            if kind == 2:
                insort(self._due, lease.due_s)
            heapq.heappush(self._latest[kind - 1], (-lease.due_s, lease.worker, now_s))
            heapq.heappush(self._latest[kind + 1], (-lease.deadline_at_s, lease.worker, now_s))
        self.round = replace(self.round, deadline_at_s=max(self.round.deadline_at_s, grant.deadline_at_s))

    def report(self, worker: str, steps_done: int, now_s: float) -> None:
        lease = self.open.pop(worker)
        self._remove(lease)
        done = replace(lease, reported_s=now_s, steps_done=min(steps_done, lease.steps), owed=0, delivered=0)
        self.reported[worker] = done
        if len(self.reported) <= max(2, self._spec.min_updates):
            self._marks[f"reported {len(self.reported)}"] = done
        self._mark("first", done, -done.granted_s)
        self._mark("longest", done, now_s - done.granted_s)
        self._mark("latest due", done, done.due_s)
        self._mark("latest deadline", done, done.deadline_at_s)
        self._mark("most steps", done, done.steps_done)
        self._mark("last", done, now_s)

    def extend(self, deadline_at_s: float) -> None:
        self.round = replace(self.round, deadline_at_s=deadline_at_s)

    def is_waiting(self, now_s: float) -> bool:
        """Whether the decision is certainly to wait: before its deadline, a round waits for awaited leases."""
        self._bury(now_s)
        return now_s < self.round.deadline_at_s and self._num_awaited(now_s) > 0

    def _num_awaited(self, now_s: float) -> int:
        patience = self._patience(now_s)
        proven = len(self._due) - bisect_right(self._due, now_s - patience.overdue_s)
        return proven + (self._at_work[1] if now_s < patience.newcomers_until_s else 0)

    def view(self, worker: str | None, now_s: float) -> SampledRound:
        """What the policy is asked with for this worker."""
        self._bury(now_s)
        own = (self.open.get(worker), self.reported.get(worker)) if worker is not None else ()
        tops = [self._top(heap, worker) for heap in self._latest]
        few = (lease for kind in self._awaited for lease in islice(kind.values(), self._spec.min_updates + 1))
        sample = {x.worker: x for x in (*self._marks.values(), *tops, *few, *own) if x is not None}
        r = self.round
        return SampledRound(
            r.phase, r.number, r.base, r.step_start, r.steps, r.opened_s, r.limit_s, r.deadline_at_s,
            tuple(sorted(sample.values(), key=lambda x: (x.granted_s, x.worker))),
            tuple(self.late[: max(1, self._spec.min_updates)]),
            num_reported=len(self.reported),
            num_at_work=sum(self._at_work),
            num_awaited=self._num_awaited(now_s),
            num_missing=self._at_work[1] + self._at_work[2],
        )  # fmt: skip

    def _patience(self, now_s: float) -> Patience:
        """As `Round.awaited` has it."""
        if len(self.reported) + len(self.late) < self._spec.min_updates or not self.reported:
            return Patience()
        counts = len(self.reported), self._at_work[1] + self._at_work[2]
        took_s = (self._marks["longest"].reported_s or 0.0) - self._marks["longest"].granted_s
        return patience(self.round, self._marks["first"].granted_s, took_s, *counts, now_s, self._spec)

    def next_look_s(self, now_s: float) -> float:
        """When the decision may change although nobody reports."""
        patience = self._patience(now_s)
        times = [self.round.deadline_at_s, patience.newcomers_until_s]
        if self.reported:
            times.append(self._marks["first"].granted_s + self._spec.deadline_floor_s)
            first = bisect_right(self._due, now_s - patience.overdue_s)
            times += [due_s + patience.overdue_s + ROUNDING_S for due_s in self._due[first : first + 1]]
        if self._ends:
            times.append(self._ends[0][0])
        return min((x for x in times if x > now_s), default=now_s + self.round.limit_s)

    def _mark(self, name: str, lease: Lease, value: float) -> None:
        if value > self._extremes.get(name, -inf):
            self._marks[name], self._extremes[name] = lease, value

    def _remove(self, lease: Lease | None) -> None:
        if lease is not None and (lease.worker, lease.granted_s) not in self._dead:
            self._at_work[kind := _kind(lease)] -= 1
            if kind:
                del self._awaited[kind - 1][lease.worker]
            if kind == 2:
                del self._due[bisect_left(self._due, lease.due_s)]
            self._dead.add((lease.worker, lease.granted_s))

    def _bury(self, now_s: float) -> None:
        while self._ends and self._ends[0][0] <= now_s:
            _, worker, granted_s = heapq.heappop(self._ends)
            lease = self.open.get(worker)
            if lease is not None and lease.granted_s == granted_s:
                self._remove(lease)

    def _top(self, heap: list[tuple[float, str, float]], worker: str | None) -> Lease | None:
        """The lease at work of another worker that is the latest."""
        while heap and (heap[0][1], heap[0][2]) in self._dead:
            heapq.heappop(heap)
        if not heap or heap[0][1] != worker:
            return self.open[heap[0][1]] if heap else None
        own = heapq.heappop(heap)
        other = self._top(heap, worker)
        heapq.heappush(heap, own)
        return other


def _kind(lease: Lease) -> int:
    return 0 if lease.owed else 2 if lease.delivered else 1
