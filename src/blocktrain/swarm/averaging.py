"""Averaging: the updates of a round become one step of a block, tensor by tensor. Pure: no files, clock or randomness.
An update is Δ = θ_before − θ_after; it weighs the tokens it saw times its staleness weight. Means are float64: one
update alone, whose Δ is the exact float64 difference, gives its θ_after back exactly, whatever the kind of mean.
Memory is a few times ONE tensor, whatever the number of updates: means stream over them; trimmed means and medians,
which must see all values of an element at once, go through the tensor in slices.
Next: rounds.py, which says when a round is merged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median as middle
from statistics import median_low

import torch
from torch import Tensor

from blocktrain.spec import SwarmSpec

Read = Callable[[int, int], Tensor]  # elements start to stop of a flattened Δ
SLICE_ELEMENTS = 1 << 19  # of all updates together that are held at once
NEGLIGIBLE = 1e-9  # share of the weight that rounding may leave of an element that is trimmed away
MIN_NORMS = 3
NESTEROV_LR = 0.7  # DiLoCo (Douillard et al. 2023)


@dataclass(frozen=True)
class Part:
    """One update, as the merge of one tensor sees it."""

    read: Read
    weight: float  # tokens, at most those of its lease, times its staleness weight
    norm: float  # of the whole update


def merge(parts: Sequence[Part], numel: int, spec: SwarmSpec) -> Tensor:
    """The flat float64 mean of a tensor's deltas, by the spec's kind of mean."""
    if spec.averaging == "trimmed":
        return trimmed_mean([(part.read, part.weight) for part in parts], numel, spec.trim_share)
    if spec.averaging == "median":
        return median([(part.read, part.weight) for part in parts], numel)
    stream = ((part.read(0, numel), part.weight) for part in parts)
    if spec.averaging == "clipped":
        return clipped(stream, [part.norm for part in parts], spec.clip_factor)
    return mean(stream)


def mean(updates: Iterable[tuple[Tensor, float]]) -> Tensor:
    """Σ wΔ / Σ w as a running mean, which is exact for one update and for equal ones."""
    total, running = 0.0, None
    for delta, weight in updates:
        assert 0 < weight < math.inf, f"an update weighs {weight}, and must weigh more than nothing"
        total += weight
        if running is None:
            running = delta.to(torch.float64, copy=True)
        else:
            running.lerp_(delta.to(torch.float64), weight / total)
    assert running is not None, "a mean of no updates"
    return running


def clipped(updates: Iterable[tuple[Tensor, float]], norms: Sequence[float], factor: float) -> Tensor:
    """The mean of updates scaled down to at most `factor` times their median norm. Of two middle norms the lower
    counts: where there are two updates, a wild one does not set the measure."""
    limit = factor * median_low(norms)
    scales = (limit / norm if norm > limit else 1.0 for norm in norms)
    return mean((delta.to(torch.float64) * scale, w) for (delta, w), scale in zip(updates, scales, strict=True))


def trimmed_mean(updates: Sequence[tuple[Read, float]], numel: int, trim_share: float) -> Tensor:
    """Element by element, the mean of what is left when `trim_share` of the weight is cut off at either end: wild
    updates of no more weight than that have no say."""

    def trimmed(values: Tensor, weights: Tensor, below: Tensor) -> Tensor:
        total = below[-1]
        kept = torch.minimum(below, (1 - trim_share) * total) - torch.maximum(below - weights, trim_share * total)
        kept = torch.where(kept > NEGLIGIBLE * total, kept, 0.0)
        return (values * (kept / kept.sum(0))).sum(0)

    return _elementwise(updates, numel, trimmed)


def median(updates: Sequence[tuple[Read, float]], numel: int) -> Tensor:
    """Element by element, the value with half of the weight on either side; of two such values, their middle. Wild
    updates of less than half of the weight cannot move it out of the range of the others."""

    def halfway(values: Tensor, weights: Tensor, below: Tensor) -> Tensor:
        half = below[-1] / 2
        lower = (below < half).sum(0, keepdim=True)
        upper = (below <= half).sum(0, keepdim=True)
        return ((values.gather(0, lower) + values.gather(0, upper)) / 2).squeeze(0)

    return _elementwise(updates, numel, halfway)


def _elementwise(
    updates: Sequence[tuple[Read, float]], numel: int, reduce: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """reduce(values, weights, weight up to and with each value), each sorted by value along the first axis."""
    assert updates, "a mean of no updates"
    merged = torch.empty(numel, dtype=torch.float64)
    by_update = torch.tensor([weight for _, weight in updates], dtype=torch.float64)
    for start, stop in _slices(numel, len(updates)):
        values, order = torch.stack([read(start, stop).to(torch.float64) for read, _ in updates]).sort(0)
        weights = by_update[order]
        merged[start:stop] = reduce(values, weights, weights.cumsum(0))
    return merged


def _slices(numel: int, num_updates: int) -> Iterator[tuple[int, int]]:
    length = max(1, SLICE_ELEMENTS // num_updates)
    return ((start, min(start + length, numel)) for start in range(0, numel, length))


def outer_step(theta: Tensor, delta: Tensor, momentum: Tensor | None, spec: SwarmSpec) -> tuple[Tensor, Tensor | None]:
    """Move a tensor by its merged delta, as the spec says; `momentum` is what the last step returned."""
    if spec.outer == "nesterov":
        return nesterov(theta, delta, momentum, lr=spec.outer_lr or NESTEROV_LR, beta=spec.outer_momentum)
    return plain(theta, delta, lr=spec.outer_lr or 1.0), None


def plain(theta: Tensor, delta: Tensor, lr: float = 1.0) -> Tensor:
    return (theta.to(torch.float64) - lr * delta.view_as(theta)).to(theta.dtype)


def nesterov(
    theta: Tensor, delta: Tensor, momentum: Tensor | None, lr: float = NESTEROV_LR, beta: float = 0.9
) -> tuple[Tensor, Tensor]:
    """SGD with Nesterov momentum on the pseudo-gradient Δ, as DiLoCo; m is kept at θ's precision."""
    g = delta.view_as(theta).to(torch.float64)
    m = g if momentum is None else beta * momentum.to(torch.float64) + g
    return plain(theta, g + beta * m, lr), m.to(theta.dtype)


@dataclass(frozen=True)
class Verdict:
    accepted: bool
    reason: str


def norm_of(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of a whole update, tensor by tensor; not finite if any of its elements is not."""
    total = 0.0
    for tensor in tensors:
        total = math.hypot(total, torch.linalg.vector_norm(tensor, dtype=torch.float64).item())
    return total


def check_norm(norm: float, recent_norms: Sequence[float], spec: SwarmSpec) -> Verdict:
    """Whether an update may be merged, against those accepted of the same phase. Norms of leases of unequal length
    compare best divided by the root of their steps."""
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
