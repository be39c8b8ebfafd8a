"""Watching: what people and their dashboards may want to see of a run, read from the ledger. Nothing is changed here.
Next: service.py, which shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from blocktrain.spec import RunSpec
from blocktrain.swarm.ledger import Ledger
from blocktrain.swarm.ledger_records import Evaluation, RoundLoss
from blocktrain.swarm.rounds import Round, decide
from blocktrain.wire.messages import Curves, EventEntry, EventPage, HeldOutPoint, LossCurve, LossPoint, Page

NEWS = 20  # events in a status
MAX_POINTS = 500  # of one curve
MAX_EVALUATIONS = 5000  # that a curve is thinned from

Point = TypeVar("Point")


class Watching:
    def __init__(self, spec: RunSpec, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._spec, self._ledger, self._clock = spec, ledger, clock

    def status(self) -> dict[str, Any]:
        """Where the run is now."""
        now_s, rounds, run = self._clock(), self._ledger.open_rounds(), self._ledger.run()
        return {
            "name": self._spec.name,
            "now_s": now_s,
            "paused": run is not None and run.paused,
            "phases": [
                {
                    "phase": phase.phase,
                    "blocks": list(self._spec.phases[phase.phase].blocks),
                    "step": phase.step,
                    "steps": self._spec.phases[phase.phase].steps,
                    "finished": phase.finished,
                    "round": self._round(rounds[phase.phase], now_s) if phase.phase in rounds else None,
                }
                for phase in self._ledger.phases()
            ],
            "num_phases": len(self._spec.phases),
            "versions": self._ledger.consistent_manifest().versions,
            "workers": [asdict(worker) for worker in self._ledger.workers()],
            "evaluations": [asdict(evaluation) for evaluation in self._ledger.evaluations()],
            "events": [asdict(event) for event in self._ledger.events(limit=NEWS)],
        }

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

    def _round(self, round: Round, now_s: float) -> dict[str, Any]:
        return {
            "number": round.number,
            "reason": decide(round, now_s, self._spec.swarm).reason,
            "deadline_s": round.deadline_s - now_s,
            "leases": [asdict(lease) for lease in round.leases],
        }


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
    )
