"""Centered clipping of Karimireddy et al. (2021), "Learning from history for Byzantine robust optimization": each
update is pulled towards a robust centre, to at most a radius from it, and then they are averaged. The centre is the
geometric median. Next: products.py, the distances; screened.py, which leaves far ones out instead."""

from __future__ import annotations

import numpy as np

from blocktrain.swarm.policy.averaging.base import Compared, Rule
from blocktrain.swarm.policy.averaging.products import distances
from blocktrain.wire.safetensors import Floats

WEISZFELD_STEPS = 50
SMALLEST_SHARE = 1e-6  # of the usual norm, that a distance is taken for at least


class Centered(Rule):
    name = "centered"
    needs_products = True

    def scales(self, updates: Compared) -> Floats:
        weights, limits, products = updates.weights, updates.limits, updates.products
        if not len(products):
            return limits
        centre = geometric_median(products, weights)
        away = distances(products, centre)
        radius = self.spec.clip_factor * float(np.median(away))
        pulled = np.minimum(1.0, radius / np.maximum(away, 1e-300)) if radius else np.ones_like(away)
        if (pulled == 1.0).all():
            return limits
        shares = weights / weights.sum()
        # centre + Σ share · pulled · (Δ − centre), as factors of the updates
        factors = shares * pulled + (1 - (shares * pulled).sum()) * centre
        return np.asarray(limits * factors / shares)


def geometric_median(products: Floats, weights: Floats) -> Floats:
    """The factors of the updates in their geometric median, by Weiszfeld's iterations. Less than half of the weight
    cannot carry it away."""
    floor = SMALLEST_SHARE * float(np.sqrt(np.median(np.diag(products)))) or 1.0
    factors = weights / weights.sum()
    for _ in range(WEISZFELD_STEPS):
        factors = weights / np.maximum(distances(products, factors), floor)
        factors = factors / factors.sum()
    return np.asarray(factors)
