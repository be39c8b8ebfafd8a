"""A request for work that waits until there is some: it is asked again when the bell rings, or after a while. routes.py
and the simulator wait for it, each in its own way. Next: granting.py, which answers; loop.py, which rings the bell."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from blocktrain.wire.messages import LeaseReply, LeaseRequest, Wait

if TYPE_CHECKING:
    from blocktrain.swarm.coordinator.coordinator import Coordinator

LONGEST_WAIT_S = 10.0  # for a lease request when there is no work
RETRY_LEASE_S = 1.0  # another coordinator of the same ledger cannot wake this one, so it looks this often
PREFER_WAIT = re.compile(r"\bwait=([0-9]{1,5})\b")


class WaitingRequest:
    """One request for work, which may be asked several times. `prefer` is its header of this name (RFC 7240)."""

    def __init__(
        self, coordinator: Coordinator, asked: LeaseRequest, prefer: str, clock: Callable[[], float], token: str = ""
    ) -> None:
        match = PREFER_WAIT.search(prefer)
        self._wait_s = min(float(match[1]), LONGEST_WAIT_S) if match else 0.0
        self._coordinator, self._asked, self._clock, self._token = coordinator, asked, clock, token
        self._end_at_s, self._admitted, self.worker = clock() + self._wait_s, False, asked.worker

    def ask(self) -> LeaseReply:
        """The answer of this moment."""
        bell = self._coordinator.bell
        self.rung = bell.rung
        reply = self._coordinator.lease(self._asked, self._admitted, self._token)
        left_s, self._admitted = self._end_at_s - self._clock(), True
        self.ask_again_in_s: float | None = None  # or sooner, when the bell was rung more often than `rung` times
        if not self._wait_s or not isinstance(reply, Wait):
            return reply
        if left_s <= 0 or bell.ended:
            return reply.model_copy(update={"seconds": 0.0})
        self.ask_again_in_s = min(left_s, RETRY_LEASE_S)
        return reply


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
