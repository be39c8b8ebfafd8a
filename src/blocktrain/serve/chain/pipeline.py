"""Pipeline: a model whose blocks are on other hosts, as a Forward. It finds out what each stage holds, keeps sessions
on one version, sends traversals as journeys and sums up what fanned out. Next: journey.py; gateway.py, the door."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, TypeVar

from torch import Tensor

from blocktrain.errors import ConfigError, StageUnreachable
from blocktrain.serve.chain.dispatch import Counters, Heard, Journey, Patience, Pin
from blocktrain.serve.chain.keys import ChainKey, require_key
from blocktrain.serve.chain.links import Link
from blocktrain.serve.chain.messages import WIRES, Forget, Served
from blocktrain.serve.chain.routing import (
    StageView,
    choose_route,
    cover_problem,
    model_problem,
    newest_whole,
    version_problem,
)
from blocktrain.serve.chain.sockets import Network
from blocktrain.serve.traversal import ModelInfo, Traversal, Wire

Result = TypeVar("Result")
MAX_SESSIONS = 100_000


@dataclass(frozen=True)
class PipelineSettings:
    topology: Literal["chain", "fanout"] = "chain"
    wire: Wire = "fp16"
    degraded: bool = False  # may answer without blocks that nobody holds now
    insecure: bool = False
    deadline_s: float = 120.0  # of a traversal
    attempt_s: float = 60.0  # without a sign of progress, then another try
    attempts: int = 4
    hedge: float | None = None  # a second way after so many times a stage's usual time
    wait_s: float = 5.0  # for a stage to come back where there is no other
    start_s: float = 10.0
    heartbeat_s: float = 1.0
    dead_after_s: float = 10.0

    def __post_init__(self) -> None:
        if self.wire not in WIRES:
            raise ConfigError(f'--wire "{self.wire}" is unknown: choose one of {", ".join(WIRES)}')
        if self.topology not in ("chain", "fanout"):
            raise ConfigError(f'--topology "{self.topology}" is unknown: choose chain or fanout')


@dataclass(frozen=True)
class StageStats:
    alive: bool
    blocks: tuple[int, ...]
    versions: tuple[str, ...]
    diagnosis: str
    walks: int
    failures: int
    sent_bytes: int
    received_bytes: int
    round_trip_s: float
    work_s: float
    waiting: int


@dataclass(frozen=True)
class PipelineStats:
    """Since the start."""

    walks: int
    retries: int
    hedges: int
    cache_misses: int
    degraded: int
    between_bytes: int  # from stage to stage
    sent_bytes: int  # to the stages
    received_bytes: int  # from them
    stages: dict[str, StageStats]


class Pipeline:
    """Used as an async context manager, in the event loop that calls it."""

    def __init__(
        self,
        addresses: Sequence[str],
        settings: PipelineSettings | None = None,
        *,
        key: ChainKey | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.settings, self.clock, self.rng = settings or PipelineSettings(), clock, rng or random.Random()
        if not addresses:
            raise ConfigError("no stages were named: give --stages tcp://HOST:PORT,…")
        self._addresses = tuple(dict.fromkeys(addresses))
        for address in self._addresses:
            require_key(address, key, self.settings.insecure)
        self._key = key
        self.identity = b"g" + os.urandom(15)  # ZeroMQ keeps names that begin with zero for itself
        self.links: dict[str, Link] = {}
        self.journeys: dict[str, Journey] = {}
        self.counters = Counters()
        self._pins: OrderedDict[str, Pin] = OrderedDict()
        self._changes = asyncio.Event()
        self._model: Served | None = None  # the newest version that was whole of late

    async def __aenter__(self) -> Self:
        self._network = Network(self._key)
        try:
            for address in self._addresses:
                self.links[address] = self._link(address)
            await self._settle()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for journey in self.journeys.values():
            journey.inbox.put_nowait(None)
        await asyncio.gather(*(link.close() for link in self.links.values()))
        self._network.close()

    @property
    def info(self) -> ModelInfo:
        assert self._model is not None, "a pipeline is entered before it is used"
        return self._model.info

    def views(self) -> list[StageView]:
        """The stages of our model; one that serves another now is as good as away."""
        views = [view for link in self.links.values() if (view := link.view()) is not None]
        model = self._model
        return [view for view in views if model is None or view.models[0].spec_digest == model.spec_digest]

    def stats(self) -> PipelineStats:
        each = [link.stats for link in self.links.values()]
        return PipelineStats(
            **asdict(self.counters),
            sent_bytes=sum(stats.sent_bytes for stats in each),
            received_bytes=sum(stats.received_bytes for stats in each),
            stages={address: _stage_stats(link) for address, link in self.links.items()},
        )

    async def __call__(self, traversal: Traversal) -> Traversal:
        deadline_s = self.clock() + self.settings.deadline_s
        traversal = traversal.with_(wire=self.settings.wire)
        try:
            return await self._whole(traversal, deadline_s)
        except StageUnreachable:
            missing = self._missing_blocks(traversal)
            if not missing:
                raise
        self.counters.degraded += 1
        return await self._whole(traversal.with_(missing=missing, degraded=True), deadline_s)

    async def forget(self, session: str) -> None:
        if (pin := self._pins.pop(session, None)) is not None:
            self._let_go(pin)

    def _let_go(self, pin: Pin) -> None:
        for journey in tuple(self.journeys.values()):
            if journey.pin is pin:
                journey.inbox.put_nowait(None)
        for link in self.links.values():
            link.tell(Forget(session=pin.name))

    async def _whole(self, traversal: Traversal, deadline_s: float) -> Traversal:
        pin, known = self._pin(traversal)
        if not known:
            traversal = traversal.with_(start=0)
        if self.settings.topology == "fanout" and pin.model.info.independent and traversal.noise is None:
            ranges = self._ranges(pin, traversal)
            if len(ranges) > 1:
                return await self._fan_out(pin, traversal, ranges, deadline_s)
        return await self._journey(pin, traversal, (0, pin.model.blocks), deadline_s)

    def _pin(self, traversal: Traversal) -> tuple[Pin, bool]:
        """The session's, and whether its stages may know it. Without other blocks than before it begins anew: what
        the caches hold was computed with those."""
        old = self._pins.get(traversal.session)
        if old is not None and old.missing == traversal.missing:
            self._pins.move_to_end(traversal.session)
            return old, True
        model = old.model if old else newest_whole(self.views(), may_skip=bool(traversal.missing)) or self._model
        assert model is not None
        if old is not None:
            self._let_go(old)
        pin = self._pins[traversal.session] = Pin(model, traversal.missing)
        if len(self._pins) > MAX_SESSIONS:
            self._let_go(self._pins.popitem(last=False)[1])
        return pin, False

    def _ranges(self, pin: Pin, traversal: Traversal) -> list[tuple[int, int]]:
        """The blocks of each stage of a way through; none while there is none."""
        views = {view.address: view for view in self.views()}
        route = choose_route(
            views.values(),
            pin.model.version,
            0,
            pin.model.blocks,
            self.clock(),
            prefer=pin.addresses,
            may_skip=traversal.missing,
            rng=self.rng,
        )
        return [(views[each].blocks[0], views[each].end) for each in route.addresses] if route else []

    async def _journey(self, pin: Pin, traversal: Traversal, blocks: tuple[int, int], deadline_s: float) -> Traversal:
        settings = self.settings
        patience = Patience(
            deadline_s=deadline_s,
            attempt_s=settings.attempt_s,
            stage_s=0.0 if self._may_degrade(pin.model) and not traversal.missing else settings.wait_s,
            attempts=settings.attempts,
            hedge=settings.hedge,
        )
        return await Journey(self, pin, traversal, blocks, patience).run()

    async def _fan_out(
        self, pin: Pin, traversal: Traversal, ranges: Sequence[tuple[int, int]], deadline_s: float
    ) -> Traversal:
        """All stages at once; where the first one drafts, it goes ahead, since the others weigh what it wrote. No stage
        has all evidence, so whoever asked chooses."""
        traversal = traversal.with_(weigh=None)

        def ask(t: Traversal, blocks: tuple[int, int]) -> Coroutine[Any, Any, Traversal]:
            return self._journey(pin, t, blocks, deadline_s)

        if traversal.draft is None:
            return _summed(traversal, await _all([ask(traversal, blocks) for blocks in ranges]))
        drafted = await ask(traversal, ranges[0])
        rest = traversal.with_(draft=None, tails=drafted.tails)
        return _summed(drafted, [drafted, *await _all([ask(rest, blocks) for blocks in ranges[1:]])])

    def _may_degrade(self, model: Served) -> bool:
        return self.settings.degraded and model.survives_loss

    def _missing_blocks(self, traversal: Traversal) -> tuple[int, ...]:
        """What to do without, where that is allowed and helps."""
        pin = self._pins.get(traversal.session)
        if pin is None or traversal.missing or not self._may_degrade(pin.model):
            return ()
        everything = range(pin.model.blocks)
        route = choose_route(self.views(), pin.model.version, 0, pin.model.blocks, self.clock(), may_skip=everything)
        return route.missing if route else ()

    def _link(self, address: str) -> Link:
        return Link(
            address,
            self._network,
            self.identity,
            heartbeat_s=self.settings.heartbeat_s,
            dead_after_s=self.settings.dead_after_s,
            clock=self.clock,
            heard=self._hear,
            changed=self._notice,
        )

    def _hear(self, link: Link, message: Any, traversal: Traversal | None) -> None:
        """What comes for a journey that is over comes too late."""
        if (journey := self.journeys.get(getattr(message, "id", ""))) is not None:
            journey.inbox.put_nowait(Heard(link, message, traversal))

    def _notice(self, link: Link) -> None:
        self._changes.set()
        if self._model is not None:
            self._model = newest_whole(self.views()) or self._model
        for journey in self.journeys.values():
            journey.inbox.put_nowait(Heard(link))

    async def _settle(self) -> None:
        """Until the stages make a model; or an error that says why they do not."""
        give_up_s = self.clock() + self.settings.start_s
        while (problem := self._problem()) is not None:
            sure, text = problem
            left_s = give_up_s - self.clock()
            if sure or left_s <= 0:
                raise ConfigError(text)
            self._changes.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changes.wait()
        self._model = newest_whole(self.views())
        assert self._model is not None
        if self.settings.topology == "fanout" and not self._model.info.independent:
            raise ConfigError(
                f"--topology fanout asks all stages at once, and the blocks of {self._model.name} read each other's "
                f"output: use --topology chain"
            )

    def _problem(self) -> tuple[bool, str] | None:
        """What keeps the stages from being a model, and whether waiting cannot help."""
        answered = [link for link in self.links.values() if link.welcome is not None]
        views = [view for link in answered if (view := link.view()) is not None]
        if views and (text := model_problem(views)):
            return True, text
        silent = [link for link in self.links.values() if link.welcome is None]
        if silent and (not views or newest_whole(views) is None or any(link.complaint for link in silent)):
            sure = all(link.complaint or link.standing == "refused" for link in silent)
            return sure, "; ".join(link.diagnosis() for link in silent)
        if text := version_problem(views):
            return False, text
        if text := cover_problem(views):
            return not silent, text
        return None


def _summed(first: Traversal, parts: Sequence[Traversal]) -> Traversal:
    """The evidence of all, in the order of their blocks."""
    return first.with_(
        prompt_logits=_sum([part.prompt_logits for part in parts]),
        tail_logits=_sum([part.tail_logits for part in parts]),
        degraded=any(part.degraded for part in parts),
        trace=tuple(hop for part in parts for hop in part.trace),
    )


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    total = there[0] if there else None
    for part in there[1:]:
        total = part if total is None else total + part
    return total


async def _all(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Their results in order; the first failure ends the others too."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stage_stats(link: Link) -> StageStats:
    view, stats = link.view(), link.stats
    return StageStats(
        alive=link.alive,
        blocks=view.blocks if view else (),
        versions=tuple(model.version for model in view.models) if view else (),
        diagnosis=link.diagnosis(),
        **asdict(stats),
    )
