"""Who may use the gateway, and how much at once: API keys and a limit on concurrent texts. No HTTP.
Next: app.py, which checks both before any work is done."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from blocktrain.errors import ConfigError
from blocktrain.serve.gateway.openai import ApiError

MIN_KEY_CHARACTERS = 16
RETRY_S = 1.0


class ApiKeys:
    """Stores the hashes of the keys. Without keys, everybody may use the gateway."""

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
        """The caller's name for logs and rate limits, made of the key's hash; None without keys. Compares the header
        with every key, so that the time taken reveals nothing about any of them."""
        if not self._hashes:
            return None
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise ApiError(401, 'the API key is missing: send it as "Authorization: Bearer KEY"', "missing_api_key")
        digest = _hash(given.strip())
        if True not in [hmac.compare_digest(digest, known) for known in self._hashes]:
            raise ApiError(401, "the API key is unknown: ask the operator of the gateway for one", "invalid_api_key")
        return digest[:8]


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class ConcurrencyLimit:
    """Limits the texts that are written at once. A request that exceeds it is refused instead of waiting. The last
    quarter is kept for callers who have at most a quarter: nobody can take all."""

    def __init__(self, max_texts: int) -> None:
        self.max_texts, self.in_use = max_texts, 0
        self._quarter = max_texts // 4
        self._of_caller: Counter[str] = Counter()

    def seats_of(self, caller: str) -> Callable[[int], AbstractContextManager[None]]:
        return lambda texts: self.hold(texts, caller)

    @contextmanager
    def hold(self, texts: int, caller: str = "") -> Iterator[None]:
        own = self._of_caller[caller] + texts
        most = self.max_texts if own <= self._quarter else self.max_texts - self._quarter
        if self.in_use + texts > most:
            message = (
                f"{self.in_use} of {self.max_texts} texts are being written and {texts} more do not fit: try again"
            )
            if self.in_use + texts <= self.max_texts:
                message = f"{own - texts} of your texts are being written, the rest is kept for others: try again"
            raise ApiError(429, message, "overloaded", retry_after_s=RETRY_S)
        self.in_use += texts
        self._of_caller[caller] = own
        try:
            yield
        finally:
            self.in_use -= texts
            self._of_caller[caller] -= texts
            if not self._of_caller[caller]:
                del self._of_caller[caller]
