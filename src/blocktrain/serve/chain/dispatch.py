"""Journey: one traversal through some blocks, tried until it arrives. A stage that dies or refuses costs another try;
all tries of a journey have one id, and whichever answers first is the answer, since all compute the same.
Next: routing.py, which chooses the ways; pipeline.py, which sends journeys and hands them what is heard."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from blocktrain.errors import ConfigError, FrameError, Overloaded, StageUnreachable
from blocktrain.serve.chain.frames import encode, head_of
from blocktrain.serve.chain.links import Link
from blocktrain.serve.chain.messages import Answer, Cancel, Passed, Refused, Served, Walk
from blocktrain.serve.chain.routing import Route, StageView, choose_route, hedge_after_s
from blocktrain.serve.traversal import Traversal


@dataclass
class Pin:
    """What a session keeps: its version to the end, its stages while they live, since its caches are there."""

    model: Served
    missing: tuple[int, ...] = ()
    name: str = field(default_factory=lambda: uuid.uuid4().hex)  # of its caches; never used twice
    addresses: set[str] = field(default_factory=set)


@dataclass
class Counters:
    walks: int = 0
    retries: int = 0
    hedges: int = 0
    cache_misses: int = 0
    degraded: int = 0
    between_bytes: int = 0  # from stage to stage


@dataclass(frozen=True)
class Patience:
    """How long each kind of waiting may take."""

    deadline_s: float  # on the clock
    attempt_s: float  # without any sign of progress
    stage_s: float  # for a stage to come back when there is no way
    attempts: int
    hedge: float | None  # multiples of a stage's usual time


class World(Protocol):
    """What a journey needs of its pipeline."""

    identity: bytes
    links: dict[str, Link]
    journeys: dict[str, Journey]
    counters: Counters
    clock: Callable[[], float]
    rng: Random

    def views(self) -> list[StageView]: ...


@dataclass
class Attempt:
    number: int
    addresses: tuple[str, ...]
    instances: tuple[str | None, ...]
    since_s: float  # at its present stage
    at: int = 0

    @property
    def address(self) -> str:
        return self.addresses[self.at]


@dataclass(frozen=True)
class Heard:
    """None: nothing was said, but the stage came, went or changed."""

    link: Link
    message: Any = None
    traversal: Traversal | None = None


class Journey:
    def __init__(
        self, world: World, pin: Pin, traversal: Traversal, blocks: tuple[int, int], patience: Patience
    ) -> None:
        self.pin, self.id = pin, uuid.uuid4().hex
        self.inbox: asyncio.Queue[Heard | None] = asyncio.Queue()  # None: the session is over
        self._world, self._patience, self._blocks = world, patience, blocks
        self._traversal = traversal.with_(session=pin.name)
        self._session = traversal.session
        self._attempts: dict[int, Attempt] = {}
        self._avoid: set[str] = set()
        self._full: dict[str, float] = {}  # address -> retry after
        self._reason = ""
        self._tries = 0
        self._hedged = False
        self._no_way_since_s: float | None = None

    async def run(self) -> Traversal:
        self._world.journeys[self.id] = self
        try:
            while True:
                if not self._attempts:
                    self._try_again()
                event = await self._next_event()
                if isinstance(event, Heard) and isinstance(event.message, Answer) and event.traversal is not None:
                    return self._arrived(event.link, event.message, event.traversal)
                self._consider(event)
        finally:
            del self._world.journeys[self.id]
            self._give_up_the_rest()

    async def _next_event(self) -> Heard | str:
        """What is heard, or "time" when something is due."""
        left_s = self._wake_s() - self._world.clock()
        try:
            async with asyncio.timeout(left_s):  # wait_for of Python 3.11 may swallow a cancellation
                event = await self.inbox.get()
        except TimeoutError:
            return "time"
        if event is None:
            raise StageUnreachable("the session was given up while its traversal was under way: begin a new one")
        return event

    def _wake_s(self) -> float:
        waits = [self._patience.deadline_s]
        if self._no_way_since_s is not None:
            waits.append(self._no_way_since_s + self._patience.stage_s)
        for attempt in self._attempts.values():
            waits += [attempt.since_s + self._patience.attempt_s, self._hedge_s(attempt)]
        return min(waits)

    def _hedge_s(self, attempt: Attempt) -> float:
        if self._hedged:
            return math.inf
        usual_s = self._world.links[attempt.address].stats.work_s
        return attempt.since_s + hedge_after_s(usual_s, self._patience.hedge)

    def _try_again(self) -> None:
        """A new attempt; or a note that there is no way now, and the end when that has lasted too long."""
        now_s = self._world.clock()
        if now_s >= self._patience.deadline_s:
            raise StageUnreachable(f"the traversal did not arrive in time{self._because()}: try again")
        route = self._choose(self._avoid)
        if route is None:
            self._no_way_since_s = now_s if self._no_way_since_s is None else self._no_way_since_s
            if now_s >= self._no_way_since_s + self._patience.stage_s:
                raise StageUnreachable(self._no_way())
            return
        self._no_way_since_s = None
        if full := [self._full[address] for address in route.addresses if address in self._full]:
            raise Overloaded(self._reason, min(full))
        if self._tries >= self._patience.attempts:
            raise StageUnreachable(f"{self._tries} tries failed{self._because()}: try again later")
        self._world.counters.retries += self._tries > 0
        self._send(route, self._traversal)

    def _choose(self, avoid: set[str]) -> Route | None:
        return choose_route(
            self._world.views(),
            self.pin.model.version,
            *self._blocks,
            self._world.clock(),
            prefer=self.pin.addresses,
            avoid=avoid,
            may_skip=self._traversal.missing,
            rng=self._world.rng,
        )

    def _send(self, route: Route, traversal: Traversal) -> None:
        links, now_s = self._world.links, self._world.clock()
        self._tries += 1
        instances = tuple(links[address].instance for address in route.addresses)
        attempt = Attempt(self._tries, route.addresses, instances, now_s)
        walk = Walk(
            id=self.id,
            attempt=attempt.number,
            version=self.pin.model.version,
            reply_to=self._world.identity.hex(),
            route=route.addresses[1:],
            expires_s=max(0.0, self._patience.deadline_s - now_s),
            head=head_of(traversal),
        )
        self.pin.addresses.update(route.addresses)
        self._attempts[attempt.number] = attempt
        links[attempt.address].under_way += 1
        try:
            links[attempt.address].send(encode(walk, traversal))
        except StageUnreachable as error:
            self._fail(attempt, str(error))

    def _consider(self, event: Heard | str) -> None:
        if isinstance(event, str):
            self._look_at_the_clock()
        elif event.message is None:
            self._look_at(event.link)
        elif (attempt := self._attempts.get(event.message.attempt)) is not None:
            if isinstance(event.message, Passed):
                self._passed(attempt, event.link, event.message)
            elif isinstance(event.message, Refused):
                self._refused(attempt, event.link, event.message)

    def _look_at_the_clock(self) -> None:
        now_s = self._world.clock()
        if now_s >= self._patience.deadline_s:
            places = ", ".join(attempt.address for attempt in self._attempts.values()) or "nowhere"
            raise StageUnreachable(f"the traversal did not arrive in time, it was last at {places}: try again")
        for attempt in tuple(self._attempts.values()):
            if now_s >= attempt.since_s + self._patience.attempt_s:
                self._world.links[attempt.address].failed()
                self._fail(attempt, f"{attempt.address} gave no sign for {self._patience.attempt_s:g} s")
            elif now_s >= self._hedge_s(attempt):
                self._hedge(attempt)

    def _hedge(self, attempt: Attempt) -> None:
        """A second way beside a slow one. Its stages do not know the session, so the whole text goes."""
        self._hedged = True
        route = self._choose(self._avoid | {attempt.address})
        if route is not None and attempt.address not in route.addresses:
            self._world.counters.hedges += 1
            self._send(route, self._traversal.with_(start=0))

    def _look_at(self, link: Link) -> None:
        """What is at a stage that is gone or was started anew is lost, and so is what would come to it."""
        if link.alive:
            self._avoid.discard(link.address)
        for attempt in tuple(self._attempts.values()):
            if (gone := self._gone(attempt)) is not None:
                self._fail(attempt, f"{gone} went away", gone)

    def _gone(self, attempt: Attempt) -> str | None:
        """The first stage before it that is not what it was when the attempt set out."""
        before = range(attempt.at, len(attempt.addresses))
        links = [(n, self._world.links[attempt.addresses[n]]) for n in before]
        gone = (link.address for n, link in links if not link.alive or link.instance != attempt.instances[n])
        return next(gone, None)

    def _passed(self, attempt: Attempt, link: Link, note: Passed) -> None:
        if note.to not in attempt.addresses or link.address != attempt.address:
            return
        link.worked(self._world.clock() - attempt.since_s)
        link.under_way -= 1
        self._world.counters.between_bytes += note.sent_bytes
        attempt.at, attempt.since_s = attempt.addresses.index(note.to), self._world.clock()
        self._world.links[note.to].under_way += 1
        self._look_at(self._world.links[note.to])

    def _refused(self, attempt: Attempt, link: Link, refusal: Refused) -> None:
        match refusal.code:
            case "cache_miss" if self._traversal.start:
                self._world.counters.cache_misses += 1
                self._tries -= 1  # it is the way to find out, no failure
                self._traversal = self._traversal.with_(start=0)
                self._drop(attempt)
            case "cache_miss":  # of a piece: those before it went another way, or were given up
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
        self._world.links[attempt.address].under_way -= 1

    def _arrived(self, link: Link, answer: Answer, traversal: Traversal) -> Traversal:
        attempt = self._attempts.get(answer.attempt)
        if attempt is not None:
            link.worked(self._world.clock() - attempt.since_s)
            self.pin.addresses = {*attempt.addresses, *self._others()}
            self._drop(attempt)
        self._world.counters.walks += 1
        return traversal.with_(session=self._session)

    def _others(self) -> set[str]:
        """The session's stages for blocks that this journey does not go through."""
        first, end = self._blocks
        views = (view for view in self._world.views() if view.address in self.pin.addresses)
        return {view.address for view in views if view.end <= first or view.blocks[0] >= end}

    def _give_up_the_rest(self) -> None:
        """Nobody waits for what is still under way."""
        for attempt in tuple(self._attempts.values()):
            self._drop(attempt)
            for address in attempt.addresses[attempt.at :]:
                self._world.links[address].tell(Cancel(id=self.id))

    def _because(self) -> str:
        return f" ({self._reason})" if self._reason else ""

    def _no_way(self) -> str:
        first, end = self._blocks
        away = "; ".join(link.diagnosis() for link in self._world.links.values() if not link.alive)
        version = self.pin.model.version
        return (
            f"no chain of stages has all of blocks {first}-{end - 1} of version {version} now "
            f"({away or 'every stage answers: the version has been replaced, begin again'})"
        )
