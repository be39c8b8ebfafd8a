"""Watching: what people and their dashboards may want to see of a run, read from the ledger. Nothing is changed here.
Next: service.py, which shows it; picture.py, what blocks and workers do; streaming.py, the same as it changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from blocktrain.spec import RunSpec
from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.coordinator.picture import Held, block_pictures, newest_leases, worker_state
from blocktrain.swarm.coordinator.traffic import Traffic
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import Evaluation, PhaseRecord, Role, RoundLoss, RoundRecord, Worker
from blocktrain.swarm.policy.rounds import WINDOW, decide, lateness, learned_deadline_s
from blocktrain.wire.messages import Curves, EventEntry, EventPage, HeldOutPoint, LossCurve, LossPoint, Page

NEWS = 20  # events in a status
MAX_POINTS = 500  # of one curve
MAX_EVALUATIONS = 5000  # that a curve is thinned from
BLOCK = re.compile(r"block ([0-9]{1,6})")  # as a reading of evaluate.py is named

Point = TypeVar("Point")


class Watching:
    def __init__(self, spec: RunSpec, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._spec, self._ledger, self._clock = spec, ledger, clock
        self._started_s = clock()
        self.traffic = Traffic()

    def status(self) -> dict[str, Any]:
        """Where the run is now."""
        now_s, run, newest = self._clock(), self._ledger.run(), self._ledger.consistent_manifest()
        assert run is not None, "a coordinator is started on a ledger with a run"
        phases = self._ledger.phases()
        records = {x.phase: self._ledger.rounds(x.phase, WINDOW + 1) for x in phases if not x.finished}
        held = newest_leases(record for of_phase in records.values() for record in of_phase)
        workers = self._ledger.workers()
        return {
            "name": self._spec.name,
            "now_s": now_s,
            "founded_s": run.created_s,
            "paused": run.paused,
            "phases": [self._phase(phase, records.get(phase.phase, ()), now_s) for phase in phases],
            "num_phases": len(self._spec.phases),
            "steps": sum(phase.steps for phase in self._spec.phases),
            "blocks": block_pictures(self._spec, phases, newest.versions),
            "versions": newest.versions,
            "workers": self._workers(workers, held, now_s),
            "traffic": {
                "up_bytes": sum(worker.update_bytes for worker in workers),
                "down_bytes": self.traffic.totals()[0],
                "down_since_s": self._started_s,
            },
            "evaluations": [asdict(evaluation) for evaluation in self._ledger.evaluations()],
            "events": [asdict(event) for event in self._ledger.events(limit=NEWS)],
        }

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
        """The open one, the last of these."""
        round = records[-1].round
        _, why = learned_deadline_s(self._ledger.past_round_times_s(round.phase), self._spec.swarm)
        return {
            "number": round.number,
            "reason": decide(round, now_s, self._spec.swarm).reason,
            "deadline_s": round.deadline_s - now_s,
            "limit_s": round.limit_s,
            "limit_reason": why,
            "extensions": records[-1].extensions,
            "leases": [{**asdict(lease), "late": lateness(lease, round, now_s)} for lease in round.leases],
        }

    def _workers(self, workers: Sequence[Worker], held: Held, now_s: float) -> list[dict[str, Any]]:
        measuring, (_, sent_bytes) = self._ledger.evaluation_lease(), self.traffic.totals()
        return [
            {
                **asdict(worker),
                "alias": alias_of(worker.id),
                "down_bytes": sent_bytes.get(worker.id, 0),
                **dict(zip(("state", "why"), worker_state(worker, held, measuring, now_s), strict=True)),
            }
            for worker in workers
        ]

    def events(self, page: EventPage) -> list[EventEntry]:
        return [EventEntry(**asdict(event)) for event in self._ledger.events(page.after, page.before)]

    def contributions(self, page: Page) -> list[dict[str, Any]]:
        return [asdict(contribution) for contribution in self._ledger.contributions(page.after)]

    def curves(self) -> Curves:
        """Training loss of every phase that has closed a round, and the held-out loss of the composed model."""
        losses = self._ledger.round_losses()
        return Curves(
            max_points=MAX_POINTS,
            training=tuple(
                LossCurve(
                    phase=phase,
                    blocks=self._spec.phases[phase].blocks,
                    points=tuple(_loss_point(loss) for loss in thinned([x for x in losses if x.phase == phase])),
                )
                for phase in sorted({loss.phase for loss in losses})
            ),
            held_out=tuple(
                _held_out_point(evaluation, answer)
                for evaluation in thinned(self._ledger.evaluations(limit=MAX_EVALUATIONS))
                if (answer := answer_of(evaluation.scores))
            ),
        )


def status_for(role: Role, status: Mapping[str, Any]) -> dict[str, Any]:
    """What workers call themselves, often their host's name, is for admins; others see aliases in its place."""
    if role == "admin":
        return dict(status)
    return {**status, "workers": [{**worker, "name": worker["alias"]} for worker in status["workers"]]}


def contributions_for(role: Role, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if role == "admin":
        return list(map(dict, records))
    return [{**record, "worker_name": alias_of(record["update"]["worker"])} for record in records]


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Every n-th, counted back from the newest, so that no more than `most` are left."""
    every = max(1, -(-len(points) // most))
    return list(points[::-1][::every][::-1])


def answer_of(scores: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The last reading of the first path; None where a worker sent no such thing."""
    needed = {"path", "reading", "nats_per_byte"}
    if not scores or not all(needed <= score.keys() for score in scores):
        return None
    answer = [score for score in scores if score["path"] == scores[0]["path"]][-1]
    return answer if isinstance(answer["nats_per_byte"], int | float) else None


def blocks_of(scores: Sequence[Mapping[str, Any]], path: str) -> dict[int, float]:
    """What the single blocks score on a path; what is no such thing is left out."""
    named = [(BLOCK.fullmatch(str(x["reading"])), x["nats_per_byte"]) for x in scores if x["path"] == path]
    return {int(name[1]): float(nats) for name, nats in named if name and isinstance(nats, int | float)}


def _loss_point(loss: RoundLoss) -> LossPoint:
    return LossPoint(
        round=loss.round,
        step=loss.step,
        at_s=loss.at_s,
        nats_per_byte=loss.loss,
        updates=loss.updates,
        tokens=int(loss.tokens),
    )


def _held_out_point(evaluation: Evaluation, answer: Mapping[str, Any]) -> HeldOutPoint:
    return HeldOutPoint(
        at_s=evaluation.at_s,
        versions=dict(evaluation.versions),
        path=str(answer["path"]),
        reading=str(answer["reading"]),
        nats_per_byte=float(answer["nats_per_byte"]),
        blocks=blocks_of(evaluation.scores, str(answer["path"])),
    )
