"""Evaluations: which ones are sound, which ones agree, and which one counts. Two workers score each model on their own.
An evaluation is confirmed if another worker's agrees with it, and provisional while it is the only one. Where two
contradict each other, neither counts until a third one agrees with one of them. Pure: no clock, socket or disk.
Next: ../coordinator/granting.py, which asks workers for them; ../coordinator/intake.py, which takes them in."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from blocktrain.spec import Denoise, EndToEnd, RunSpec, usable_weights
from blocktrain.wire.messages import MAX_LOSS

EVALUATORS = 2  # that score each model at the same time
MOST_LEASES = 5  # to evaluate one model: workers that contradict each other do not evaluate forever
TOLERANCE_NATS = 0.02  # per byte, between the scores of two devices
TOLERANCE_WEIGHT = 0.1  # between the fitted weights of two devices
SAFE_WEIGHT, SAFE_SUM = (-1.0, 2.0), (0.25, 2.0)  # of weights that nobody has confirmed

_READING = re.compile("last|combined|block ([0-9]{1,6})")
_PATHS = ("stack", "mean", "euler")


class Evaluated(Protocol):
    @property
    def worker(self) -> str: ...
    @property
    def versions(self) -> Mapping[int, int]: ...
    @property
    def scores(self) -> Any: ...
    @property
    def combine(self) -> Mapping[str, Sequence[float]]: ...


One = TypeVar("One", bound=Evaluated)


@dataclass(frozen=True)
class Seat:
    """A worker that was asked to evaluate a model."""

    worker: str
    reported: bool
    open: bool  # it may still report


def fault_in(
    scores: Sequence[Mapping[str, Any]], combine: Mapping[str, Sequence[float]], present: Collection[int], spec: RunSpec
) -> str | None:
    """What is wrong with an evaluation of a model that has these blocks. None if it is sound."""
    named = [(score.get("path"), score.get("reading")) for score in scores]
    if not scores or len(set(named)) < len(named):
        return "scores of one or more readings are expected, each once"
    for score, (path, reading) in zip(scores, named, strict=True):
        block = _READING.fullmatch(str(reading))
        if path not in _PATHS or not block or (block[1] and int(block[1]) not in present):
            return f'there is no reading "{str(reading)[:40]}" of path "{str(path)[:40]}"'
        nats = score.get("nats_per_byte")
        if isinstance(nats, str) or nats is None or not 0 <= nats <= MAX_LOSS:
            return f"{str(nats)[:40]} nats per byte were reported, 0 to {MAX_LOSS:g} are expected"
    if combine and (len(present) < spec.model.blocks or isinstance(spec.objective, EndToEnd)):
        return "weights of a composition were sent for a model that has none"
    first_path = "mean" if isinstance(spec.objective, Denoise) else "stack"
    if combine.keys() - {first_path} or usable_weights(combine, spec.model.blocks).keys() != combine.keys():
        return f"one weight of sensible size for each of {spec.model.blocks} blocks is expected, on path {first_path}"
    return None


def agree(one: Evaluated, other: Evaluated) -> bool:
    """Whether two evaluations of one model say the same, within what devices explain."""
    losses = [{(x["path"], x["reading"]): x["nats_per_byte"] for x in each.scores} for each in (one, other)]
    if losses[0].keys() != losses[1].keys() or one.combine.keys() != other.combine.keys():
        return False
    return all(abs(losses[0][key] - losses[1][key]) <= TOLERANCE_NATS for key in losses[0]) and all(
        abs(mine - theirs) <= TOLERANCE_WEIGHT
        for path in one.combine
        for mine, theirs in zip(one.combine[path], other.combine[path], strict=True)
    )


def that_counts(of_one_model: Sequence[One]) -> tuple[One, bool] | None:
    """The evaluation of a model that counts, and whether it is confirmed. None if they contradict each other."""
    for one in of_one_model:
        if any(other.worker != one.worker and agree(one, other) for other in of_one_model):
            return one, True
    return (of_one_model[-1], False) if len({x.worker for x in of_one_model}) == 1 else None  # or there is none


def those_that_count(evaluations: Sequence[One]) -> Iterator[tuple[One, bool]]:
    """Of each model that was evaluated, in order."""
    models: dict[tuple[tuple[int, int], ...], list[One]] = {}
    for one in evaluations:
        models.setdefault(tuple(sorted(one.versions.items())), []).append(one)
    yield from filter(None, map(that_counts, models.values()))


def weights_that_count(of_one_model: Sequence[One]) -> Mapping[str, Sequence[float]]:
    """The weights of the composition: confirmed ones, or those of the only evaluation if they can do little harm. Else
    none: without weights a model answers with its last block, or with equal weights."""
    found = that_counts(of_one_model)
    if found is None:
        return {}
    evaluation, confirmed = found
    return evaluation.combine if confirmed or _is_safe(evaluation) else {}


def _is_safe(evaluation: Evaluated) -> bool:
    """Small weights that are not worse than the last block alone, by the evaluation's own scores."""
    losses = {(x["path"], x["reading"]): x["nats_per_byte"] for x in evaluation.scores if "nats_per_byte" in x}
    return all(
        all(SAFE_WEIGHT[0] <= weight <= SAFE_WEIGHT[1] for weight in weights)
        and SAFE_SUM[0] <= sum(weights) <= SAFE_SUM[1]
        and losses.get((path, "combined"), 0.0) <= losses.get((path, "last"), MAX_LOSS) + TOLERANCE_NATS
        for path, weights in evaluation.combine.items()
    )


def may_evaluate(worker: str, seats: Sequence[Seat], confirmed: bool) -> bool:
    """Whether this worker should score a model that the workers of these seats were asked to score."""
    if confirmed or len(seats) >= MOST_LEASES or worker in {seat.worker for seat in seats}:
        return False
    return sum(seat.open for seat in seats) + any(seat.reported for seat in seats) < EVALUATORS
