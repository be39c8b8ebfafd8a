"""Losses and samples of a run from its start until now, read from the ledger and thinned to what a page can draw.
Next: status.py, the state of the moment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from blocktrain.spec import RunSpec
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import Evaluation, Event, RoundLoss
from blocktrain.swarm.policy.evaluations import those_that_count
from blocktrain.wire.messages import MAX_LOSS, MAX_SCORE
from blocktrain.wire.people_messages import Curves, HeldOutPoint, LossCurve, LossPoint

MAX_POINTS = 500  # of one curve
MAX_EVALUATIONS = 5000  # that a curve is thinned from
BLOCK = re.compile(r"block ([0-9]{1,6})")  # as a reading of evaluate.py is named

Point = TypeVar("Point")


def curves_of(spec: RunSpec, ledger: Ledger) -> Curves:
    """Training loss of every phase that has closed a round, and the held-out loss of the composed model."""
    losses = ledger.round_losses()
    return Curves(
        max_points=MAX_POINTS,
        training=tuple(
            LossCurve(
                phase=phase,
                blocks=spec.phases[phase].blocks,
                points=tuple(_loss_point(loss) for loss in thinned([x for x in losses if x.phase == phase])),
            )
            for phase in sorted({loss.phase for loss in losses})
        ),
        held_out=tuple(
            _held_out_point(evaluation, answer)
            for evaluation, _ in thinned([*those_that_count(ledger.evaluations(limit=MAX_EVALUATIONS))])
            if (answer := answer_of(evaluation.scores))
        ),
    )


def samples_of(events: Sequence[Event], evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """What the model wrote at these evaluations, oldest first, with the loss that was measured then: as those
    workers tell it whose evaluations count."""
    answers = {each.lease: answer_of(each.scores) for each in evaluations}
    tellers = [(each.worker, each.versions) for each, _ in those_that_count(evaluations)]
    left_out = {each.lease for each in evaluations if (each.worker, each.versions) not in tellers}
    return [
        {"at_s": event.at_s, "nats_per_byte": answer["nats_per_byte"], "samples": event.data["samples"]}
        for event in events
        if event.data.get("samples") and event.data["lease"] not in left_out
        for answer in [answers.get(event.data["lease"]) or {"nats_per_byte": event.data.get("nats_per_byte")}]
    ]


def thinned(points: Sequence[Point]) -> list[Point]:
    """Every n-th, counted back from the newest, so that no more than MAX_POINTS are left."""
    every = max(1, -(-len(points) // MAX_POINTS))
    return list(points[::-1][::every][::-1])


def answer_of(scores: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The last reading of the first path. None if a worker sent something else."""
    needed = {"path", "reading", "nats_per_byte"}
    if not scores or not all(needed <= score.keys() for score in scores):
        return None
    answer = [score for score in scores if score["path"] == scores[0]["path"]][-1]
    return answer if isinstance(answer["nats_per_byte"], int | float) else None


def blocks_of(scores: Sequence[Mapping[str, Any]], path: str) -> dict[int, float]:
    """The scores of the single blocks on a path. Other readings are left out."""
    named = [(BLOCK.fullmatch(str(x["reading"])), x["nats_per_byte"]) for x in scores if x["path"] == path]
    return {int(name[1]): float(nats) for name, nats in named if name and isinstance(nats, int | float)}


def _loss_point(loss: RoundLoss) -> LossPoint:
    return LossPoint(
        round=loss.round,
        step=loss.step,
        at_s=loss.at_s,
        nats_per_byte=min(max(0.0, loss.loss), MAX_LOSS),  # older ledgers may hold any number
        updates=loss.updates,
        tokens=int(loss.tokens),
    )


def _held_out_point(evaluation: Evaluation, answer: Mapping[str, Any]) -> HeldOutPoint:
    return HeldOutPoint(
        at_s=evaluation.at_s,
        versions=dict(evaluation.versions),
        path=str(answer["path"]),
        reading=str(answer["reading"]),
        nats_per_byte=min(float(answer["nats_per_byte"]), MAX_SCORE),
        blocks=blocks_of(evaluation.scores, str(answer["path"])),
    )
