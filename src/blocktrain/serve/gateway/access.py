"""Who may come in, and how many at once: API keys, a rate for each, seats. No HTTP, no clock of its own.
Next: gateway.py, which asks here before any work is done."""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from blocktrain.errors import ConfigError
from blocktrain.serve.gateway.openai import ApiError

MIN_KEY_CHARACTERS = 16
MINUTE_S = 60.0
MAX_REMEMBERED = 10_000  # callers whose rate is kept; the longest unheard of is forgotten first


class ApiKeys:
    """Keys by their hashes. Without any the door is open."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        for number, key in enumerate(keys, 1):
            if len(key) < MIN_KEY_CHARACTERS or not key.isascii() or not key.isprintable():
                raise ConfigError(
                    f"API key {number} of {len(keys)} is too easy to guess or to mistype: "
                    f"give {MIN_KEY_CHARACTERS} or more printable ASCII characters"
                )
        self._hashes = [_hash(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def caller(self, authorization: str | None) -> str | None:
        """A name for whoever sends this header, made of the key's hash; None where the door is open.
        Every key is compared, so that the time it takes says nothing about any."""
        if not self._hashes:
            return None
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise ApiError(401, 'no API key was given: send it as "Authorization: Bearer KEY"', "missing_api_key")
        digest = _hash(given.strip())
        if True not in [hmac.compare_digest(digest, known) for known in self._hashes]:
            raise ApiError(401, "the API key is not known here: ask whoever runs this gateway", "invalid_api_key")
        return digest[:8]


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass
class _Bucket:
    tokens: float
    filled_s: float


class RateLimit:
    """So many requests a minute and caller, saved up to a minute's worth (a token bucket)."""

    def __init__(self, per_minute: int | None, clock: Callable[[], float]) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._buckets: dict[str, _Bucket] = {}

    def take(self, caller: str) -> None:
        if self._per_minute is None:
            return
        bucket = self._filled(caller, self._per_minute)
        if bucket.tokens < 1:
            wait_s = (1 - bucket.tokens) * MINUTE_S / self._per_minute
            message = f"more than {self._per_minute} requests a minute: try again in {math.ceil(wait_s)} s"
            raise ApiError(429, message, "rate_limit_exceeded", retry_after_s=wait_s)
        bucket.tokens -= 1

    def _filled(self, caller: str, per_minute: int) -> _Bucket:
        now_s = self._clock()
        bucket = self._buckets.pop(caller, None) or _Bucket(per_minute, now_s)
        earned = (now_s - bucket.filled_s) * per_minute / MINUTE_S
        bucket.tokens, bucket.filled_s = min(per_minute, bucket.tokens + earned), now_s
        self._buckets[caller] = bucket  # behind all others
        if len(self._buckets) > MAX_REMEMBERED:
            del self._buckets[next(iter(self._buckets))]
        return bucket


class Seats:
    """Texts that may be written at once; who finds too few free is sent away at once instead of waiting."""

    def __init__(self, total: int, retry_after_s: float = 1.0) -> None:
        self.total, self.taken, self._retry_after_s = total, 0, retry_after_s

    @contextmanager
    def held(self, texts: int) -> Iterator[None]:
        if self.taken + texts > self.total:
            message = f"{self.taken} of {self.total} texts are being written and {texts} more do not fit: try again"
            raise ApiError(429, message, "overloaded", retry_after_s=self._retry_after_s)
        self.taken += texts
        try:
            yield
        finally:
            self.taken -= texts
