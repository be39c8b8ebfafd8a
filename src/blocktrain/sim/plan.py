"""Plans: how a swarm of many workers would do, in virtual time. The real policy decides about rounds, leases, track
records and late updates; an event queue takes the place of HTTP, ledger and disk, which cost nothing here. For bugs
use the simulator of world.py, which runs all of them.
Next: plan_round.py, how one round holds thousands of leases; ../cli/commands/swarm/simulate.py, which prints it."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from blocktrain.errors import ConfigError
from blocktrain.sim.plan_round import PlannedRound
from blocktrain.spec import RunSpec
from blocktrain.swarm.policy.leases import UPLOAD_SHARE, NoWork, OpenPhase, WorkerFacts, choose_work
from blocktrain.swarm.policy.rounds import (
    LateUpdate,
    Refusal,
    decide,
    learned_limit_s,
    next_round,
    open_phases,
    open_round,
    staleness_weight,
)
from blocktrain.swarm.policy.track_record import TrackRecord, usual_steps_per_s

MEMORY_BYTES = 2**52
HOUR_S = 3600.0
LIAR_SHARE = 0.1  # of a round's limit, after which a liar whose lease is over asks again
MOST_UPDATES = 60_000  # of all rounds together, unless the number of rounds is given
FEWEST_ROUNDS, USUAL_ROUNDS = 5, 20


@dataclass(frozen=True)
class Conditions:
    """Of the volunteers and their network."""

    workers: int = 100
    churn: float = 0.0  # share of the workers that leave per hour; as many join
    liars: float = 0.0  # share of the workers whose updates never count: half are silent, half are refused
    steps_per_s: float = 1.0  # of the middle worker
    spread: float = 0.3  # of the logarithm of the speeds
    download_mbit: float = 100.0
    upload_mbit: float = 20.0
    latency_s: float = 0.1
    rounds: int = USUAL_ROUNDS  # of each phase, after which the plan ends
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (
            ("workers", 1, 100_000),
            ("churn", 0, 1000),
            ("liars", 0, 0.99),
            ("spread", 0, 3),
            ("latency_s", 0, 3600),
            ("rounds", 1, 10_000),
        ):
            if not low <= (value := getattr(self, name)) <= high:
                raise ConfigError(f"{name} = {value:g} is out of range: give {low:g} to {high:g}")
        for name in ("steps_per_s", "download_mbit", "upload_mbit"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} = {value:g} is out of range: give a number above 0")


def usual_rounds(workers: int) -> int:
    """Enough to see what happens, and so few that a plan of 10,000 workers takes seconds."""
    return max(FEWEST_ROUNDS, min(USUAL_ROUNDS, MOST_UPDATES // max(1, workers)))


@dataclass(frozen=True)
class Sizes:
    """Bytes of a phase's update, of the difference from its last version, and of whole blocks."""

    update: int
    difference: int
    trained: int
    around: int


@dataclass
class PlanResult:
    conditions: Conditions
    virtual_s: float = 0.0
    rounds: int = 0
    computed_steps: float = 0.0  # by honest workers
    merged_steps: float = 0.0  # of these, by their weight
    late_updates: int = 0
    merged_updates: int = 0
    down_bytes: float = 0.0
    up_bytes: float = 0.0
    busy_s: float = 0.0  # that honest workers computed
    honest_s: float = 0.0  # that honest workers were there
    left: int = 0
    round_s: list[float] = field(default_factory=list)

    @property
    def rounds_per_hour(self) -> float:
        return HOUR_S * self.rounds / self.virtual_s if self.virtual_s else 0.0

    @property
    def goodput(self) -> float:
        """The share of the steps computed by honest workers that became part of a version."""
        return self.merged_steps / self.computed_steps if self.computed_steps else 0.0

    @property
    def busy(self) -> float:
        """The share of the honest workers' time in which they computed."""
        return self.busy_s / self.honest_s if self.honest_s else 0.0

    def per_node_hour(self, num_bytes: float) -> float:
        return num_bytes * HOUR_S / (self.virtual_s * self.conditions.workers) if self.virtual_s else 0.0


@dataclass
class _Node:
    name: str
    steps_per_s: float
    lie: str
    leaves_s: float
    record: TrackRecord = field(default_factory=TrackRecord)
    phase: int | None = None
    held: dict[int, int] = field(default_factory=dict)  # block: version
    is_gone: bool = False


