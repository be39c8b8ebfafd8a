"""Stage: a segment on the network. It takes walks from a gateway or the stage before, computes what is waiting in
batches, and hands each on or answers. Decides nothing about routes. Next: pipeline.py, the gateway's side."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

from blocktrain.errors import ConfigError, FrameError, StageUnreachable
from blocktrain.serve.chain.frames import decode, encode, head_of, without_states
from blocktrain.serve.chain.keys import ChainKey, require_key
from blocktrain.serve.chain.messages import (
    Answer,
    Cancel,
    Code,
    Forget,
    Hello,
    Message,
    Passed,
    Refused,
    Served,
    Walk,
    Welcome,
)
from blocktrain.serve.chain.queue import Arrival, Recent, WaitingRoom
from blocktrain.serve.chain.sockets import Network, Socket, post, send, zmq_errors
from blocktrain.serve.traversal import CacheMiss, ModelInfo, Traversal
from blocktrain.spec import RunSpec

Outcome = Traversal | CacheMiss | ConfigError
KEPT_VERSIONS = 2  # the current one, and the one that running sessions began with
MAX_PEERS = 64
REMEMBERED = 10_000
SMOOTHING = 0.3
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0


class Computes(Protocol):
    """What a stage needs of serve/segment/segment.py's Segment."""

    spec: RunSpec
    info: ModelInfo
    blocks: tuple[int, ...]

    def advance(
        self, batch: Sequence[Traversal], ahead: Mapping[int, Callable[[Traversal], None]] | None = None
    ) -> Sequence[Outcome]: ...

    def forget(self, session: str) -> None: ...


@dataclass(frozen=True)
class StageSettings:
    listen: str = "tcp://127.0.0.1:*"
    insecure: bool = False  # no key beyond this machine
    max_waiting: int = 64  # traversals
    max_waiting_bytes: int = 2**30
    max_rows: int = 256  # of a batch
    pass_s: float = 5.0  # how long the next stage may be away


