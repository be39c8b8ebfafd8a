"""Link: the gateway's connection to one stage. It sends heartbeats, reports what the stage sends, and knows whether the
stage is alive. Next: routing.py chooses among the stages; pipeline.py owns the links."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from blocktrain.errors import BlockTrainError, FrameError, StageUnreachable, foreign_bytes
from blocktrain.serve.chain.frames import decode, encode
from blocktrain.serve.chain.messages import Hello, Refused, StageMessage, Welcome
from blocktrain.serve.chain.routing import StageView, pause_s
from blocktrain.serve.chain.sockets import LinkState, Network, link_states, post
from blocktrain.serve.traversal import Traversal

SMOOTHING = 0.3


@dataclass
class LinkStats:
    """Counted since the link was opened."""

    traversals: int = 0  # that this stage advanced
    failures: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    round_trip_s: float = 0.0  # of the heartbeat
    work_s: float = 0.0  # smoothed time of a traversal
    waiting: int = 0


class Link:
    """Calls `received(link, message, traversal)` for every message except heartbeats, and `changed(link)` whenever the
    stage connects, goes away or changes."""

    def __init__(
        self,
        address: str,
        network: Network,
        identity: bytes,
        *,
        heartbeat_s: float,
        dead_after_s: float,
        clock: Callable[[], float],
        received: Callable[[Link, Any, Traversal | None], None],
        changed: Callable[[Link], None],
    ) -> None:
        self.address, self.stats = address, LinkStats()
        self.welcome: Welcome | None = None
        self.state: LinkState = "silent"
        self.complaint = ""  # what was wrong with its messages
        self.under_way = 0
        self._socket = network.connect(address, identity)
        self._network, self._clock = network, clock
        self._heartbeat_s, self._dead_after_s = heartbeat_s, dead_after_s
        self._received, self._changed = received, changed
        self._asked_s: dict[int, float] = {}
        self._numbers, self._measured_s, self._failures_in_a_row, self._out_until_s = count(1), 0.0, 0, 0.0
        self._last_message_s = -1e9
        self._was_alive = False
        self._greet = asyncio.Event()
        self._tasks = [asyncio.create_task(work) for work in (self._watch(), self._beat())]
        self._socket.receive(self._listen)

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
        """Connected, and it sent something recently."""
        recently = self._clock() - self._last_message_s <= self._dead_after_s
        return self.welcome is not None and self.state == "up" and recently

    def view(self) -> StageView | None:
        """None until the stage has answered."""
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
        """Why the stage is not in use, for people."""
        if self.complaint:
            return f"{self.address}: {self.complaint}"
        if self.state == "silent":
            return f"{self.address}: nothing listens there; start the stage, or correct the address"
        if self.state in ("reached", "refused"):
            return (
                f"{self.address}: it refuses our key, or is not a stage; give the stage and the gateway the same "
                f"--keys file, or none to both"
            )
        if self.welcome is None:
            return f"{self.address}: it does not answer as a stage does; check the address"
        return f"{self.address}: alive" if self.alive else f"{self.address}: it no longer answers"

    def send(self, frames: list[bytes]) -> None:
        post(self._socket, frames, self.address)
        self.stats.sent_bytes += sum(map(len, frames))

    def send_if_up(self, message: StageMessage) -> None:
        """For messages that matter only to a connected stage."""
        if self.state == "up":
            with suppress(StageUnreachable):
                self.send(encode(message))

    def worked(self, seconds: float) -> None:
        """The stage has advanced a traversal in this time."""
        stats = self.stats
        stats.traversals += 1
        stats.work_s += (seconds - stats.work_s) * (SMOOTHING if stats.work_s else 1)
        self._measured_s, self._failures_in_a_row, self._out_until_s = self._clock(), 0, 0.0

    def failed(self) -> None:
        """The stage is avoided for a while if there is another, longer after each failure in a row."""
        self.stats.failures += 1
        self._failures_in_a_row += 1
        self._out_until_s = self._clock() + pause_s(self._failures_in_a_row)

    async def _watch(self) -> None:
        async for state in link_states(self._socket, self.address, self._network.tunnel(self._socket)):
            if state == "silent" and self.state in ("reached", "refused"):
                state = "refused"  # something listens there and closes the connection during the handshake
            self.state = state
            if state == "up":
                self._greet.set()
            else:
                self._last_message_s = -1e9
            self._news(certain=True)

    async def _beat(self) -> None:
        """Whatever the stage said, the next heartbeat follows: without it the link would be unusable for good."""
        while True:
            if self.state == "up":
                number = next(self._numbers)
                self._asked_s = {number: self._clock(), **dict(list(self._asked_s.items())[:8])}
                self.send_if_up(Hello(id=number))
            self._greet.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._greet.wait()
            with self._complaints():
                self._news()

    def _listen(self, frames: list[bytes]) -> None:
        self.stats.received_bytes += sum(map(len, frames))
        with self._complaints():
            self._take(*decode(frames))

    @contextmanager
    def _complaints(self) -> Iterator[None]:
        """What a stage said may be nonsense. That is noted, and the next message is read as usual."""
        try:
            with foreign_bytes(FrameError, "the answer"):
                yield
        except (BlockTrainError, OSError, MemoryError) as error:
            self.complaint = str(error)
            with suppress(Exception):  # those who are told may not be able to use this stage either
                self._changed(self)

    def _take(self, message: Any, traversal: Traversal | None) -> None:
        if isinstance(message, Welcome):
            self._welcomed(message)
        elif isinstance(message, Refused) and not message.id:
            self.complaint = message.message
            self._changed(self)
        else:
            self._last_message_s = self._clock()
            self._received(self, message, traversal)

    def _welcomed(self, welcome: Welcome) -> None:
        blocks, total = welcome.blocks, min(model.blocks for model in welcome.models)
        if any(after != before + 1 for before, after in pairwise(blocks)) or blocks[-1] >= total:
            raise FrameError(
                f"its blocks {list(blocks[:20])} are not consecutive blocks of 0-{total - 1}: check the stage"
            )
        before = self.welcome
        new = self.welcome is None or (self.welcome.instance, self.welcome.models) != (welcome.instance, welcome.models)
        self.welcome, self.complaint, self._last_message_s = welcome, "", self._clock()
        self.stats.waiting = welcome.waiting
        if (asked_s := self._asked_s.pop(welcome.id, None)) is not None:
            self.stats.round_trip_s = self._clock() - asked_s
        try:
            self._news(new)
        except Exception:
            self.welcome = before  # nobody can use what it says
            raise

    def _news(self, certain: bool = False) -> None:
        alive = self.alive
        if certain or alive != self._was_alive:
            self._was_alive = alive
            self._changed(self)
