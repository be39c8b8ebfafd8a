"""Stage: a segment on the network. It takes traversals from a gateway or the previous stage, advances them in batches,
and passes each on or answers the gateway. It does not choose routes. Next: queue.py forms the batches;
segment/segment.py computes them; pipeline.py is the gateway's side."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self

from blocktrain.errors import BlockTrainError, ConfigError, FrameError, StageUnreachable, foreign_bytes
from blocktrain.serve.chain.compute_thread import ComputeThread
from blocktrain.serve.chain.event_socket import EventSocket
from blocktrain.serve.chain.frames import decode, encode, payload_of, without_states
from blocktrain.serve.chain.messages import (
    Advance,
    Answer,
    Cancel,
    Code,
    FetchTokenizer,
    Forget,
    Head,
    Hello,
    Passed,
    Refused,
    ServedModel,
    StageMessage,
    TokenizerFile,
    Welcome,
)
from blocktrain.serve.chain.peers import Peers
from blocktrain.serve.chain.queue import Arrival, ArrivalQueue, Recent
from blocktrain.serve.chain.sockets import ChainKey, Network, post, posted, require_key, send
from blocktrain.serve.traversal import CacheMiss, ModelInfo, Outcome, Traversal
from blocktrain.spec import RunSpec

KEPT_VERSIONS = 2  # the newest one, and the one before it for sessions that began with it
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
    insecure: bool = False  # other hosts may connect without a key
    max_waiting: int = 64  # traversals
    max_waiting_bytes: int = 2**30
    max_rows: int = 256  # per batch
    pass_s: float = 5.0  # time limit for sending to the next stage
    relay: str | None = None  # HOST:PORT, through which it reaches stages behind routers


@dataclass(frozen=True)
class Advanced:
    """A traversal that the segment has advanced, and its tensors as they will be sent."""

    traversal: Traversal
    payload: bytes


@dataclass(frozen=True)
class Parcel:
    """An advanced traversal, or a piece of it, on its way to the next stage."""

    arrival: Arrival
    frames: list[bytes]
    waited_s: float
    computed_s: float
    is_last: bool

    @property
    def to(self) -> str:
        return self.arrival.message.route[0]


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
        self.address = self.settings.listen  # with its actual port after __aenter__
        self.instance = uuid.uuid4().hex
        self._key, self._clock = key, clock
        self._segments: dict[str, Computes] = {segment.info.version: segment}  # the newest last
        self._served: tuple[ServedModel, ...] | None = None  # the same as heartbeats tell it
        self._queue = ArrivalQueue(self.settings.max_waiting, self.settings.max_waiting_bytes)
        self._computing: dict[tuple[str, int], Arrival] = {}
        self._cancelled, self._forgotten = Recent(REMEMBERED), Recent(REMEMBERED)
        self._busy = False  # a batch is computed, or about to be formed
        self._batch_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._network = Network(self._key, self.settings.relay)
        try:
            self._router, self.address = self._network.listen(self.settings.listen)
        except BaseException:
            self._network.close()
            raise
        self._peers = Peers(self._network)
        self._loop = asyncio.get_running_loop()
        self._thread = ComputeThread("compute")
        self.broken: asyncio.Future[None] = self._loop.create_future()  # fails with an unexpected error
        self._router.receive(self._listen)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.broken.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._network.close()
        self._thread.close()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def versions(self) -> tuple[str, ...]:
        """The newest version first."""
        return tuple(reversed(self._segments))

    def offer(self, segment: Computes) -> None:
        """Adds a newer version of the same blocks. New sessions begin with it; the previous version stays for the
        others."""
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
        self._served = None

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broke(error)

    def _broke(self, error: BaseException) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)

    def _listen(self, frames: list[bytes]) -> None:
        sender, *said = frames
        try:
            with foreign_bytes(FrameError, "the message"):
                message, traversal = decode(said)
                self._handle(sender, message, traversal, sum(map(len, said)))
        except (BlockTrainError, OSError, MemoryError) as error:
            text = str(error)[:2000].encode("utf-8", "replace").decode()
            self._reply(sender, Refused(code="malformed", message=text))

    def _handle(self, sender: bytes, message: StageMessage, traversal: Traversal | None, num_bytes: int) -> None:
        match message:
            case Hello():
                self._reply(sender, self._welcome(message.id))
            case FetchTokenizer():
                self._reply(sender, self._tokenizer(message.sha256))
            case Advance() if traversal is not None:
                self._admit(Arrival(message, traversal, num_bytes, self._clock()))
            case Cancel():
                self._cancelled.add(message.id)
                self._queue.drop(lambda arrival: arrival.message.id == message.id)
            case Forget():
                self._forget(message.session)
            case _:
                kind = getattr(message, "kind", "")
                text = f'a stage does not accept "{kind}" messages: send what docs/serving.md describes'
                self._reply(sender, Refused(code="malformed", message=text))

    def _welcome(self, id: int) -> Welcome:
        (*_, current) = self._segments.values()
        if self._served is None:
            newest_first = reversed(self._segments.values())
            self._served = tuple(ServedModel.of(held.info, held.spec.digest()) for held in newest_first)
        return Welcome(
            id=id,
            instance=self.instance,
            blocks=current.blocks,
            models=self._served,
            waiting=len(self._queue),
            limit=self.settings.max_waiting,
            batch_s=self._batch_s,
        )

    def _tokenizer(self, sha256: str) -> TokenizerFile:
        """Every stage of a model has it: a gateway may ask any of them."""
        held = [segment.info.tokenizer for segment in self._segments.values()]
        return TokenizerFile(sha256=sha256, file=next((t.file for t in held if t.file and t.sha256 == sha256), b""))

    def _admit(self, arrival: Arrival) -> None:
        if self._unwanted(arrival):
            return
        same = self._computing.get(arrival.key)
        if same is not None and same.message.head == arrival.message.head and not _goes_ahead(same):
            self._computing[arrival.key] = arrival  # another attempt: computed once, passed on by the newer route
        elif arrival.message.version not in self._segments:
            held = ", ".join(self.versions)
            self._refuse(arrival, "version", f"{self.address} holds version {held}, not {arrival.message.version}")
        elif not self._queue.admit(arrival):
            retry_s = min(max(self._batch_s * len(self._queue) / 2, MIN_RETRY_S), MAX_RETRY_S)
            text = (
                f"{len(self._queue)} requests wait at {self.address}, at most {self._queue.limit} may: try again later"
            )
            self._refuse(arrival, "overloaded", text, retry_after_s=retry_s)
        else:
            self._begin_soon()

    def _unwanted(self, arrival: Arrival) -> bool:
        return arrival.message.id in self._cancelled or arrival.traversal.session in self._forgotten

    def _forget(self, session: str) -> None:
        """The computing thread owns the KV caches while it computes. While it rests it is not woken for this."""
        self._forgotten.add(session)
        self._queue.drop(lambda arrival: arrival.traversal.session == session)
        for segment in self._segments.values():
            if self._busy:
                self._thread.submit(partial(segment.forget, session))
            else:
                segment.forget(session)

    def _begin_soon(self) -> None:
        """Computes one batch after the other. New arrivals wait in the queue meanwhile, and those that come together
        form one batch."""
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        if self.broken.done():
            return
        try:
            for late in self._queue.drop(lambda arrival: arrival.time_left_s(self._clock()) <= 0):
                self._refuse(late, "expired", f"its time was over before {self.address} could compute it")
            batch = self._queue.take(self.settings.max_rows)
        except Exception as error:
            self._broke(error)
            return
        self._busy = bool(batch)
        if batch:
            self._computing = {arrival.key: arrival for arrival in batch}
            self._thread.submit(partial(self._compute, batch, self._clock()))

    def _compute(self, batch: Sequence[Arrival], began_s: float) -> None:
        """Runs on the computing thread."""
        outcomes = [_packed(*each) for each in zip(batch, self._advance(batch), strict=True)]
        self._loop.call_soon_threadsafe(self._computed, batch, outcomes, began_s)

    def _computed(self, batch: Sequence[Arrival], outcomes: Sequence[Advanced | Exception], began_s: float) -> None:
        if self.broken.done():
            return
        try:
            took_s = self._clock() - began_s
            self._batch_s += (took_s - self._batch_s) * (SMOOTHING if self._batch_s else 1)
            newest, self._computing = self._computing, {}
            for arrival, outcome in zip(batch, outcomes, strict=True):
                self._finish(newest[arrival.key], outcome, began_s - arrival.arrived_s, took_s)
        except Exception as error:
            self._broke(error)
            return
        self._begin()

    def _send_ahead(self, arrival: Arrival, piece: Traversal) -> None:
        """Runs on the computing thread, which goes on drafting."""
        self._loop.call_soon_threadsafe(self._finish, arrival, _packed(arrival, piece), 0.0, 0.0)

    def _advance(self, batch: Sequence[Arrival]) -> Sequence[Outcome | Exception]:
        """Runs on the computing thread. If the whole batch fails, the error is the outcome of each arrival."""
        segment = self._segments.get(batch[0].message.version)
        if segment is None:  # replaced twice while they waited
            return [KeyError(batch[0].message.version)] * len(batch)
        try:
            ahead = {at: partial(self._send_ahead, each) for at, each in enumerate(batch) if _goes_ahead(each)}
            return segment.advance([arrival.traversal for arrival in batch], ahead)
        except Exception as error:
            return [error] * len(batch)

    def _finish(self, arrival: Arrival, outcome: Advanced | Exception, waited_s: float, took_s: float) -> None:
        match outcome:
            case _ if self._unwanted(arrival):
                pass
            case Advanced(traversal, payload):
                self._pass_on(arrival, self._timed(traversal, waited_s), payload, waited_s, took_s)
            case CacheMiss():
                self._refuse(arrival, "cache_miss", str(outcome), start=outcome.start, have=outcome.have)
            case ConfigError() | FrameError():
                self._refuse(arrival, "bad_request", str(outcome))
            case KeyError():
                self._refuse(arrival, "version", f"{self.address} no longer holds version {arrival.message.version}")
            case _:
                text = f"{self.address} failed ({type(outcome).__name__}: {outcome}): see its log"
                self._refuse(arrival, "failed", text)

    def _timed(self, traversal: Traversal, waited_s: float) -> Traversal:
        """Adds to the segment's timing what only the stage knows."""
        *before, own = traversal.trace
        return traversal.with_(trace=(*before, replace(own, stage=self.address, queued_s=max(0.0, waited_s))))

    def _pass_on(self, arrival: Arrival, traversal: Traversal, payload: bytes, waited_s: float, took_s: float) -> None:
        """Sends the traversal to the next stage of its route, or the answer to the gateway."""
        message = arrival.message
        if message.route:
            rest = {
                "route": message.route[1:],
                "time_left_s": max(0.0, arrival.time_left_s(self._clock())),
                "head": Head.of(traversal),
            }
            frames = encode(message.model_copy(update=rest), payload)
            self._send_to_next(Parcel(arrival, frames, max(0.0, waited_s), took_s, traversal.is_last))
        elif traversal.is_last:  # the segment keeps earlier pieces until all are there
            answer = Answer(id=message.id, attempt=message.attempt, head=Head.of(traversal))
            self._reply(bytes.fromhex(message.reply_to), answer, payload)

    def _send_to_next(self, parcel: Parcel) -> None:
        """At once, if the next stage takes it: it nearly always does."""
        with self._refused_if_unreachable(parcel):
            require_key(parcel.to, self._key, self.settings.insecure)
            peer = self._peers.to(parcel.to)
            if posted(peer, parcel.frames, parcel.to):
                self._note_passed(parcel)
            else:
                self._start(self._send_when_taken(peer, parcel))

    async def _send_when_taken(self, peer: EventSocket, parcel: Parcel) -> None:
        with self._refused_if_unreachable(parcel):
            async with asyncio.timeout(self.settings.pass_s):
                await send(peer, parcel.frames, parcel.to)
            self._note_passed(parcel)

    @contextmanager
    def _refused_if_unreachable(self, parcel: Parcel) -> Iterator[None]:
        try:
            yield
        except (TimeoutError, StageUnreachable, ConfigError) as error:
            text = str(error) or f"{self.address} could not reach {parcel.to} for {self.settings.pass_s:g} s"
            self._refuse(parcel.arrival, "unreachable", text, culprit=parcel.to)

    def _note_passed(self, parcel: Parcel) -> None:
        if not parcel.is_last:
            return
        message = parcel.arrival.message
        note = Passed(
            id=message.id,
            attempt=message.attempt,
            to=parcel.to,
            sent_bytes=sum(map(len, parcel.frames)),
            waited_s=parcel.waited_s,
            computed_s=parcel.computed_s,
        )
        self._reply(bytes.fromhex(message.reply_to), note)

    def _refuse(self, arrival: Arrival, code: Code, text: str, **details: Any) -> None:
        id, attempt, reply_to = arrival.message.id, arrival.message.attempt, arrival.message.reply_to
        refusal = Refused(id=id, attempt=attempt, code=code, message=text[:2000], **details)
        self._reply(bytes.fromhex(reply_to), refusal)

    def _reply(self, to: bytes, message: StageMessage, payload: bytes | None = None) -> None:
        """Does nothing if the gateway is gone: it notices the broken connection and asks again."""
        try:
            post(self._router, [to, *encode(message, payload)], to.hex())
        except StageUnreachable:
            return


def _packed(arrival: Arrival, outcome: Outcome | Exception) -> Advanced | Exception:
    """Runs on the computing thread, which has just written the tensors, so that the event loop stays free. The last
    segment keeps pieces until all are there, so it sends the last one only, and without states."""
    if not isinstance(outcome, Traversal):
        return outcome
    has_next = bool(arrival.message.route)
    try:
        sent = payload_of(outcome if has_next else without_states(outcome)) if has_next or outcome.is_last else b""
    except Exception as error:
        return error
    return Advanced(outcome, sent)


def _goes_ahead(arrival: Arrival) -> bool:
    """The next stage may get pieces of the draft while more is drafted."""
    draft = arrival.traversal.draft
    is_tree = arrival.traversal.verify is not None  # a tree is sent whole
    return draft is not None and draft.candidates > 1 and not is_tree and bool(arrival.message.route)
