"""The mean of updates whose norms are bounded. Bounds how far one update can pull, in whatever direction.
Next: base.py, the bound; screened.py, which also looks at directions."""

from __future__ import annotations

from blocktrain.swarm.policy.averaging.base import Compared, Rule
from blocktrain.wire.safetensors import Floats


class Clipped(Rule):
    name = "clipped"

    def scales(self, updates: Compared) -> Floats:
        return updates.limits
