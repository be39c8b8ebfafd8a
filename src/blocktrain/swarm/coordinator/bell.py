"""The bell: rung when there may be work, heard by requests for work that wait. Next: api/waiting.py, which waits;
loop.py, which rings it."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress


class Bell:
    """Wakes long-polling lease requests when work may be available. Threads ring it, coroutines wait for it."""

    def __init__(self) -> None:
        self._lock, self._waiting = threading.Lock(), set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()
        self.rung, self.ended = 0, False

    def ring(self) -> None:
        with self._lock:
            self.rung += 1
            waiting, self._waiting = self._waiting, set()
        for loop, heard in waiting:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(heard.set)

    def end(self) -> None:
        """From now on, no request waits."""
        self.ended = True
        self.ring()

    async def after(self, rung: int, longest_s: float) -> None:
        """Waits until it has been rung more often than `rung` times, at most `longest_s`."""
        own = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            if self.rung > rung or self.ended:
                return
            self._waiting.add(own)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(longest_s):
                    await own[1].wait()
        finally:
            with self._lock:
                self._waiting.discard(own)