class Stage:
    """Sockets on the event loop, computation on one thread of its own. Used as an async context manager."""

    def __init__(
        self,
        segment: Computes,
        settings: StageSettings | None = None,
        *,
        key: ChainKey | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or StageSettings()
        require_key(self.settings.listen, key, self.settings.insecure, listen=True)
        self.address = self.settings.listen  # with its port once it listens
        self.instance = uuid.uuid4().hex
        self._key, self._clock = key, clock
        self._segments: dict[str, Computes] = {segment.info.version: segment}  # the newest last
        self._room = WaitingRoom(self.settings.max_waiting, self.settings.max_waiting_bytes)
        self._computing: dict[tuple[str, int], Arrival] = {}
        self._cancelled, self._forgotten = Recent(REMEMBERED), Recent(REMEMBERED)
        self._arrived = asyncio.Event()
        self._batch_s = 0.0
        self._peers: dict[str, Socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._network = Network(self._key)
        try:
            self._router, self.address = self._network.listen(self.settings.listen)
        except BaseException:
            self._network.close()
            raise
        self._thread = ThreadPoolExecutor(1, "compute")
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # by a defect of ours
        self._start(self._listen())
        self._start(self._work())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.broken.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._network.close()
        self._thread.shutdown(wait=True, cancel_futures=True)

    @property
    def waiting(self) -> int:
        return len(self._room)

    @property
    def versions(self) -> tuple[str, ...]:
        """The newest first."""
        return tuple(reversed(self._segments))

    def offer(self, segment: Computes) -> None:
        """A newer version of the same blocks: new sessions begin with it, the one before it stays for the others."""
        (*_, current) = self._segments.values()
        if segment.blocks != current.blocks or segment.spec.digest() != current.spec.digest():
            raise ConfigError(
                f"blocks {list(segment.blocks)} of {segment.info.name} cannot follow blocks {list(current.blocks)} of "
                f"{current.info.name}: offer the same blocks of the same model"
            )
        self._segments.pop(segment.info.version, None)
        self._segments[segment.info.version] = segment
        for version in self.versions[KEPT_VERSIONS:]:
            del self._segments[version]

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self.broken.done():
            self.broken.set_exception(error)

    async def _listen(self) -> None:
        while True:
            sender, *frames = await self._router.recv_multipart()
            try:
                message, traversal = decode(frames)
            except FrameError as error:
                self._reply(sender, Refused(code="malformed", message=str(error)[:2000]))
                continue
            self._hear(sender, message, traversal, sum(map(len, frames)))

    def _hear(self, sender: bytes, message: Message, traversal: Traversal | None, num_bytes: int) -> None:
        match message:
            case Hello():
                self._reply(sender, self._welcome(message.id))
            case Walk() if traversal is not None:
                self._admit(Arrival(message, traversal, num_bytes, self._clock()))
            case Cancel():
                self._cancelled.add(message.id)
                self._room.drop(lambda work: work.walk.id == message.id)
            case Forget():
                self._forget(message.session)
            case _:
                text = f'a stage is not told "{getattr(message, "kind", "")}": send what docs/serving.md describes'
                self._reply(sender, Refused(code="malformed", message=text))

    def _welcome(self, id: int) -> Welcome:
        models = [Served.of(held.info, held.spec.digest()) for held in reversed(self._segments.values())]
        (*_, current) = self._segments.values()
        return Welcome(
            id=id,
            instance=self.instance,
            blocks=current.blocks,
            models=tuple(models),
            waiting=len(self._room),
            limit=self.settings.max_waiting,
            batch_s=self._batch_s,
        )

    def _admit(self, work: Arrival) -> None:
        if self._unwanted(work):
            return
        same = self._computing.get(work.key)
        if same is not None and same.walk.head == work.walk.head and not _goes_ahead(same):
            self._computing[work.key] = work  # tried again: computed once, sent on by the newer route
        elif work.walk.version not in self._segments:
            held = ", ".join(self.versions)
            self._refuse(work, "version", f"{self.address} holds version {held}, not {work.walk.version}")
        elif not self._room.admit(work):
            retry_s = min(max(self._batch_s * len(self._room) / 2, MIN_RETRY_S), MAX_RETRY_S)
            text = f"{len(self._room)} requests wait at {self.address}, at most {self._room.limit} may: try again later"
            self._refuse(work, "overloaded", text, retry_after_s=retry_s)
        else:
            self._arrived.set()

    def _unwanted(self, work: Arrival) -> bool:
        return work.walk.id in self._cancelled or work.traversal.session in self._forgotten

    def _forget(self, session: str) -> None:
        """Caches belong to the computing thread."""
        self._forgotten.add(session)
        self._room.drop(lambda work: work.traversal.session == session)
        for segment in self._segments.values():
            self._thread.submit(segment.forget, session)

    async def _work(self) -> None:
        """While one batch is computed the next one gathers."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            for work in self._room.drop(lambda work: work.left_s(self._clock()) <= 0):
                self._refuse(work, "expired", f"its time was over before {self.address} came to it")
            batch = self._room.take(self.settings.max_rows)
            if not self._room:
                self._arrived.clear()
            if not batch:
                continue
            began_s = self._clock()
            self._computing = {work.key: work for work in batch}
            ahead = {at: partial(self._send_ahead, loop, work) for at, work in enumerate(batch) if _goes_ahead(work)}
            outcomes = await loop.run_in_executor(self._thread, self._advance, batch, ahead)
            took_s = self._clock() - began_s
            self._batch_s += (took_s - self._batch_s) * (SMOOTHING if self._batch_s else 1)
            newest, self._computing = self._computing, {}
            for work, outcome in zip(batch, outcomes, strict=True):
                self._finish(newest[work.key], outcome, began_s - work.arrived_s, took_s)

    def _send_ahead(self, loop: asyncio.AbstractEventLoop, work: Arrival, piece: Traversal) -> None:
        """On the computing thread, which drafts on."""
        loop.call_soon_threadsafe(self._finish, work, piece, 0.0, 0.0)

    def _advance(
        self, batch: Sequence[Arrival], ahead: Mapping[int, Callable[[Traversal], None]]
    ) -> Sequence[Outcome | Exception]:
        """On the computing thread. What goes wrong with all of them is told to each."""
        segment = self._segments.get(batch[0].walk.version)
        if segment is None:  # swapped twice while they waited
            return [KeyError(batch[0].walk.version)] * len(batch)
        try:
            return segment.advance([work.traversal for work in batch], ahead)
        except Exception as error:
            return [error] * len(batch)

    def _finish(self, work: Arrival, outcome: Outcome | Exception, waited_s: float, took_s: float) -> None:
        match outcome:
            case _ if self._unwanted(work):
                pass
            case Traversal():
                try:
                    self._hand_on(work, self._signed(outcome, waited_s), waited_s, took_s)
                except FrameError as error:
                    self._refuse(work, "bad_request", str(error))
            case CacheMiss():
                self._refuse(work, "cache_miss", str(outcome), start=outcome.start, have=outcome.have)
            case ConfigError():
                self._refuse(work, "bad_request", str(outcome))
            case KeyError():
                self._refuse(work, "version", f"{self.address} no longer holds version {work.walk.version}")
            case _:
                text = f"{self.address} failed ({type(outcome).__name__}: {outcome}): see its messages"
                self._refuse(work, "failed", text)

    def _signed(self, traversal: Traversal, waited_s: float) -> Traversal:
        """The segment's hop with what only the stage knows."""
        *before, own = traversal.trace
        return traversal.with_(trace=(*before, replace(own, stage=self.address, queued_s=max(0.0, waited_s))))

    def _hand_on(self, work: Arrival, traversal: Traversal, waited_s: float, took_s: float) -> None:
        walk = work.walk
        if not walk.route and not traversal.is_last:
            return  # the segment keeps it until all is there
        if not walk.route:
            traversal = without_states(traversal)
            answer = Answer(id=walk.id, attempt=walk.attempt, head=head_of(traversal))
            self._reply(bytes.fromhex(walk.reply_to), answer, traversal)
            return
        next_walk = walk.model_copy(
            update={
                "route": walk.route[1:],
                "expires_s": max(0.0, work.left_s(self._clock())),
                "head": head_of(traversal),
            }
        )
        sending = self._pass_on(work, encode(next_walk, traversal), max(0.0, waited_s), took_s, traversal.is_last)
        self._start(sending)

    async def _pass_on(
        self, work: Arrival, frames: list[bytes], waited_s: float, computed_s: float, is_last: bool
    ) -> None:
        walk, to = work.walk, work.walk.route[0]
        try:
            require_key(to, self._key, self.settings.insecure)
            async with asyncio.timeout(self.settings.pass_s):
                await send(self._peer(to), frames, to)
        except (TimeoutError, StageUnreachable, ConfigError) as error:
            text = str(error) or f"{self.address} could not reach {to} for {self.settings.pass_s:g} s"
            self._refuse(work, "unreachable", text, culprit=to)
            return
        if not is_last:
            return
        note = Passed(
            id=walk.id,
            attempt=walk.attempt,
            to=to,
            sent_bytes=sum(map(len, frames)),
            waited_s=waited_s,
            computed_s=computed_s,
        )
        self._reply(bytes.fromhex(walk.reply_to), note)

    def _peer(self, address: str) -> Socket:
        """The connection to another stage, kept; the longest unused one is closed when there are many."""
        peer = self._peers.pop(address, None)
        if peer is None:
            peer = self._network.connect(address)
            with zmq_errors(address):
                peer.connect(address)
            if len(self._peers) >= MAX_PEERS:
                self._network.close_socket(self._peers.pop(next(iter(self._peers))))
        self._peers[address] = peer
        return peer

    def _refuse(self, work: Arrival, code: Code, message: str, **details: Any) -> None:
        walk = work.walk
        refusal = Refused(id=walk.id, attempt=walk.attempt, code=code, message=message[:2000], **details)
        self._reply(bytes.fromhex(walk.reply_to), refusal)

    def _reply(self, to: bytes, message: Message, traversal: Traversal | None = None) -> None:
        """To a gateway that is gone, nothing: it knows that the connection broke and asks again."""
        try:
            post(self._router, [to, *encode(message, traversal)], to.hex())
        except StageUnreachable:
            return


def _goes_ahead(work: Arrival) -> bool:
    """Whether the next stage may have what is drafted while more is drafted."""
    draft = work.traversal.draft
    return draft is not None and draft.candidates > 1 and bool(work.walk.route)
