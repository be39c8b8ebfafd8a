"""Averaging: the updates of a round become one step of a phase's blocks. Pure: no files, clock or randomness. An update
is Δ = θ_before − θ_after. Its weight is the number of its tokens times its staleness weight. Means are float64: a
single update, whose Δ is the exact float64 difference, gives its θ_after back exactly, with every kind of mean. Means
open each update once and read all of them side by side, piece by piece, one tensor after the other. Trimmed means and
medians need all values of an element at once, and read the tensors slice by slice.
Next: ../coordinator/merging.py, which opens updates and stores the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median as middle
from statistics import median_low

import numpy as np

from blocktrain.spec import SwarmSpec
from blocktrain.wire.codecs.base import PIECE
from blocktrain.wire.recipes import MAX_WEIGHT
from blocktrain.wire.safetensors import Array, Floats
from blocktrain.wire.updates import energy

Deltas = Callable[[str], Iterable[Floats]]  # name of a tensor: its flat Δ, piece after piece
Read = Callable[[int, int], Floats]  # elements start to stop of a flattened Δ
SLICE_ELEMENTS = 1 << 19  # of all updates together that are in memory at once
NEGLIGIBLE = 1e-9  # share of the weight that rounding may leave of an element that is trimmed away
MIN_NORMS = 3
NESTEROV_LR = 0.7  # DiLoCo (Douillard et al. 2023)
SMALLEST_NORM = 1.0  # the least norm that weights are assumed to have, so that a block of zeros may move


@dataclass(frozen=True)
class WeightedUpdate:
    """One update of a merge. Opening it checks it; its pieces are read and decoded when they are asked for."""

    open: Callable[[], Deltas]
    weight: float  # tokens, at most those of its lease, times its staleness weight
    norm: float  # of the whole update


def merge(parts: Sequence[WeightedUpdate], sizes: Mapping[str, int], spec: SwarmSpec) -> Iterator[tuple[str, Floats]]:
    """Each tensor's name and the flat float64 mean of its deltas, by the spec's kind of mean, in the order of `sizes`
    (name: number of elements)."""
    assert parts, "a mean of no updates"
    if spec.averaging in ("trimmed", "median"):
        yield from _robust(parts, sizes, spec)
        return
    assert all(0 < part.weight < math.inf for part in parts), "an update weighs more than nothing"
    opened, weights, scales = [part.open() for part in parts], [part.weight for part in parts], _scales(parts, spec)
    for name, size in sizes.items():
        yield name, _mean([deltas(name) for deltas in opened], weights, scales, size)


def _mean(updates: Sequence[Iterable[Floats]], weights: Sequence[float], scales: Sequence[float], size: int) -> Floats:
    mean, end, pieces = np.empty(size), 0, [iter(update) for update in updates]
    while end < size:
        piece = _running_mean((next(x) for x in pieces), weights, scales)  # one at a time is decoded
        begin, end = end, end + piece.size
        mean[begin:end] = piece
    assert end == size, f"{end} values came of a tensor that has {size}"
    return mean


def _running_mean(values: Iterable[Floats], weights: Sequence[float], scales: Sequence[float]) -> Floats:
    """Σ wsΔ / Σ w, update by update: exact for one update and for equal ones."""
    mean, total = np.empty(0), 0.0
    for piece, weight, scale in zip(values, weights, scales, strict=True):
        scaled = piece.astype(np.float64, copy=False) if scale == 1.0 else piece * np.float64(scale)
        mean = mean + (scaled - mean) * (weight / (total + weight)) if total else scaled
        total += weight
    return mean


def shares(parts: Sequence[WeightedUpdate], spec: SwarmSpec) -> list[float] | None:
    """The factor of each update's Δ in the step, in float32, if the step is such a sum. It is not with a robust mean or
    an outer momentum."""
    if spec.averaging in ("trimmed", "median") or spec.outer != "plain":
        return None
    total, lr = sum(part.weight for part in parts), spec.outer_lr or 1.0
    whole = [lr * part.weight * scale / total for part, scale in zip(parts, _scales(parts, spec), strict=True)]
    return [float(np.float32(share)) for share in whole]


def _scales(parts: Sequence[WeightedUpdate], spec: SwarmSpec) -> list[float]:
    if spec.averaging == "clipped":
        return clip_scales([part.norm for part in parts], spec.clip_factor)
    return [1.0] * len(parts)


def clip_scales(norms: Sequence[float], factor: float) -> list[float]:
    """Factors that scale updates down to at most `factor` times their median norm. Of two middle norms the lower one is
    used: of two updates, an outlier does not set the limit."""
    limit = factor * median_low(norms)
    return [limit / norm if norm > limit else 1.0 for norm in norms]


def _robust(parts: Sequence[WeightedUpdate], sizes: Mapping[str, int], spec: SwarmSpec) -> Iterator[tuple[str, Floats]]:
    for names in _batches(sizes, SLICE_ELEMENTS // len(parts)):
        reads = [(partial(_slice_of, part, names), part.weight) for part in parts]
        numel = sum(sizes[name] for name in names)
        robust = median(reads, numel) if spec.averaging == "median" else trimmed_mean(reads, numel, spec.trim_share)
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
    return np.concatenate([piece for name in names for piece in deltas(name)])[start:stop]


def trimmed_mean(updates: Sequence[tuple[Read, float]], numel: int, trim_share: float) -> Floats:
    """Element by element, the mean of what is left when `trim_share` of the weight is cut off at either end. Outliers
    of no more weight than that have no influence."""

    def trimmed(values: Floats, weights: Floats, below: Floats) -> Floats:
        total = below[-1]
        kept = np.minimum(below, (1 - trim_share) * total) - np.maximum(below - weights, trim_share * total)
        kept = np.where(kept > NEGLIGIBLE * total, kept, 0.0)
        mean: Floats = (values * (kept / kept.sum(0))).sum(0)
        return mean

    return _elementwise(updates, numel, trimmed)


def median(updates: Sequence[tuple[Read, float]], numel: int) -> Floats:
    """Element by element, the value with half of the weight on either side, or the middle of two such values. Outliers
    of less than half of the weight cannot move it out of the range of the others."""

    def halfway(values: Floats, weights: Floats, below: Floats) -> Floats:
        half = below[-1] / 2
        lower, upper = (below < half).sum(0, keepdims=True), (below <= half).sum(0, keepdims=True)
        middle = (np.take_along_axis(values, lower, 0) + np.take_along_axis(values, upper, 0)) / 2
        return middle.reshape(-1)

    return _elementwise(updates, numel, halfway)


def _elementwise(
    updates: Sequence[tuple[Read, float]], numel: int, reduce: Callable[[Floats, Floats, Floats], Floats]
) -> Floats:
    """reduce(values, weights, cumulative weights), each sorted by value along the first axis."""
    merged, by_update = np.empty(numel), np.array([weight for _, weight in updates], np.float64)
    for start, stop in _slices(numel, len(updates)):
        values = np.stack([read(start, stop).astype(np.float64, copy=False) for read, _ in updates])
        order = values.argsort(0)
        weights = by_update[order]
        merged[start:stop] = reduce(np.take_along_axis(values, order, 0), weights, weights.cumsum(0))
    return merged


def _slices(numel: int, num_updates: int) -> Iterator[tuple[int, int]]:
    length = max(1, SLICE_ELEMENTS // num_updates)
    return ((start, min(start + length, numel)) for start in range(0, numel, length))


def outer_step(theta: Array, delta: Floats, momentum: Array | None, spec: SwarmSpec) -> tuple[Array, Array | None]:
    """Moves a tensor by its merged delta, as the spec says. `momentum` is what the last step returned."""
    if spec.outer == "nesterov":
        return nesterov(theta, delta, momentum, lr=spec.outer_lr or NESTEROV_LR, beta=spec.outer_momentum)
    return plain(theta, delta, lr=spec.outer_lr or 1.0), None


def plain(theta: Array, delta: Floats, lr: float = 1.0) -> Array:
    """θ - lr·Δ, computed in Δ's float64, piece by piece."""
    after = np.empty(theta.size, theta.dtype)
    flat_theta, flat_delta = theta.reshape(-1), delta.reshape(-1)
    for start in range(0, theta.size, PIECE):
        here = slice(start, start + PIECE)
        after[here] = np.clip(flat_theta[here] - lr * flat_delta[here], -MAX_WEIGHT, MAX_WEIGHT)
    return after.reshape(theta.shape)


