"""The outer step: the weights, moved by the merged update."""

from __future__ import annotations

import numpy as np
import torch

from blocktrain.spec import SwarmSpec
from blocktrain.swarm.policy.averaging.outer import outer_step


def test_nesterov_is_the_outer_optimiser_of_torch():
    spec = SwarmSpec(outer="nesterov")
    theta, momentum = np.random.default_rng(0).standard_normal((4, 3), np.float32), None
    ours, reference = theta.copy(), torch.nn.Parameter(torch.from_numpy(theta).double())
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(5):
        delta = np.random.default_rng(step).standard_normal(12)
        ours, momentum = outer_step(ours, [delta], momentum, spec)
        reference.grad = torch.from_numpy(delta).view_as(reference).clone()
        optimizer.step()
    assert ours.dtype == momentum.dtype == np.float32
    assert np.allclose(ours.astype(np.float64), reference.detach().numpy(), atol=1e-5)


def test_the_outer_learning_rate_scales_the_step():
    moved, _ = outer_step(np.ones(2, np.float32), [np.ones(2, np.float32)], None, SwarmSpec(outer_lr=0.25))
    assert moved.tolist() == [0.75, 0.75]
