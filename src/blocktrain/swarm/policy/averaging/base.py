"""What a rule of averaging is, and the two ways to read updates. An update is Δ = θ_before − θ_after. Pure: no files,
clock or randomness. Sums open each update once and read all of them side by side, piece by piece, one tensor after the
other. Elementwise rules need all values of an element at once, and read the tensors slice by slice. Means are float64:
a single update, whose Δ is the exact float64 difference, gives its θ_after back exactly, by every rule.
Next: table.py, the rules by name; screened.py, the default."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_low
from typing import ClassVar

import numpy as np

from blocktrain.spec import SwarmSpec
from blocktrain.wire.codecs.base import PIECE
from blocktrain.wire.safetensors import Floats

Deltas = Callable[[str], Iterable[Floats]]  # name of a tensor: its flat Δ, piece after piece
Read = Callable[[int, int], Floats]  # elements start to stop of a flattened Δ
ROUNDING = 1e-9
FEWEST = 3  # updates of which one can be told to differ from the others
SLICE_ELEMENTS = 1 << 19  # of all updates together that are in memory at once


@dataclass(frozen=True)
class WeightedUpdate:
    """One update of a merge. Opening it checks it; its pieces are read and decoded when they are asked for. A merge is
    a function of the updates, their weights and their scales; the ledger records all of these."""

    open: Callable[[], Deltas]
    weight: float  # tokens, at most those of its lease, times its staleness weight and its worker's standing
    norm: float  # of the whole update, divided by the root of its steps
    scale: float = 1.0  # what a rule multiplies Δ with; 0: the update is left out
    steps: int = 1
    vote: float = 1.0  # with which it decides what is left out, whatever it weighs


@dataclass(frozen=True)
class Compared:
    """What is known of the updates of a merge, one number for each."""

    weights: Floats
    votes: Floats
    limits: Floats  # scales of the norm bound
    moved: Floats  # how far, in the median (`movements`)
    products: Floats  # inner products with these scales; 0 x 0 unless the rule needs them and there are three updates


class Rule:
    """How the updates of a round become one. A rule sets the scales of updates (`scales`). Most are sums: their result
    is Σ w·s·Δ / Σ w. An elementwise rule combines the values of each element in its own way."""

    name: ClassVar[str]
    needs_products: ClassVar[bool] = False  # the inner products of all updates
    elementwise: ClassVar[bool] = False

    def __init__(self, spec: SwarmSpec) -> None:
        self.spec = spec

    def scales(self, updates: Compared) -> Floats:
        """One scale for each update."""
        return np.ones_like(updates.weights)

    def reduce(self, values: Floats, weights: Floats, below: Floats) -> Floats:
        """For an elementwise rule: values, weights and cumulative weights, each sorted by value along the first
        axis."""
        raise NotImplementedError


def limit_scales(norms: Sequence[float], recent_norms: Sequence[float], factor: float) -> Floats:
    """The adaptive norm bound: factors that scale updates down to at most `factor` times the median norm of this round
    and the recent ones. Of two middle norms the lower one is used: of two updates, an outlier does not set the limit.
    An update alone in its round is not scaled."""
    if len(norms) == 1:
        return np.ones(1)
    limit = factor * median_low([*norms, *recent_norms])
    return np.array([limit / norm if norm > limit else 1.0 for norm in norms])


def movements(norms: Sequence[float], steps: Sequence[int], votes: Floats) -> Floats:
    """How far each update moved for its steps, in the median of all. Updates grow faster than the root of their steps
    and slower than the steps: of the two comparisons the one counts that is better for the update. Whoever trained all
    of its steps therefore moved about as far as the others, whether these had longer or shorter leases."""
    roots = np.sqrt(np.array(steps, np.float64))
    by_root, by_step = np.array(norms), np.array(norms) / roots
    usual = [-upper_median(-x, votes) or 1.0 for x in (by_root, by_step)]  # of two middle ones the shorter
    return np.asarray(np.maximum(by_root / usual[0], by_step / usual[1]))


def upper_median(values: Floats, weights: Floats) -> float:
    """The largest value that half of the weight reaches."""
    order = np.argsort(-values, kind="stable")
    reached = np.cumsum(weights[order]) >= weights.sum() / 2 * (1 - ROUNDING)
    return float(values[order][np.argmax(reached)])


def weighted_sum(parts: Sequence[WeightedUpdate], sizes: Mapping[str, int]) -> Iterator[tuple[str, Iterator[Floats]]]:
    """Σ w·s·Δ / Σ w of each tensor, in pieces that are read before the next tensor. What weighs nothing is not read."""
    counted = [part for part in parts if part.weight > 0]
    opened, weights = [part.open() for part in counted], [part.weight for part in counted]
    scales = [part.scale for part in counted]
    for name, size in sizes.items():
        yield name, _mean([deltas(name) for deltas in opened], weights, scales, size)


def _mean(
    updates: Sequence[Iterable[Floats]], weights: Sequence[float], scales: Sequence[float], size: int
) -> Iterator[Floats]:
    end, pieces = 0, [iter(update) for update in updates]
    while end < size:
        piece = _running_mean((next(x) for x in pieces), weights, scales)  # one at a time is decoded
        end += piece.size
        yield piece
    assert end == size, f"{end} values came of a tensor that has {size}"


def _running_mean(values: Iterable[Floats], weights: Sequence[float], scales: Sequence[float]) -> Floats:
    """Σ wsΔ / Σ w, update by update: exact for one update and for equal ones."""
    mean, total = np.empty(0), 0.0
    for piece, weight, scale in zip(values, weights, scales, strict=True):
        scaled = piece.astype(np.float64, copy=False) if scale == 1.0 else piece * np.float64(scale)
        if total:  # mean + (scaled - mean) * share, in one new array
            moved = scaled - mean
            moved *= weight / (total + weight)
            moved += mean
            mean = moved
        else:
            mean = scaled
        total += weight
    return mean


def in_pieces(values: Floats) -> Iterator[Floats]:
    return (values[start : start + PIECE] for start in range(0, len(values), PIECE))


def elementwise(parts: Sequence[WeightedUpdate], sizes: Mapping[str, int], rule: Rule) -> Iterator[tuple[str, Floats]]:
    for names in _batches(sizes, SLICE_ELEMENTS // len(parts)):
        reads = [(partial(_slice_of, part, names), part.weight) for part in parts]
        robust = reduced(reads, sum(sizes[name] for name in names), rule)
        ends = np.cumsum([sizes[name] for name in names])
        yield from zip(names, np.split(robust, ends[:-1]), strict=True)


def _batches(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Tensors in order, as many together as the limit allows: small ones share one opening of an update."""
    names, numel = list[str](), 0
    for name, size in sizes.items():
        if names and numel + size > limit:
            yield names
            names, numel = [], 0
        names, numel = [*names, name], numel + size
    if names:
        yield names


def _slice_of(part: WeightedUpdate, names: Sequence[str], start: int, stop: int) -> Floats:
    deltas = part.open()
    values = np.concatenate([piece for name in names for piece in deltas(name)])[start:stop]
    return values if part.scale == 1.0 else values * np.float64(part.scale)


def reduced(updates: Sequence[tuple[Read, float]], numel: int, rule: Rule) -> Floats:
    """What the rule makes of each element, slice by slice."""
    merged, by_update = np.empty(numel), np.array([weight for _, weight in updates], np.float64)
    length = max(1, SLICE_ELEMENTS // len(updates))
    for start in range(0, numel, length):
        stop = min(start + length, numel)
        values = np.stack([read(start, stop).astype(np.float64, copy=False) for read, _ in updates])
        order = values.argsort(0)
        weights = by_update[order]
        merged[start:stop] = rule.reduce(np.take_along_axis(values, order, 0), weights, weights.cumsum(0))
    return merged
