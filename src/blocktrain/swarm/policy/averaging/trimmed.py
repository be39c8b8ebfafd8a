"""The trimmed mean: element by element, the mean of what is left when a share of the weight is cut off at either end.
Outliers of no more weight than that have no influence. Next: base.py, which reads the elements."""

from __future__ import annotations

import numpy as np

from blocktrain.swarm.policy.averaging.base import Rule
from blocktrain.wire.safetensors import Floats

NEGLIGIBLE = 1e-9  # share of the weight that rounding may leave of an element that is trimmed away


class Trimmed(Rule):
    name = "trimmed"
    elementwise = True

    def reduce(self, values: Floats, weights: Floats, below: Floats) -> Floats:
        total, share = below[-1], self.spec.trim_share
        kept = np.minimum(below, (1 - share) * total) - np.maximum(below - weights, share * total)
        kept = np.where(kept > NEGLIGIBLE * total, kept, 0.0)
        mean: Floats = (values * (kept / kept.sum(0))).sum(0)
        return mean
