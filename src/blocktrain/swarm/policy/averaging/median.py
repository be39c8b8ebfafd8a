"""The median: element by element, the value with half of the weight on either side, or the middle of two such values.
Outliers of less than half of the weight cannot move it out of the range of the others. Next: base.py, which reads the
elements."""

from __future__ import annotations

import numpy as np

from blocktrain.swarm.policy.averaging.base import Rule
from blocktrain.wire.safetensors import Floats


class Median(Rule):
    name = "median"
    elementwise = True

    def reduce(self, values: Floats, weights: Floats, below: Floats) -> Floats:
        half = below[-1] / 2
        lower, upper = (below < half).sum(0, keepdims=True), (below <= half).sum(0, keepdims=True)
        middle = (np.take_along_axis(values, lower, 0) + np.take_along_axis(values, upper, 0)) / 2
        return middle.reshape(-1)
