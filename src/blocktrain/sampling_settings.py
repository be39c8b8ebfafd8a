"""The ranges of the settings with which bytes are drawn, checked in one place for the Python API, the command line and
the gateway. Pure. Next: text.py and serve/decode/request.py, which check with it."""

from __future__ import annotations

import math

from blocktrain.errors import ConfigError

SEEDS = 2**63
READABLE_TEMPERATURE = 0.7  # the default where people read the text: small models write nonsense at 1


def check_sampling(max_bytes: int, temperature: float, top_p: float, seed: int) -> None:
    """ConfigError names the setting, its value and what is allowed."""
    if max_bytes < 1:
        raise ConfigError(f"max_bytes = {max_bytes} is too small: give 1 or more")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature = {temperature} is out of range: give 0 or more")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p = {top_p} is out of range: give more than 0 and at most 1")
    if not 0 <= seed < SEEDS:
        raise ConfigError(f"seed = {seed} is out of range: give 0 to 2^63 - 1")