class Planner:
    """`sizes` gives the bytes of each phase."""

    def __init__(self, spec: RunSpec, conditions: Conditions, sizes: Callable[[int], Sizes]) -> None:
        self._spec, self._is, self._sizes, self._phases = spec, conditions, sizes, spec.phases
        self._draw, self._order, self._names = random.Random(conditions.seed), count(), count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._rounds: dict[int, PlannedRound] = {}
        self._times: dict[int, list[float]] = {}
        self._usual: dict[int, float | None] = {}
        self._versions = dict.fromkeys(range(spec.model.blocks), 0)
        self._finished: set[int] = set()
        self._waiting: list[_Node] = []
        self._nodes: dict[str, _Node] = {}
        self.now_s, self.result = 0.0, PlanResult(conditions)

    def run(self) -> PlanResult:
        self._open_phases()
        for _ in range(self._is.workers):
            self._join(delay_s=self._draw.random())
        while self._queue and self._rounds and not self._is_done():
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
        self.result.virtual_s = self.now_s
        self.result.honest_s = self.now_s * self._is.workers * (1 - self._is.liars)
        return self.result

    def _is_done(self) -> bool:
        return all(x.round.number >= self._is.rounds for x in self._rounds.values())

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(at_s, self.now_s), next(self._order), action))

    def _join(self, delay_s: float = 0.0) -> None:
        draw, number = self._draw, next(self._names)
        lie = draw.choice(["silent", "refused"]) if draw.random() < self._is.liars else ""
        speed = self._is.steps_per_s * math.exp(draw.gauss(0.0, self._is.spread))
        stays_s = draw.expovariate(self._is.churn / HOUR_S) if self._is.churn else math.inf
        node = _Node(f"{number}", speed, lie, self.now_s + stays_s)
        self._nodes[node.name] = node
        if self._is.churn:
            self._at(node.leaves_s, lambda: self._leave(node))
        self._at(self.now_s + delay_s, lambda: self._ask(node))

    def _leave(self, node: _Node) -> None:
        """Without notice. Another one joins."""
        node.is_gone = True
        self.result.left += 1
        self._join()

    # Leases

    def _ask(self, node: _Node) -> None:
        if node.is_gone:
            return
        record = node.record
        if len(self._rounds) == 1 and node.name in next(iter(self._rounds.values())).reported:
            self._waiting.append(node)  # its update is in, and there is no other phase
            return
        held = frozenset(self._phases[node.phase].blocks) if node.phase is not None else frozenset[int]()
        facts = WorkerFacts(node.name, MEMORY_BYTES, record.steps_per_s, held, record.owed, record.delivered)
        views = {index: planned.view(node.name, self.now_s) for index, planned in self._rounds.items()}
        phases = [OpenPhase(self._phases[index], 0, self._usual.get(index)) for index in views]
        grant = choose_work(facts, phases, views, self.now_s, self._spec.swarm)
        if isinstance(grant, NoWork):
            self._waiting.append(node)  # until a round opens: the coordinator's bell wakes it
            return
        planned = self._rounds[grant.phase]
        if node.name in planned.open and grant.granted_s is None:
            node.record = record.with_miss()
        planned.grant(grant, self.now_s)
        self._look(grant.phase)
        self._work(node, grant.phase, grant.number, grant.steps, grant.deadline_at_s - self.now_s, dict(grant.base))

    def _work(self, node: _Node, phase: int, number: int, steps: int, time_left_s: float, base: dict[int, int]) -> None:
        result, sizes, block = self.result, self._sizes(phase), self._phases[phase].block
        if node.lie == "silent":
            self._at(self.now_s + max(time_left_s, self._liars_pause_s(phase)), lambda: self._ask(node))
            return
        has_previous = node.held.get(block) == base[block] - 1 and node.phase == phase
        down = sizes.difference if has_previous else 0 if node.held.get(block) == base[block] else sizes.trained
        down += 0 if node.phase == phase else sizes.around
        node.phase, node.held[block] = phase, base[block]
        fetch_s = self._is.latency_s + 8e-6 * down / self._is.download_mbit
        send_s = self._is.latency_s + 8e-6 * sizes.update / self._is.upload_mbit
        fitting = math.floor(((1 - UPLOAD_SHARE) * time_left_s - fetch_s) * node.steps_per_s)
        done = max(1, min(steps, fitting + 1))
        compute_s = done / node.steps_per_s
        result.down_bytes += down
        there_s = max(0.0, min(compute_s, node.leaves_s - self.now_s - fetch_s))
        if not node.lie:
            result.computed_steps += there_s * node.steps_per_s
            result.busy_s += there_s
        granted_s, end_s = self.now_s, self.now_s + fetch_s + compute_s + send_s
        if end_s < node.leaves_s:
            self._at(end_s, lambda: self._deliver(node, phase, number, done, base, granted_s))

    def _deliver(
        self, node: _Node, phase: int, number: int, steps: int, base: dict[int, int], granted_s: float
    ) -> None:
        self.result.up_bytes += self._sizes(phase).update
        planned = self._rounds.get(phase)
        if not node.lie and planned is not None:
            block = self._phases[phase].block
            weight = staleness_weight(base[block], planned.round.base[block], self._spec.swarm)
            if not isinstance(weight, Refusal):
                node.record = node.record.with_delivery(steps, self.now_s - granted_s)
                self.result.merged_steps += weight * steps
                self.result.merged_updates += 1
                if number == planned.round.number:
                    planned.report(node.name, steps, self.now_s)
                else:
                    planned.late.append(LateUpdate(node.name, number, 0))
                    self.result.late_updates += 1
                self._decide(phase)
        pause_s = self._liars_pause_s(phase) if node.lie else self._is.latency_s
        self._at(self.now_s + pause_s, lambda: self._ask(node))

    def _liars_pause_s(self, phase: int) -> float:
        planned = self._rounds.get(phase)
        return LIAR_SHARE * (planned.round.limit_s if planned else self._spec.swarm.deadline_ceiling_s)

    # Rounds

    def _look(self, phase: int) -> None:
        """Decides again when time alone may change the decision: once for each such moment."""
        planned = self._rounds[phase]
        at_s = planned.next_look_s(self.now_s)
        if not planned.look_s <= at_s or planned.look_s <= self.now_s:
            planned.look_s = at_s
            self._at(at_s, lambda: self._looked(phase, planned))

    def _looked(self, phase: int, planned: PlannedRound) -> None:
        if self._rounds.get(phase) is planned and planned.look_s <= self.now_s:
            self._decide(phase)

    def _decide(self, phase: int) -> None:
        planned = self._rounds[phase]
        if planned.is_waiting(self.now_s):
            self._look(phase)
            return
        decision = decide(planned.view(None, self.now_s), self.now_s, self._spec.swarm)
        if decision.action == "close":
            self._close(phase, planned)
            return
        if decision.action == "extend":
            planned.extend(decision.deadline_at_s)
        self._look(phase)

    def _close(self, phase: int, planned: PlannedRound) -> None:
        closed, nodes = planned.view(None, self.now_s), self._nodes
        if took_s := closed.took_s:
            self._times.setdefault(phase, []).append(took_s)
        self.result.rounds += 1
        self.result.round_s.append(self.now_s - closed.opened_s)
        for worker in planned.open:
            nodes[worker].record = nodes[worker].record.with_miss()
        speeds = [x for worker in planned.reported if (x := nodes[worker].record.steps_per_s) is not None]
        self._usual[phase] = usual_steps_per_s(sorted(speeds)) or self._usual.get(phase)
        limit_s, _ = learned_limit_s(self._times.get(phase, ()), self._spec.swarm)
        following = next_round(closed, self._phases[phase], limit_s, self.now_s, self._spec.swarm)
        for block in closed.base:
            self._versions[block] += 1
        if following is None:
            self._finished.add(phase)
            del self._rounds[phase]
            self._open_phases()
        else:
            self._rounds[phase] = PlannedRound(following, self._spec.swarm)
            self._look(phase)
        waiting, self._waiting = self._waiting, []
        for node in waiting:
            self._at(self.now_s + self._is.latency_s, lambda node=node: self._ask(node))  # type: ignore[misc]

    def _open_phases(self) -> None:
        for phase in open_phases(self._spec, self._finished):
            if phase.index not in self._rounds:
                limit_s, _ = learned_limit_s(self._times.get(phase.index - 1, ()), self._spec.swarm)
                base = {block: self._versions[block] for block in phase.blocks}
                first = open_round(phase, 0, base, 0, limit_s, self.now_s, self._spec.swarm)
                self._rounds[phase.index] = PlannedRound(first, self._spec.swarm)


def plan(spec: RunSpec, conditions: Conditions, sizes: Callable[[int], Sizes]) -> PlanResult:
    return Planner(spec, conditions, sizes).run()
