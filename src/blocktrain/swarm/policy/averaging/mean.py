"""The plain weighted mean. One update of unlimited size decides everything: for workers that trust each other.
Next: screened.py, the default."""

from __future__ import annotations

from blocktrain.swarm.policy.averaging.base import Rule


class Mean(Rule):
    name = "mean"
