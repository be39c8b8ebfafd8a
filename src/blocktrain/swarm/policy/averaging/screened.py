"""The default: the mean of updates with bounded norms, without those that point elsewhere than the others. Honest
updates of one round point in about one direction, because they start from the same weights. One that does not is left
out: it is turned around, noise, or of other work. So is one that moved far less than the others in as many steps: its
worker did not train all of them. Without such updates the result is the plain mean, so that robustness costs nothing.
What points and moves almost like the others cannot be seen here: audits are for that.
Next: products.py, the inner products; ../audits.py."""

from __future__ import annotations

import numpy as np

from blocktrain.swarm.policy.averaging.base import Compared, Rule, upper_median
from blocktrain.wire.safetensors import Floats


class Screened(Rule):
    name = "screened"
    needs_products = True

    def scales(self, updates: Compared) -> Floats:
        if not len(updates.products):
            return updates.limits
        agreement = agreements(updates.products, updates.votes)
        agree = agreement >= self.spec.screen_share * max(0.0, upper_median(agreement, updates.votes))
        kept = agree & (updates.moved >= self.spec.screen_share)
        return np.where(kept, updates.limits, 0.0) if kept.any() else updates.limits


def agreements(products: Floats, weights: Floats) -> Floats:
    """The median cosine of each update with the others. Where honest updates have most of the weight, theirs is that of
    two honest ones. Liars that agree only with each other have a low one, however well they do."""
    norms = np.sqrt(np.diag(products))
    norms = np.where(norms > 0, norms, 1.0)
    cosines = products / np.outer(norms, norms)
    every = range(len(weights))
    return np.array([upper_median(np.delete(cosines[i], i), np.delete(weights, i)) for i in every])
