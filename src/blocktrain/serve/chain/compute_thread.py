"""ComputeThread: a thread that does one piece of work after the other. An executor makes a future with a lock for each,
and a second future for the event loop. Next: stage.py, which computes its batches there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

log = logging.getLogger(__name__)


class ComputeThread:
    def __init__(self, name: str) -> None:
        self._waiting: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], object]) -> None:
        """Behind all that was submitted before. The work itself tells who waits for it."""
        self._waiting.put(work)

    def close(self) -> None:
        """Waits for the work that has begun, and drops the rest."""
        self.closing.set()
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None and not self.closing.is_set():
            try:
                work()
            except Exception:
                log.exception("unexpected error in the thread %s", self._thread.name)
