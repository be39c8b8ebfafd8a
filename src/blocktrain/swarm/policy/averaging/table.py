"""The rules of averaging by name, and a merge by one of them: `weigh` sets the scales of a round's updates, which the
ledger records, and `merge` makes the mean of them. Pure.
Next: screened.py, the default; ../../coordinator/merging.py, which opens updates and stores the result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from blocktrain.spec import SwarmSpec
from blocktrain.swarm.policy.averaging.base import (
    FEWEST,
    Compared,
    Rule,
    WeightedUpdate,
    elementwise,
    in_pieces,
    limit_scales,
    movements,
    weighted_sum,
)
from blocktrain.swarm.policy.averaging.centered import Centered
from blocktrain.swarm.policy.averaging.clipped import Clipped
from blocktrain.swarm.policy.averaging.krum import Krum
from blocktrain.swarm.policy.averaging.mean import Mean
from blocktrain.swarm.policy.averaging.median import Median
from blocktrain.swarm.policy.averaging.products import inner_products
from blocktrain.swarm.policy.averaging.screened import Screened
from blocktrain.swarm.policy.averaging.trimmed import Trimmed
from blocktrain.wire.safetensors import Floats

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (Screened, Mean, Clipped, Trimmed, Median, Krum, Centered)}


def weigh(
    parts: Sequence[WeightedUpdate], sizes: Mapping[str, int], spec: SwarmSpec, recent_norms: Sequence[float] = ()
) -> list[WeightedUpdate]:
    """The same updates with the scales that the spec's rule gives them. `recent_norms` are those of the rounds before.
    An update that is left out has the scale and the weight 0."""
    assert parts, "a mean of no updates"
    assert all(0 < part.weight < math.inf for part in parts), "an update weighs more than nothing"
    rule = RULES[spec.averaging](spec)
    limits = limit_scales([part.norm for part in parts], recent_norms, spec.clip_factor)
    products: Floats = np.zeros((0, 0))
    if rule.needs_products and len(parts) >= FEWEST:
        products = inner_products([replace(x, scale=s) for x, s in zip(parts, limits.tolist(), strict=True)], sizes)
    weights = np.array([part.weight for part in parts])
    votes = np.array([part.vote for part in parts])
    moved = movements([part.norm for part in parts], [part.steps for part in parts], votes)
    scales = rule.scales(Compared(weights, votes, limits, moved, products))
    return [replace(x, scale=s, weight=x.weight if s else 0.0) for x, s in zip(parts, scales.tolist(), strict=True)]


def merge(parts: Sequence[WeightedUpdate], sizes: Mapping[str, int], spec: SwarmSpec) -> Iterator[tuple[str, Floats]]:
    """Each tensor's name and the flat float64 mean of its deltas, in the order of `sizes` (name: number of elements).
    The updates have the scales that `weigh` gave them."""
    return ((name, np.concatenate([np.empty(0), *pieces])) for name, pieces in merge_pieces(parts, sizes, spec))


def merge_pieces(
    parts: Sequence[WeightedUpdate], sizes: Mapping[str, int], spec: SwarmSpec
) -> Iterator[tuple[str, Iterable[Floats]]]:
    """The same in pieces that a processor's cache holds, to be read before the next tensor: no mean is in memory."""
    rule = RULES[spec.averaging](spec)
    if not rule.elementwise:
        return weighted_sum(parts, sizes)
    return ((name, in_pieces(delta)) for name, delta in elementwise(parts, sizes, rule))


def shares(parts: Sequence[WeightedUpdate], spec: SwarmSpec) -> list[float] | None:
    """The factor of each update's Δ in the step, in float32, if the step is such a sum. It is not with an elementwise
    rule or an outer momentum."""
    if RULES[spec.averaging].elementwise or spec.outer != "plain":
        return None
    total, lr = sum(part.weight for part in parts), spec.outer_lr or 1.0
    return [float(np.float32(lr * part.weight * part.scale / total)) for part in parts]
