"""A rate limit: one token bucket per key, for example per access token or per address. Memory is bounded.
Next: middleware.py, which applies it to every request."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from blocktrain.errors import ConfigError

BURST_S = 10.0
MAX_KEYS = 10_000  # beyond that, the keys that asked longest ago are forgotten; they start again with a full bucket


@dataclass(frozen=True)
class Rate:
    """`requests` per `window_s` seconds on average. A whole window's requests may come at once."""

    requests: float
    window_s: float

    def __post_init__(self) -> None:
        if not (self.requests >= 1 and 0 < self.requests / self.window_s <= 1e9):
            raise ConfigError(
                f"a rate of {self.requests:g} requests per {self.window_s:g} s allows no request: allow at least one"
            )

    @classmethod
    def per_second(cls, requests: float, burst_s: float = BURST_S) -> Rate:
        return cls(requests * burst_s, burst_s)


class RateLimiter:
    """Thread-safe."""

    def __init__(self, rate: Rate, clock: Callable[[], float] = time.monotonic, max_keys: int = MAX_KEYS) -> None:
        self._rate, self._clock, self._max_keys = rate, clock, max_keys
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # key: (requests left, at)
        self._lock = threading.Lock()

    def wait_s(self, key: Hashable) -> float:
        """Returns 0 and counts the request if it is allowed. Otherwise returns the seconds until the next one is."""
        full, window_s = self._rate.requests, self._rate.window_s
        with self._lock:
            now_s = self._clock()
            left, at_s = self._buckets.pop(key, (full, now_s))
            left = min(full, left + max(0.0, now_s - at_s) * full / window_s)
            wait_s = 0.0 if left >= 1 else (1 - left) * window_s / full
            self._buckets[key] = (left if wait_s else left - 1, now_s)
            while len(self._buckets) > self._max_keys:
                self._buckets.popitem(last=False)
            return wait_s

    def __len__(self) -> int:
        return len(self._buckets)
