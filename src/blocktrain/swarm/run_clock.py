"""The clock of a run: seconds since 1970 that never go back. Spans come from the monotonic clock, the start from the
ledger where that is later than the machine's clock. Setting the machine's clock therefore stalls no round, neither
while a coordinator runs nor across a restart.
Next: ledger/rounds.py, whose latest moment it starts from."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RunClock:
    """Threads may share it. If the machine's clock was once ahead and recorded a late moment, the run's clock stays
    ahead: deadlines are differences, and only their order and distance count."""

    def __init__(
        self,
        latest_s: float,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic, self._turn = monotonic, threading.Lock()
        self._offset_s = max(wall(), latest_s) - monotonic()

    def __call__(self) -> float:
        return self._offset_s + self._monotonic()

    def not_before(self, moment_s: float) -> None:
        """Another coordinator of the same ledger has recorded this moment: its clock is ahead, and ours follows."""
        with self._turn:
            self._offset_s = max(self._offset_s, moment_s - self._monotonic())
