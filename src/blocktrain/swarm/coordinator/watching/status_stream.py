"""The status and the curves of a run as server-sent events, sent when they change. The ledger is read at most once per
second, however many listeners there are. Next: status.py, what the status says; routes.py, which checks the role."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool

from blocktrain.errors import BlockTrainError, Overloaded
from blocktrain.http.sse import event
from blocktrain.swarm.coordinator.watching.status import Watching, status_for
from blocktrain.swarm.ledger.records import Role
from blocktrain.wire.people_messages import Curves

PAUSE_S = 1.0  # between two reads of the ledger
HEARTBEAT_S = 10.0  # a page that receives nothing for longer shows that it is out of date
STALLED_S = 30.0  # a listener that does not read for so long is dropped
MAX_LISTENERS = 64
RETRY_S = 10.0
SHOWN_EVALUATIONS = 1  # the older ones are in the curves


@dataclass(frozen=True)
class Snapshot:
    number: int  # grows when something changes other than the time
    status: dict[str, Any]
    curves: Curves


class StatusFeed:
    """The newest snapshot, at most one second old. Thread-safe."""

    def __init__(self, watching: Watching, clock: Callable[[], float] = time.monotonic) -> None:
        self._watching, self._clock, self._lock = watching, clock, threading.Lock()
        self._newest: Snapshot | None = None
        self._read_at_s, self._compared, self._curves_of = 0.0, "", ""

    def newest(self) -> Snapshot:
        with self._lock:
            if self._newest is None or self._clock() - self._read_at_s >= PAUSE_S:
                self._newest = self._read(self._newest)
                self._read_at_s = self._clock()
            return self._newest

    def _read(self, before: Snapshot | None) -> Snapshot:
        status = self._watching.status()
        status["evaluations"] = status["evaluations"][-SHOWN_EVALUATIONS:]
        compared, curves_of = json.dumps(_timeless(status)), json.dumps([status["versions"], status["evaluations"]])
        curves = before.curves if before and curves_of == self._curves_of else self._watching.curves()
        number = 1 if before is None else before.number + (compared != self._compared)
        self._compared, self._curves_of = compared, curves_of
        return Snapshot(number, status, curves)


def _timeless(status: Mapping[str, Any]) -> dict[str, Any]:
    """The status without what changes just because time passes."""
    phases = [
        {**phase, "round": phase["round"] and {**phase["round"], "time_left_s": None, "reason": None}}
        for phase in status["phases"]
    ]
    return {**status, "now_s": None, "time_left_s": None, "phases": phases}


def curves_after(curves: Curves, shown: Curves | None) -> Curves | None:
    """The points that a page with the curves `shown` lacks; None if it lacks none."""
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
    """Counts the open streams, limits their number, and ends them all when the server shuts down."""

    def __init__(self, most: int = MAX_LISTENERS) -> None:
        self._most, self.count, self._ended = most, 0, asyncio.Event()

    def enter(self) -> None:
        if self.count >= self._most:
            raise Overloaded(f"{self.count} pages listen already, the maximum: try again later", RETRY_S)
        self.count += 1

    def leave(self) -> None:
        self.count -= 1

    def end(self) -> None:
        self._ended.set()

    async def pause(self) -> bool:
        """Waits for PAUSE_S. Returns False if the server shuts down."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_S):
                await self._ended.wait()
        return not self._ended.is_set()


async def status_events(
    feed: StatusFeed, listeners: Listeners, role: Role, may_listen: Callable[[], bool]
) -> AsyncGenerator[bytes, None]:
    """The events of one listener, until the server shuts down or the access token is revoked. The first event of the
    curves has all points, later ones have the new points."""
    number, shown, silent_s = 0, None, 0.0
    while True:
        with suppress(BlockTrainError):  # the ledger may be available again next time; heartbeats go on
            newest = await run_in_threadpool(feed.newest)
            if newest.number != number:
                yield event(json.dumps(status_for(role, newest.status)), "status")
                if (more := curves_after(newest.curves, shown)) is not None:
                    yield event(more.model_dump_json(), "curves")
                number, shown, silent_s = newest.number, newest.curves, 0.0
        if silent_s >= HEARTBEAT_S:
            silent_s = 0.0
            if not await run_in_threadpool(may_listen):
                return
            yield b": still here\n\n"
        if not await listeners.pause():
            return
        silent_s += PAUSE_S
