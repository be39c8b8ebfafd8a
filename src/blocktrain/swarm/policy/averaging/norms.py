"""Which norms of updates are refused when they arrive. Pure: no files, clock or randomness.
Next: ../../coordinator/intake.py, which refuses; base.py, the bound within a round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median as middle

from blocktrain.spec import SwarmSpec
from blocktrain.wire.safetensors import Array
from blocktrain.wire.updates import energy

MIN_NORMS = 3
SMALLEST_NORM = 1.0  # the least norm that weights are assumed to have, so that a block of zeros may move


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
