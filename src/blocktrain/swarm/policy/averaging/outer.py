"""The outer step: a phase's blocks move by the merged update of a round. Pure: no files, clock or randomness.
Next: table.py, which merges updates; ../../coordinator/merging.py, which stores the result."""

from __future__ import annotations

import numpy as np

from blocktrain.spec import SwarmSpec
from blocktrain.wire.codecs.base import PIECE
from blocktrain.wire.recipes import MAX_WEIGHT
from blocktrain.wire.safetensors import Array, Floats

NESTEROV_LR = 0.7  # DiLoCo (Douillard et al. 2023)


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
        moved = np.subtract(flat_theta[here], flat_delta[here] if lr == 1.0 else lr * flat_delta[here])
        after[here] = np.clip(moved, -MAX_WEIGHT, MAX_WEIGHT, out=moved)
    return after.reshape(theta.shape)


def nesterov(
    theta: Array, delta: Floats, momentum: Array | None, lr: float = NESTEROV_LR, beta: float = 0.9
) -> tuple[Array, Array]:
    """SGD with Nesterov momentum on the pseudo-gradient Δ, as DiLoCo; m is kept at θ's precision."""
    g = delta.reshape(theta.shape).astype(np.float64, copy=False)
    m = g if momentum is None else beta * momentum.astype(np.float64) + g
    return plain(theta, np.asarray(g + beta * m), lr), np.asarray(np.clip(m, -MAX_WEIGHT, MAX_WEIGHT), theta.dtype)
