"""Status: what people and dashboards see of a run, read from the ledger. It changes nothing.
Next: status_stream.py, which sends it as it changes; curves.py, the losses of the whole run."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from blocktrain.spec import RunSpec
from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.coordinator.quotas import Quotas
from blocktrain.swarm.coordinator.watching.curves import curves_of, samples_of
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import (
    EvaluationLease,
    PhaseRecord,
    Role,
    RoundRecord,
    WorkerRecord,
)
from blocktrain.swarm.policy.evaluations import those_that_count
from blocktrain.swarm.policy.rounds import WINDOW, Lease, Round, decide, lateness, learned_limit_s
from blocktrain.swarm.policy.standing import KeyStanding, weight_factor
from blocktrain.wire.people_messages import Curves, EventEntry, EventPage, Page

NEWS = 20  # events in a status
NEW_AUDITS = 10  # in a status
NEW_SAMPLES = 5  # evaluations whose samples are in a status
MOST_WORKERS = 10_000  # whose traffic is counted apart; what others fetch counts for the run alone
PRESENT_S = 300.0  # since the last request of a worker

BlockState = Literal["planned", "scaffold", "training", "waiting", "frozen"]
Held = Mapping[str, tuple[Lease, RoundRecord]]  # worker: its newest lease, and the round of it


class Watching:
    def __init__(self, spec: RunSpec, ledger: Ledger, quotas: Quotas, clock: Callable[[], float]) -> None:
        self._spec, self._ledger, self._quotas, self._clock = spec, ledger, quotas, clock
        self._started_s = clock()
        self.traffic = Traffic()

    def status(self) -> dict[str, Any]:
        """The state of the run now."""
        now_s, run, newest = self._clock(), self._ledger.run(), self._ledger.consistent_manifest()
        assert run is not None, "a coordinator is started on a ledger with a run"
        phases = self._ledger.phases()
        records = {x.phase: self._ledger.rounds(x.phase, WINDOW + 1) for x in phases if not x.finished}
        held = newest_leases(record for of_phase in records.values() for record in of_phase)
        sampled = self._ledger.sampled(NEW_SAMPLES)  # before the evaluations, so that each has its loss
        workers, evaluations = self._ledger.workers(), self._ledger.evaluations()
        return {
            "name": self._spec.name,
            "now_s": now_s,
            "paused": run.paused,
            "phases": [self._phase(phase, records.get(phase.phase, ()), now_s) for phase in phases],
            "num_phases": len(self._spec.phases),
            "plan": [{"blocks": list(phase.blocks), "steps": phase.steps} for phase in self._spec.phases],
            "steps": sum(phase.steps for phase in self._spec.phases),
            "blocks": block_pictures(self._spec, phases, newest.versions),
            "versions": newest.versions,
            "workers": self._workers(workers, held, self._done(phases), now_s),
            "traffic": {
                "up_bytes": sum(worker.update_bytes for worker in workers),
                "down_bytes": self.traffic.totals()[0],
                "down_since_s": self._started_s,
            },
            "time_left_s": None if run.paused else time_left_s(self._spec, phases, self._timed(phases, records), now_s),
            "storage": asdict(self._quotas.now()),
            "audits": self._audits(),
            "evaluations": [
                {**asdict(evaluation), "confirmed": confirmed}
                for evaluation, confirmed in those_that_count(evaluations)
            ],
            "samples": samples_of(sampled, evaluations),
            "events": [asdict(event) for event in self._ledger.events(limit=NEWS)],
        }

    def _timed(
        self, phases: Sequence[PhaseRecord], records: Mapping[int, Sequence[RoundRecord]]
    ) -> Mapping[int, Sequence[RoundRecord]]:
        """The rounds that show the speed of the run: those of the phase before until one of the open ones closes."""
        finished = [phase.phase for phase in phases if phase.finished]
        if not finished or any(record.closed_s is not None for of_phase in records.values() for record in of_phase):
            return records
        return {**records, finished[-1]: self._ledger.rounds(finished[-1], WINDOW + 1)}

    def _phase(self, phase: PhaseRecord, records: Sequence[RoundRecord], now_s: float) -> dict[str, Any]:
        planned = self._spec.phases[phase.phase]
        return {
            "phase": phase.phase,
            "blocks": list(planned.blocks),
            "step": phase.step,
            "steps": planned.steps,
            "finished": phase.finished,
            "round": self._round(records, now_s) if records and records[-1].closed_s is None else None,
        }

    def _round(self, records: Sequence[RoundRecord], now_s: float) -> dict[str, Any]:
        """The open round, which is the last of these."""
        round = records[-1].round
        _, why = learned_limit_s(self._ledger.past_round_times_s(round.phase), self._spec.swarm)
        return {
            "number": round.number,
            "reason": self._vetting(round) or decide(round, now_s, self._spec.swarm).reason,
            "time_left_s": round.deadline_at_s - now_s,
            "limit_s": round.limit_s,
            "limit_reason": why,
            "extensions": records[-1].extensions,
            "leases": [{**asdict(lease), "late": lateness(lease, round, now_s)} for lease in round.leases],
        }

    def _vetting(self, round: Round) -> str | None:
        """Whether the round waits until workers have scored its updates."""
        vettings = self._ledger.vettings(round.phase, round.number) if self._spec.swarm.vetting else ()
        if all(vetting.closed_s is not None for vetting in vettings):
            return None
        updates, scores = sum(len(x.updates) for x in vettings), sum(len(x.reports) for x in vettings)
        return f"workers score its {updates} updates on held-out text: {scores} of them have reported"

    def _audits(self) -> dict[str, Any]:
        counts = self._ledger.audit_counts()
        return {
            "share": self._spec.swarm.audit_share,
            **{kind: counts.get(kind, 0) for kind in ("passed", "failed", "undecided", "open")},
            "newest": [asdict(audit) for audit in self._ledger.newest_audits(NEW_AUDITS)],
        }

    def _done(self, phases: Sequence[PhaseRecord]) -> bool:
        return len(phases) == len(self._spec.phases) and all(phase.finished for phase in phases)

    def _workers(self, workers: Sequence[WorkerRecord], held: Held, done: bool, now_s: float) -> list[dict[str, Any]]:
        measuring, (_, sent_bytes) = self._ledger.evaluation_lease(), self.traffic.totals()
        known, unknown = self._ledger.key_standings(), KeyStanding()
        pictures = []
        for worker in workers:
            standing = known.get(worker.id, unknown)
            state, why = worker_state(worker, held, measuring, now_s)
            if standing.excluded:
                state, why = standing.excluded, standing.reason
            elif done and state in ("waiting", "away"):
                state, why = "finished", ""
            pictures.append(
                {
                    **asdict(worker),
                    "alias": alias_of(worker.id),
                    "down_bytes": sent_bytes.get(worker.id, 0),
                    "state": state,
                    "why": why,
                    "audits_passed": standing.passes,
                    "suspected": standing.suspected,
                    "weight": weight_factor(standing, self._spec.swarm),
                }
            )
        return pictures

    def events(self, page: EventPage) -> list[EventEntry]:
        return [EventEntry(**asdict(event)) for event in self._ledger.events(page.after, page.before)]

    def contributions(self, page: Page) -> list[dict[str, Any]]:
        return [asdict(contribution) for contribution in self._ledger.contributions(page.after)]

    def curves(self) -> Curves:
        return curves_of(self._spec, self._ledger)


class Traffic:
    """The bytes of blobs that this process has sent since it started. Threads may share it. A fetch names its worker
    itself: the numbers are for people, and nothing is decided by them."""

    def __init__(self) -> None:
        self._total, self._of, self._turn = 0, Counter[str](), threading.Lock()

    def sent(self, num_bytes: int, worker: str | None) -> None:
        with self._turn:
            self._total += num_bytes
            if worker is not None and (worker in self._of or len(self._of) < MOST_WORKERS):
                self._of[worker] += num_bytes

    def totals(self) -> tuple[int, dict[str, int]]:
        """Of the run, and of each worker."""
        with self._turn:
            return self._total, dict(self._of)


# What blocks and workers do


def block_pictures(spec: RunSpec, phases: Iterable[PhaseRecord], versions: Mapping[int, int]) -> list[dict[str, Any]]:
    """Every block, in the order in which text passes through them."""
    opened = {record.phase: record.finished for record in phases}
    return [
        {
            "block": block,
            "layers": spec.model.layers_of(block),
            "version": versions.get(block),
            "state": block_state(spec, block, opened, exists=block in versions),
        }
        for block in range(spec.model.blocks)
    ]


def block_state(spec: RunSpec, block: int, opened: Mapping[int, bool], exists: bool) -> BlockState:
    """`opened` says of every phase that was opened whether it is finished; `exists`, whether the block has a version. A
    block that is trained along, and whose own phase is still to come, is a scaffold."""
    if not exists:
        return "planned"
    unfinished = [phase for phase in spec.phases if block in phase.blocks and not opened.get(phase.index, False)]
    at_work = [phase for phase in unfinished if phase.index in opened]
    if not unfinished:
        return "frozen"
    if not at_work:
        return "waiting"
    return "training" if len(at_work) == len(unfinished) or any(x.block == block for x in at_work) else "scaffold"


def newest_leases(records: Iterable[RoundRecord]) -> Held:
    held: dict[str, tuple[Lease, RoundRecord]] = {}
    for record in records:
        for lease in record.round.leases:
            if lease.worker not in held or held[lease.worker][0].granted_s <= lease.granted_s:
                held[lease.worker] = lease, record
    return held


def worker_state(worker: WorkerRecord, held: Held, measuring: EvaluationLease | None, now_s: float) -> tuple[str, str]:
    """What a worker is doing, and details."""
    if measuring and measuring.worker == worker.id and not measuring.reported and now_s < measuring.deadline_at_s:
        return "measuring", "held-out text"
    if worker.id in held:
        lease, record = held[worker.id]
        where = f"phase {record.round.phase + 1}, round {record.round.number}"
        if record.closed_s is None and lease.reported_s is None:
            why = lateness(lease, record.round, now_s)
            return ("late", f"{where}: {why}") if why else ("at work", where)
        if lease.reported_s is None and worker.last_seen_s <= lease.granted_s:
            return "late", f"{where}: it closed without"
    return ("waiting", "for work") if now_s - worker.last_seen_s < PRESENT_S else ("away", "")


# How it goes on


def time_left_s(
    spec: RunSpec, phases: Sequence[PhaseRecord], records: Mapping[int, Sequence[RoundRecord]], now_s: float
) -> float | None:
    """Until every phase is trained, at the speed of the recent rounds. None before a round has closed. A step of a
    later phase runs more blocks, so steps are weighed by the layers they pass through. It counts down while a round
    goes on, and not below what is left after it: a run that stands still has not ended."""
    work_per_s, newest_s, begun = 0.0, 0.0, 0.0
    for phase, of_phase in records.items():
        closed = [record for record in of_phase if record.closed_s is not None]
        begun += sum(record.round.steps * step_work(spec, phase) for record in of_phase if record.closed_s is None)
        if closed:
            first, last_s = closed[0].round, max(record.closed_s or 0.0 for record in closed)
            began_s = min((lease.granted_s for lease in first.leases), default=first.opened_s)
            steps = sum(record.round.advance for record in closed)
            work_per_s += steps * step_work(spec, phase) / max(last_s - began_s, 1e-3)
            newest_s = max(newest_s, last_s)
    done = {record.phase: record.step for record in phases}
    left = sum((x.steps - done.get(x.index, 0)) * step_work(spec, x.index) for x in spec.phases)
    if left <= 0:
        return 0.0
    return left / work_per_s - min(now_s - newest_s, min(begun, left) / work_per_s) if work_per_s else None


def step_work(spec: RunSpec, phase: int) -> int:
    """In passes through layers: one forward, three to train (train/flops.py counts exactly)."""
    shape, layers = spec.phases[phase], spec.model.layers_of
    return sum(map(layers, shape.below)) + 3 * sum(map(layers, shape.blocks)) + 2 * sum(map(layers, shape.ahead))


# What each role sees


def status_for(role: Role, status: Mapping[str, Any]) -> dict[str, Any]:
    """The name that a worker gives itself, often its host's, is for admins only. Other roles see the alias."""
    if role == "admin":
        return dict(status)
    return {**status, "workers": [{**worker, "name": worker["alias"]} for worker in status["workers"]]}


def contributions_for(role: Role, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if role == "admin":
        return list(map(dict, records))
    return [{**record, "worker_name": alias_of(record["update"]["worker"])} for record in records]
