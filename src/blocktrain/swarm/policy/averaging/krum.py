"""Multi-Krum of Blanchard et al. (2017), "Machine learning with adversaries": the mean of the updates that have the
nearest neighbours. It always leaves some out, also when nobody lies. Next: products.py, the distances."""

from __future__ import annotations

import numpy as np

from blocktrain.swarm.policy.averaging.base import Compared, Rule
from blocktrain.wire.safetensors import Floats

ROUNDING = 1e-9


class Krum(Rule):
    name = "krum"
    needs_products = True

    def scales(self, updates: Compared) -> Floats:
        if not len(updates.products):
            return updates.limits
        kept = nearest(updates.products, int(self.spec.krum_share * len(updates.weights)))
        return np.where(kept, updates.limits, 0.0)


def nearest(products: Floats, liars: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """All but `liars` updates: those with the smallest sums of squared distances to their n − f − 2 nearest ones."""
    n, squares = len(products), np.diag(products)
    apart = np.maximum(squares[:, None] + squares[None] - 2 * products, 0.0)
    np.fill_diagonal(apart, np.inf)
    scores = np.sort(apart, axis=1)[:, : max(1, n - liars - 2)].sum(1)
    return np.asarray(scores <= np.sort(scores)[n - liars - 1] * (1 + ROUNDING))  # of equal ones, all
