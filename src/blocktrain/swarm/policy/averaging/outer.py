"""The outer step: a phase's blocks move by the merged update of a round. Pure: no files, clock or randomness.
Next: table.py, which merges updates; ../../coordinator/merging.py, which stores the result."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from blocktrain.spec import SwarmSpec
from blocktrain.swarm.policy.averaging.base import in_pieces
from blocktrain.wire.recipes import MAX_WEIGHT
from blocktrain.wire.safetensors import Array, Floats

NESTEROV_LR = 0.7  # DiLoCo (Douillard et al. 2023)


def outer_step(
    theta: Array, delta: Iterable[Floats], momentum: Array | None, spec: SwarmSpec
) -> tuple[Array, Array | None]:
    """Moves a tensor by its merged delta, which comes in pieces, as the spec says. `momentum` is what the last step
    returned."""
    if spec.outer == "nesterov":
        whole = np.concatenate([np.empty(0), *delta])
        return nesterov(theta, whole, momentum, lr=spec.outer_lr or NESTEROV_LR, beta=spec.outer_momentum)
    return _moved(theta, delta, spec.outer_lr or 1.0), None


def plain(theta: Array, delta: Floats, lr: float = 1.0) -> Array:
    """θ - lr·Δ, computed in Δ's float64, piece by piece."""
    return _moved(theta, in_pieces(delta.reshape(-1)), lr)


def _moved(theta: Array, delta: Iterable[Floats], lr: float) -> Array:
    after, flat_theta, end = np.empty(theta.size, theta.dtype), theta.reshape(-1), 0
    for piece in delta:
        begin, end = end, end + piece.size
        moved = np.subtract(flat_theta[begin:end], piece if lr == 1.0 else lr * piece)
        after[begin:end] = np.clip(moved, -MAX_WEIGHT, MAX_WEIGHT, out=moved)
    return after.reshape(theta.shape)


def nesterov(
    theta: Array, delta: Floats, momentum: Array | None, lr: float = NESTEROV_LR, beta: float = 0.9
) -> tuple[Array, Array]:
    """SGD with Nesterov momentum on the pseudo-gradient Δ, as DiLoCo; m is kept at θ's precision."""
    g = delta.reshape(theta.shape).astype(np.float64, copy=False)
    m = g if momentum is None else beta * momentum.astype(np.float64) + g
    return plain(theta, np.asarray(g + beta * m), lr), np.asarray(np.clip(m, -MAX_WEIGHT, MAX_WEIGHT), theta.dtype)
