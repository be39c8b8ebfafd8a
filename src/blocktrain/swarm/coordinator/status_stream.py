"""Streaming: a run's status and curves as server-sent events, when they change. What is shown is read from the ledger
at most once a second, however many watch. Next: watching.py, the facts; service.py, which checks who may watch."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from blocktrain.errors import BlockTrainError, Overloaded
from blocktrain.swarm.coordinator.status import Watching, status_for
from blocktrain.swarm.ledger.records import Role
from blocktrain.wire.messages import Curves

PAUSE_S = 1.0  # between two looks
HEARTBEAT_S = 10.0  # something is sent at least as often; a page that hears nothing for longer knows that it is stale
STALLED_S = 30.0  # a listener who does not read is left then
MAX_LISTENERS = 64
RETRY_S = 10.0
SHOWN_EVALUATIONS = 1  # the older ones are in the curves
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # no proxy may hold a stream back


@dataclass(frozen=True)
class Snapshot:
    number: int
    status: dict[str, Any]
    curves: Curves


class News:
    """What there is to see now. Threads share it: who asks within a second of another gets the same."""

    def __init__(self, watching: Watching, clock: Callable[[], float] = time.monotonic) -> None:
        self._watching, self._clock, self._turn = watching, clock, threading.Lock()
        self._newest: Snapshot | None = None
        self._looked_s, self._lasting, self._drawn_for = 0.0, "", ""

    def newest(self) -> Snapshot:
        """A new number where something has changed but the time."""
        with self._turn:
            if self._newest is None or self._clock() - self._looked_s >= PAUSE_S:
                self._newest = self._look(self._newest)
                self._looked_s = self._clock()
            return self._newest

    def _look(self, before: Snapshot | None) -> Snapshot:
        status = self._watching.status()
        status["evaluations"] = status["evaluations"][-SHOWN_EVALUATIONS:]
        lasting, drawn_for = json.dumps(_lasting(status)), json.dumps([status["versions"], status["evaluations"]])
        curves = before.curves if before and drawn_for == self._drawn_for else self._watching.curves()
        number = 1 if before is None else before.number + (lasting != self._lasting)
        self._lasting, self._drawn_for = lasting, drawn_for
        return Snapshot(number, status, curves)


def _lasting(status: Mapping[str, Any]) -> dict[str, Any]:
    """The status without what changes by the second and by itself."""
    phases = [
        {**phase, "round": phase["round"] and {**phase["round"], "deadline_s": None, "reason": None}}
        for phase in status["phases"]
    ]
    return {**status, "now_s": None, "phases": phases}


def curves_after(curves: Curves, shown: Curves | None) -> Curves | None:
    """What a page lacks that was shown those; None when it lacks nothing."""
    if shown is None or curves == shown:
        return curves if shown is None else None
    rounds = {curve.phase: curve.points[-1].round for curve in shown.training if curve.points}
    scored_s = shown.held_out[-1].at_s if shown.held_out else -1.0
    newer = [
        curve.model_copy(update={"points": tuple(x for x in curve.points if x.round > rounds.get(curve.phase, -1))})
        for curve in curves.training
    ]
    return Curves(
        max_points=curves.max_points,
        training=tuple(curve for curve in newer if curve.points),
        held_out=tuple(point for point in curves.held_out if point.at_s > scored_s),
    )


class Listeners:
    """Who listens now: so many at most, and none once the server ends."""

    def __init__(self, most: int = MAX_LISTENERS) -> None:
        self._most, self.count, self._ended = most, 0, asyncio.Event()

    def enter(self) -> None:
        if self.count >= self._most:
            raise Overloaded(f"{self.count} pages listen already, as many as may: ask again later", RETRY_S)
        self.count += 1

    def leave(self) -> None:
        self.count -= 1

    def end(self) -> None:
        self._ended.set()

    async def pause(self) -> bool:
        """False when it is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_S):
                await self._ended.wait()
        return not self._ended.is_set()


async def told(news: News, listeners: Listeners, role: Role, may_listen: Callable[[], bool]) -> AsyncIterator[bytes]:
    """The events of one listener, until the server ends or the token is revoked. Of the curves, first all, then what
    is new."""
    number, shown, silent_s = 0, None, 0.0
    while True:
        with suppress(BlockTrainError):  # a ledger that cannot answer now may the next time; meanwhile hearts beat
            newest = await run_in_threadpool(news.newest)
            if newest.number != number:
                yield _event("status", json.dumps(status_for(role, newest.status)))
                if (more := curves_after(newest.curves, shown)) is not None:
                    yield _event("curves", more.model_dump_json())
                number, shown, silent_s = newest.number, newest.curves, 0.0
        if silent_s >= HEARTBEAT_S:
            silent_s = 0.0
            if not await run_in_threadpool(may_listen):
                return
            yield b": still here\n\n"
        if not await listeners.pause():
            return
        silent_s += PAUSE_S


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


class EventStream(StreamingResponse):
    """Gives its place back at the end, however it ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        super().__init__(events, headers=HEADERS)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()

    async def stream_response(self, send: Send) -> None:
        async def in_time(message: Message) -> None:
            async with asyncio.timeout(STALLED_S):
                await send(message)

        with suppress(TimeoutError):
            await super().stream_response(in_time)