def nesterov(
    theta: Array, delta: Floats, momentum: Array | None, lr: float = NESTEROV_LR, beta: float = 0.9
) -> tuple[Array, Array]:
    """SGD with Nesterov momentum on the pseudo-gradient Δ, as DiLoCo; m is kept at θ's precision."""
    g = delta.reshape(theta.shape).astype(np.float64, copy=False)
    m = g if momentum is None else beta * momentum.astype(np.float64) + g
    return plain(theta, np.asarray(g + beta * m), lr), np.asarray(np.clip(m, -MAX_WEIGHT, MAX_WEIGHT), theta.dtype)


@dataclass(frozen=True)
class Verdict:
    accepted: bool
    reason: str


def norm_of(tensors: Iterable[Array]) -> float:
    """The Euclidean norm of tensors. Not finite if any of their elements is not."""
    return math.sqrt(sum(energy(tensor.reshape(-1)) for tensor in tensors))


def check_against_weights(norm: float, weights_norm: float, spec: SwarmSpec) -> Verdict:
    """Whether training can produce an update of this size. Needs no other updates of the phase: no lease moves a block
    by many times its own norm."""
    limit = spec.max_norm_factor * max(weights_norm, SMALLEST_NORM)
    if norm <= limit:
        return Verdict(True, f"norm {norm:.3g} of weights of norm {weights_norm:.3g}")
    return Verdict(
        False,
        f"the update's norm is {norm:.3g}, at most {spec.max_norm_factor:g} times the norm {weights_norm:.3g} of the "
        f"weights it was built on is accepted: lower the learning rate, or raise swarm.max_norm_factor",
    )


def check_norm(norm: float, recent_norms: Sequence[float], spec: SwarmSpec) -> Verdict:
    """Whether an update may be merged, compared with accepted updates of the same phase. Norms of leases of unequal
    length should be divided by the root of their steps."""
    if not math.isfinite(norm):
        return Verdict(False, f"the update's norm is {norm}: lower the learning rate, or look for a broken device")
    moved = [recent for recent in recent_norms if recent > 0]
    if len(moved) < MIN_NORMS:
        return Verdict(True, f"norm {norm:.3g}; {len(moved)} earlier ones known, {MIN_NORMS} needed to compare")
    usual = middle(moved)
    limit = spec.max_norm_factor * usual
    if norm > limit:
        return Verdict(
            False,
            f"the update's norm is {norm:.3g}, at most {spec.max_norm_factor:g} times the recent median {usual:.3g} is "
            f"accepted: fetch the block again, or raise swarm.max_norm_factor",
        )
    return Verdict(True, f"norm {norm:.3g}, recent median {usual:.3g}")
