"""Traffic: the bytes of blobs that this process has sent, since it started. What workers sent is in the ledger, with
their updates. Next: watching.py, which shows both."""

from __future__ import annotations

import threading
from collections import Counter

MOST_WORKERS = 10_000  # told apart; what others fetch counts for the run alone


class Traffic:
    """Threads may share it. A fetch names its worker by its own word: this is for people, nothing is decided by it."""

    def __init__(self) -> None:
        self._total, self._of, self._turn = 0, Counter[str](), threading.Lock()

    def sent(self, num_bytes: int, worker: str | None) -> None:
        with self._turn:
            self._total += num_bytes
            if worker is not None and (worker in self._of or len(self._of) < MOST_WORKERS):
                self._of[worker] += num_bytes

    def totals(self) -> tuple[int, dict[str, int]]:
        """Of the run, and of its workers."""
        with self._turn:
            return self._total, dict(self._of)
