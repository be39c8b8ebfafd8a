"""Link: the gateway's connection to one stage. It says hello as a heartbeat, tells what it hears, and knows how the
stage stands. Next: routing.py, which chooses among their views; pipeline.py, which owns them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from blocktrain.errors import FrameError, StageUnreachable
from blocktrain.serve.chain.frames import decode, encode
from blocktrain.serve.chain.messages import Hello, Message, Refused, Welcome
from blocktrain.serve.chain.routing import StageView, pause_s
from blocktrain.serve.chain.sockets import Network, Standing, post, standings
from blocktrain.serve.traversal import Traversal

SMOOTHING = 0.3


@dataclass
class LinkStats:
    """What has gone over a link since it was opened."""

    walks: int = 0  # that this stage finished its part of
    failures: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    round_trip_s: float = 0.0  # of the heartbeat
    work_s: float = 0.0  # of late
    waiting: int = 0


class Link:
    """`heard(link, message, traversal)` gets everything but heartbeats, `changed(link)` every coming and going."""

    def __init__(
        self,
        address: str,
        network: Network,
        identity: bytes,
        *,
        heartbeat_s: float,
        dead_after_s: float,
        clock: Callable[[], float],
        heard: Callable[[Link, Any, Traversal | None], None],
        changed: Callable[[Link], None],
    ) -> None:
        self.address, self.stats = address, LinkStats()
        self.welcome: Welcome | None = None
        self.standing: Standing = "silent"
        self.complaint = ""  # what was wrong with what it said
        self.under_way = 0
        self._socket = network.connect(address, identity)
        self._network, self._clock = network, clock
        self._heartbeat_s, self._dead_after_s = heartbeat_s, dead_after_s
        self._heard, self._changed = heard, changed
        self._asked_s: dict[int, float] = {}
        self._numbers, self._measured_s, self._failures_in_a_row, self._out_until_s = count(1), 0.0, 0, 0.0
        self._heard_s = -1e9
        self._was_alive = False
        self._greet = asyncio.Event()
        self._tasks = [asyncio.create_task(work) for work in (self._watch(), self._listen(), self._beat())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._network.close_socket(self._socket)

    @property
    def instance(self) -> str | None:
        return self.welcome.instance if self.welcome else None

    @property
    def alive(self) -> bool:
        """Connected, and heard of lately."""
        lately = self._clock() - self._heard_s <= self._dead_after_s
        return self.welcome is not None and self.standing == "up" and lately

    def view(self) -> StageView | None:
        """None before it has said what it is."""
        if self.welcome is None:
            return None
        return StageView(
            address=self.address,
            blocks=self.welcome.blocks,
            models=self.welcome.models,
            healthy=self.alive,
            out=self._clock() < self._out_until_s,
            waiting=self.welcome.waiting,
            under_way=self.under_way,
            work_s=self.stats.work_s,
            measured_s=self._measured_s,
        )

    def diagnosis(self) -> str:
        """Why it is not in use, for people."""
        if self.complaint:
            return f"{self.address}: {self.complaint}"
        if self.standing == "silent":
            return f"{self.address}: nobody listens there; start the stage, or mend the address"
        if self.standing in ("reached", "refused"):
            return (
                f"{self.address}: it refuses our key, or is no stage; give it and the gateway the same --keys file "
                f"(both, or neither)"
            )
        if self.welcome is None:
            return f"{self.address}: it does not answer as a stage does; check the address"
        return f"{self.address}: well" if self.alive else f"{self.address}: it does not answer any more"

    def send(self, frames: list[bytes]) -> None:
        post(self._socket, frames, self.address)
        self.stats.sent_bytes += sum(map(len, frames))

    def tell(self, message: Message) -> None:
        """Where it matters only to one that is there."""
        if self.standing == "up":
            with suppress(StageUnreachable):
                self.send(encode(message))

    def worked(self, seconds: float) -> None:
        """It has done its part of a walk."""
        stats = self.stats
        stats.walks += 1
        stats.work_s += (seconds - stats.work_s) * (SMOOTHING if stats.work_s else 1)
        self._measured_s, self._failures_in_a_row, self._out_until_s = self._clock(), 0, 0.0

    def failed(self) -> None:
        """Out for a while, longer each time, where there is another; it comes back by itself."""
        self.stats.failures += 1
        self._failures_in_a_row += 1
        self._out_until_s = self._clock() + pause_s(self._failures_in_a_row)

    async def _watch(self) -> None:
        async for standing in standings(self._socket, self.address):
            if standing == "silent" and self.standing in ("reached", "refused"):
                standing = "refused"  # somebody is there and hangs up before we have spoken
            self.standing = standing
            if standing == "up":
                self._greet.set()
            else:
                self._heard_s = -1e9
            self._news(certain=True)

    async def _beat(self) -> None:
        while True:
            if self.standing == "up":
                number = next(self._numbers)
                self._asked_s = {number: self._clock(), **dict(list(self._asked_s.items())[:8])}
                self.tell(Hello(id=number))
            self._greet.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._greet.wait()
            self._news()

    async def _listen(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self.stats.received_bytes += sum(map(len, frames))
            try:
                message, traversal = decode(frames)
            except FrameError as error:
                self.complaint = str(error)
                self._changed(self)
                continue
            if isinstance(message, Welcome):
                self._welcomed(message)
            elif isinstance(message, Refused) and not message.id:
                self.complaint = message.message
                self._changed(self)
            else:
                self._heard_s = self._clock()
                self._heard(self, message, traversal)

    def _welcomed(self, welcome: Welcome) -> None:
        if list(welcome.blocks) != list(range(welcome.blocks[0], welcome.blocks[-1] + 1)):
            self.complaint = f"its blocks {list(welcome.blocks)} are not consecutive"
            return
        new = self.welcome is None or (self.welcome.instance, self.welcome.models) != (welcome.instance, welcome.models)
        self.welcome, self.complaint, self._heard_s = welcome, "", self._clock()
        self.stats.waiting = welcome.waiting
        if (asked_s := self._asked_s.pop(welcome.id, None)) is not None:
            self.stats.round_trip_s = self._clock() - asked_s
        self._news(new)

    def _news(self, certain: bool = False) -> None:
        alive = self.alive
        if certain or alive != self._was_alive:
            self._was_alive = alive
            self._changed(self)
