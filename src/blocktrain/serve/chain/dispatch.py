"""Dispatch: one traversal on its way through the stages, attempted until it arrives. If a stage dies or refuses, the
dispatch makes another attempt. All attempts of a traversal have one id and compute the same, so the first answer
counts. Next: routing.py chooses the route of an attempt; pipeline.py starts dispatches and gives them what stages
send."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from blocktrain.errors import ConfigError, FrameError, Overloaded, StageUnreachable
from blocktrain.serve.chain.frames import encode
from blocktrain.serve.chain.links import Link
from blocktrain.serve.chain.messages import Advance, Answer, Cancel, Head, Passed, Refused, ServedModel
from blocktrain.serve.chain.routing import Route, StageView, choose_route
from blocktrain.serve.traversal import Traversal


@dataclass
class PinnedSession:
    """A session keeps its model version to the end, and its stages while they are alive: they hold its KV caches."""

    model: ServedModel
    missing: tuple[int, ...] = ()
    name: str = field(default_factory=lambda: uuid.uuid4().hex)  # of its KV caches; never used twice
    addresses: set[str] = field(default_factory=set)


@dataclass
class Counters:
    traversals: int = 0
    retries: int = 0
    cache_misses: int = 0
    degraded: int = 0
    between_bytes: int = 0  # from stage to stage


@dataclass(frozen=True)
class TimeLimits:
    deadline_at_s: float  # on the clock of the pipeline
    attempt_s: float  # without any sign of progress
    stage_s: float  # to wait for a stage when there is no route
    attempts: int


class Dispatcher(Protocol):
    """What a dispatch needs of its pipeline."""

    identity: bytes
    links: dict[str, Link]
    dispatches: dict[str, Dispatch]
    counters: Counters
    clock: Callable[[], float]
    rng: Random

    def views(self) -> list[StageView]: ...


@dataclass
class Attempt:
    number: int
    addresses: tuple[str, ...]
    instances: tuple[str | None, ...]
    since_s: float  # when it came to its present stage
    at: int = 0  # its present stage, as an index into `addresses`

    @property
    def address(self) -> str:
        return self.addresses[self.at]


@dataclass(frozen=True)
class StageEvent:
    """A message of a stage. Without a message: the stage connected, went away or changed."""

    link: Link
    message: Any = None
    traversal: Traversal | None = None


class Dispatch:
    def __init__(
        self, dispatcher: Dispatcher, session: PinnedSession, traversal: Traversal, limits: TimeLimits
    ) -> None:
        self.session, self.id = session, uuid.uuid4().hex
        self.inbox: asyncio.Queue[StageEvent | None] = asyncio.Queue()  # None: the session is over
        self._dispatcher, self._limits = dispatcher, limits
        self._traversal = traversal.with_(session=session.name)
        self._outer_session = traversal.session
        self._attempts: dict[int, Attempt] = {}  # under way
        self._avoid: set[str] = set()
        self._full: dict[str, float] = {}  # address -> retry_after_s
        self._reason = ""
        self._num_attempts = 0
        self._no_route_since_s: float | None = None

    async def run(self) -> Traversal:
        self._dispatcher.dispatches[self.id] = self
        try:
            while True:
                if not self._attempts:
                    self._attempt_again()
                event = await self._next_event()
                if event is None:
                    self._check_time()
                elif isinstance(event.message, Answer) and event.traversal is not None:
                    return self._arrived(event.link, event.message, event.traversal)
                else:
                    self._handle(event)
        finally:
            del self._dispatcher.dispatches[self.id]
            self._cancel_the_rest()

    def take(self, event: StageEvent) -> None:
        """What a stage sent. A note of progress is only noted: there is nothing to decide, and limits move on."""
        passed = event.message if isinstance(event.message, Passed) and self.inbox.empty() else None
        attempt = self._attempts.get(passed.attempt) if passed else None
        if passed and attempt:
            self._passed(attempt, event.link, passed)
            if self._attempts:
                return
        self.inbox.put_nowait(event)

    async def _next_event(self) -> StageEvent | None:
        """What a stage sent, or None when a time limit has passed."""
        limits = [self._limits.deadline_at_s]
        if self._no_route_since_s is not None:
            limits.append(self._no_route_since_s + self._limits.stage_s)
        limits += [attempt.since_s + self._limits.attempt_s for attempt in self._attempts.values()]
        time_left_s = min(limits) - self._dispatcher.clock()
        try:
            async with asyncio.timeout(time_left_s):  # wait_for of Python 3.11 may swallow a cancellation
                event = await self.inbox.get()
        except TimeoutError:
            return None
        if event is None:
            raise StageUnreachable("the session ended while its traversal was under way: begin a new one")
        return event

    def _attempt_again(self) -> None:
        """Makes a new attempt, or notes that there is no route now. Raises when that has lasted too long."""
        now_s = self._dispatcher.clock()
        if now_s >= self._limits.deadline_at_s:
            raise StageUnreachable(f"the traversal did not arrive in time{self._because()}: try again")
        route = self._route()
        if route is None:
            self._no_route_since_s = now_s if self._no_route_since_s is None else self._no_route_since_s
            if now_s >= self._no_route_since_s + self._limits.stage_s:
                raise StageUnreachable(self._why_no_route())
            return
        self._no_route_since_s = None
        if full := [self._full[address] for address in route.addresses if address in self._full]:
            raise Overloaded(self._reason, min(full))
        if self._num_attempts >= self._limits.attempts:
            raise StageUnreachable(f"{self._num_attempts} attempts failed{self._because()}: try again later")
        self._dispatcher.counters.retries += self._num_attempts > 0
        self._send(route)

    def _route(self) -> Route | None:
        model = self.session.model
        return choose_route(
            self._dispatcher.views(),
            model.version,
            model.blocks,
            self._dispatcher.clock(),
            prefer=self.session.addresses,
            avoid=self._avoid,
            may_skip=self._traversal.missing,
            rng=self._dispatcher.rng,
        )

    def _send(self, route: Route) -> None:
        links, now_s = self._dispatcher.links, self._dispatcher.clock()
        self._num_attempts += 1
        instances = tuple(links[address].instance for address in route.addresses)
        attempt = Attempt(self._num_attempts, route.addresses, instances, now_s)
        message = Advance(
            id=self.id,
            attempt=attempt.number,
            version=self.session.model.version,
            reply_to=self._dispatcher.identity.hex(),
            route=route.addresses[1:],
            time_left_s=max(0.0, self._limits.deadline_at_s - now_s),
            head=Head.of(self._traversal),
        )
        self.session.addresses.update(route.addresses)
        self._attempts[attempt.number] = attempt
        links[attempt.address].under_way += 1
        try:
            links[attempt.address].send(encode(message, self._traversal))
        except StageUnreachable as error:
            self._fail(attempt, str(error))

    def _handle(self, event: StageEvent) -> None:
        if event.message is None:
            self._check_stages(event.link)
        elif (attempt := self._attempts.get(event.message.attempt)) is not None:
            if isinstance(event.message, Passed):
                self._passed(attempt, event.link, event.message)
            elif isinstance(event.message, Refused):
                self._refused(attempt, event.link, event.message)

    def _check_time(self) -> None:
        now_s = self._dispatcher.clock()
        if now_s >= self._limits.deadline_at_s:
            places = ", ".join(attempt.address for attempt in self._attempts.values()) or "nowhere"
            raise StageUnreachable(f"the traversal did not arrive in time, it was last at {places}: try again")
        for attempt in tuple(self._attempts.values()):
            if now_s >= attempt.since_s + self._limits.attempt_s:
                self._dispatcher.links[attempt.address].failed()
                self._fail(attempt, f"{attempt.address} gave no sign for {self._limits.attempt_s:g} s")

    def _check_stages(self, changed: Link) -> None:
        """An attempt is lost if its present stage, or one that it still has to pass, went away or was restarted."""
        if changed.alive:
            self._avoid.discard(changed.address)
        for attempt in tuple(self._attempts.values()):
            for address, instance in list(zip(attempt.addresses, attempt.instances, strict=True))[attempt.at :]:
                link = self._dispatcher.links[address]
                if not link.alive or link.instance != instance:
                    self._fail(attempt, f"{link.address} went away", link.address)
                    break

    def _passed(self, attempt: Attempt, link: Link, note: Passed) -> None:
        if note.to not in attempt.addresses or link.address != attempt.address:
            return
        link.worked(self._dispatcher.clock() - attempt.since_s)
        link.under_way -= 1
        self._dispatcher.counters.between_bytes += note.sent_bytes
        attempt.at, attempt.since_s = attempt.addresses.index(note.to), self._dispatcher.clock()
        self._dispatcher.links[note.to].under_way += 1
        self._check_stages(self._dispatcher.links[note.to])

    def _refused(self, attempt: Attempt, link: Link, refusal: Refused) -> None:
        match refusal.code:
            case "cache_miss" if self._traversal.start:
                self._dispatcher.counters.cache_misses += 1
                self._num_attempts -= 1  # a cache miss is no failure
                self._traversal = self._traversal.with_(start=0)
                self._drop(attempt)
            case "cache_miss":  # of a piece: earlier pieces took another route, or were dropped
                self._reason = refusal.message
                self._drop(attempt)
            case "bad_request":
                raise ConfigError(refusal.message)
            case "malformed":
                raise FrameError(refusal.message)
            case "overloaded":
                self._full[link.address] = refusal.retry_after_s
                self._fail(attempt, refusal.message, link.address)
            case "unreachable":
                self._fail(attempt, refusal.message, refusal.culprit)
            case "expired":
                raise StageUnreachable(f"the traversal did not arrive in time ({refusal.message}): try again")
            case _:
                link.failed()
                self._fail(attempt, refusal.message, link.address)

    def _fail(self, attempt: Attempt, reason: str, address: str | None = None) -> None:
        self._avoid.add(address or attempt.address)
        self._reason = reason
        self._drop(attempt)

    def _drop(self, attempt: Attempt) -> None:
        del self._attempts[attempt.number]
        self._dispatcher.links[attempt.address].under_way -= 1

    def _arrived(self, link: Link, answer: Answer, traversal: Traversal) -> Traversal:
        attempt = self._attempts.get(answer.attempt)
        if attempt is not None:
            link.worked(self._dispatcher.clock() - attempt.since_s)
            self.session.addresses = set(attempt.addresses)
            self._drop(attempt)
        self._dispatcher.counters.traversals += 1
        return traversal.with_(session=self._outer_session)

    def _cancel_the_rest(self) -> None:
        """Nobody waits for attempts that are still under way."""
        for attempt in tuple(self._attempts.values()):
            self._drop(attempt)
            for address in attempt.addresses[attempt.at :]:
                self._dispatcher.links[address].send_if_up(Cancel(id=self.id))

    def _because(self) -> str:
        return f" ({self._reason})" if self._reason else ""

    def _why_no_route(self) -> str:
        model = self.session.model
        away = "; ".join(link.diagnosis() for link in self._dispatcher.links.values() if not link.alive)
        return (
            f"no chain of stages has all of blocks 0-{model.blocks - 1} of version {model.version} now "
            f"({away or 'every stage answers: the version has been replaced, begin again'})"
        )
