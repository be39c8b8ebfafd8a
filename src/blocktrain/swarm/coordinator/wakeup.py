"""A bell: rung when there may be work again, so that who waits for some need not ask again and again. Threads ring it,
coroutines wait for it. Next: service.py, where workers wait; coordinator.py, which rings."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress


class Bell:
    def __init__(self) -> None:
        self._lock, self._waiting = threading.Lock(), set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()
        self.rung, self.ended = 0, False

    def ring(self) -> None:
        with self._lock:
            self.rung += 1
            waiting, self._waiting = self._waiting, set()
        for loop, heard in waiting:
            with suppress(RuntimeError):  # a loop that has ended
                loop.call_soon_threadsafe(heard.set)

    def end(self) -> None:
        """Nobody waits any more."""
        self.ended = True
        self.ring()

    async def after(self, rung: int, longest_s: float) -> None:
        """Until it has been rung more often than that, or for so long."""
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
