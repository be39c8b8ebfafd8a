"""Rates: how often somebody may ask. A token bucket each: `per_s` requests a second in the long run, `burst_s` seconds'
worth at once. Memory is bounded: of more than `max_keys`, those who asked longest ago are forgotten, and start full.
Next: doorkeeper.py, which asks before it reads a request."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from blocktrain.errors import ConfigError

MAX_KEYS = 10_000


@dataclass(frozen=True)
class Rate:
    """Generous by default: hundreds of workers may share one address and one token; each asks once in some seconds."""

    per_s: float = 300.0
    burst_s: float = 10.0

    def __post_init__(self) -> None:
        if not (0 < self.per_s <= 1e9 and self.per_s * self.burst_s >= 1):
            raise ConfigError(
                f"a rate of {self.per_s:g} requests a second, {self.burst_s:g} s of it at once, lets nobody ask even "
                f"once: give more"
            )


class Limiter:
    """Threads may share it."""

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic, max_keys: int = MAX_KEYS) -> None:
        self._rate, self._clock, self._max_keys = rate, clock, max_keys
        self._full = rate.per_s * rate.burst_s
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # key: (requests left, at)
        self._turn = threading.Lock()

    def wait_s(self, key: Hashable) -> float:
        """0, and one request fewer; or the seconds until there is one again, and nothing is taken."""
        with self._turn:
            now_s = self._clock()
            left, at_s = self._buckets.pop(key, (self._full, now_s))
            left = min(self._full, left + max(0.0, now_s - at_s) * self._rate.per_s)
            wait_s = 0.0 if left >= 1 else (1 - left) / self._rate.per_s
            self._buckets[key] = (left if wait_s else left - 1, now_s)
            while len(self._buckets) > self._max_keys:
                self._buckets.popitem(last=False)
            return wait_s

    def __len__(self) -> int:
        return len(self._buckets)
