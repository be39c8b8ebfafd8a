"""Pipeline: a model whose blocks are on other hosts, as a Forward. It finds out what each stage holds, keeps each
session on one model version, and starts one dispatch per traversal. Next: dispatch.py attempts a traversal until it
arrives; links.py connects to one stage."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any, Self

from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_of_run
from blocktrain.errors import ConfigError, FrameError, StageUnreachable
from blocktrain.serve.chain.dispatch import Counters, Dispatch, PinnedSession, StageEvent, TimeLimits
from blocktrain.serve.chain.links import Link
from blocktrain.serve.chain.messages import WIRES, FetchTokenizer, Forget, ServedModel, TokenizerFile
from blocktrain.serve.chain.routing import (
    StageView,
    choose_route,
    cover_problem,
    model_problem,
    newest_whole,
    version_problem,
)
from blocktrain.serve.chain.sockets import ChainKey, Network, require_key
from blocktrain.serve.traversal import ModelInfo, Traversal, Wire, check_tokens

MAX_SESSIONS = 100_000


@dataclass(frozen=True)
class PipelineSettings:
    wire: Wire = "fp16"
    degraded: bool = False  # may answer without blocks that no stage holds now
    insecure: bool = False  # connect to other hosts without a key
    time_limit_s: float = 120.0  # for a traversal
    attempt_s: float = 60.0  # without a sign of progress; then another attempt is made
    attempts: int = 4
    wait_s: float = 5.0  # for a stage to come back if there is no other
    start_s: float = 10.0  # for the stages to make up a model
    heartbeat_s: float = 1.0
    dead_after_s: float = 10.0
    relay: str | None = None  # HOST:PORT, through which it reaches stages behind routers

    def __post_init__(self) -> None:
        if self.wire not in WIRES:
            raise ConfigError(f'--wire "{self.wire}" is unknown: choose one of {", ".join(WIRES)}')


@dataclass(frozen=True)
class StageStats:
    alive: bool
    blocks: tuple[int, ...]
    versions: tuple[str, ...]
    diagnosis: str
    traversals: int
    failures: int
    sent_bytes: int
    received_bytes: int
    round_trip_s: float
    work_s: float
    waiting: int


@dataclass(frozen=True)
class PipelineStats:
    """Counted since the start."""

    traversals: int
    retries: int
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
        self.identity = b"g" + os.urandom(15)  # ZeroMQ reserves routing ids that begin with zero
        self.links: dict[str, Link] = {}
        self.dispatches: dict[str, Dispatch] = {}
        self.counters = Counters()
        self._sessions: OrderedDict[str, PinnedSession] = OrderedDict()
        self._changes = asyncio.Event()
        self._tokenizer: Tokenizer = ByteTokenizer()  # of all versions: they have one spec
        self._tokenizer_came = asyncio.Event()
        self._model: ServedModel | None = None  # the newest version of which all blocks were there recently
        self._info: tuple[ServedModel, Tokenizer, ModelInfo] | None = None  # what `info` was made of last

    async def __aenter__(self) -> Self:
        self._network = Network(self._key, self.settings.relay)
        try:
            for address in self._addresses:
                self.links[address] = self._link(address)
            await self._settle()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for dispatch in self.dispatches.values():
            dispatch.inbox.put_nowait(None)
        await asyncio.gather(*(link.close() for link in self.links.values()))
        self._network.close()

    @property
    def info(self) -> ModelInfo:
        assert self._model is not None, "use the pipeline inside `async with`"
        known, tokenizer, info = self._info or (None, None, None)
        if info is None or known is not self._model or tokenizer is not self._tokenizer:
            info = self._model.info(self._tokenizer)
            self._info = self._model, self._tokenizer, info
        return info

    def views(self) -> list[StageView]:
        """The stages that serve our model now."""
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
        deadline_at_s = self.clock() + self.settings.time_limit_s
        traversal = traversal.with_(wire=self.settings.wire)
        try:
            return await self._dispatch(traversal, deadline_at_s)
        except StageUnreachable:
            missing = self._missing_blocks(traversal)
            if not missing:
                raise
        self.counters.degraded += 1
        return await self._dispatch(traversal.with_(missing=missing, degraded=True), deadline_at_s)

    async def forget(self, session: str) -> None:
        if (pinned := self._sessions.pop(session, None)) is not None:
            self._end(pinned)

    def _end(self, session: PinnedSession) -> None:
        for dispatch in tuple(self.dispatches.values()):
            if dispatch.session is session:
                dispatch.inbox.put_nowait(None)
        for link in self.links.values():
            link.send_if_up(Forget(session=session.name))

    async def _dispatch(self, traversal: Traversal, deadline_at_s: float) -> Traversal:
        session, known = self._session(traversal)
        if not known:
            traversal = traversal.with_(start=0)
        settings = self.settings
        limits = TimeLimits(
            deadline_at_s=deadline_at_s,
            attempt_s=settings.attempt_s,
            stage_s=0.0 if self._may_degrade(session.model) and not traversal.missing else settings.wait_s,
            attempts=settings.attempts,
        )
        return await Dispatch(self, session, traversal, limits).run()

    def _session(self, traversal: Traversal) -> tuple[PinnedSession, bool]:
        """The traversal's session, and whether stages may hold KV caches of it. A session whose missing blocks change
        begins again: its KV caches were computed with the other blocks."""
        old = self._sessions.get(traversal.session)
        if old is not None and old.missing == traversal.missing:
            self._sessions.move_to_end(traversal.session)
            return old, True
        model = old.model if old else newest_whole(self.views(), may_skip=bool(traversal.missing)) or self._model
        assert model is not None
        if old is not None:
            self._end(old)
        new = self._sessions[traversal.session] = PinnedSession(model, traversal.missing)
        if len(self._sessions) > MAX_SESSIONS:
            self._end(self._sessions.popitem(last=False)[1])
        return new, False

    def _may_degrade(self, model: ServedModel) -> bool:
        return self.settings.degraded and model.survives_loss

    def _missing_blocks(self, traversal: Traversal) -> tuple[int, ...]:
        """The blocks that no stage holds, if the model may answer without them."""
        session = self._sessions.get(traversal.session)
        if session is None or traversal.missing or not self._may_degrade(session.model):
            return ()
        model = session.model
        route = choose_route(self.views(), model.version, model.blocks, self.clock(), may_skip=range(model.blocks))
        return route.missing if route else ()

    def _link(self, address: str) -> Link:
        return Link(
            address,
            self._network,
            self.identity,
            heartbeat_s=self.settings.heartbeat_s,
            dead_after_s=self.settings.dead_after_s,
            clock=self.clock,
            received=self._received,
            changed=self._changed,
        )

    def _received(self, link: Link, message: Any, traversal: Traversal | None) -> None:
        """Messages for a dispatch that is over are ignored."""
        if isinstance(message, TokenizerFile):
            self._take_tokenizer(message)
        if traversal is not None and self._model is not None:
            check_tokens(traversal, self.info)
        if (dispatch := self.dispatches.get(getattr(message, "id", ""))) is not None:
            dispatch.take(StageEvent(link, message, traversal))

    def _changed(self, link: Link) -> None:
        self._changes.set()
        if self._model is not None:
            self._model = newest_whole(self.views()) or self._model
        for dispatch in self.dispatches.values():
            dispatch.inbox.put_nowait(StageEvent(link))

    async def _settle(self) -> None:
        """Waits until the stages make up a model. Raises ConfigError that says why they do not."""
        give_up_at_s = self.clock() + self.settings.start_s
        while (problem := self._problem()) is not None:
            sure, text = problem
            time_left_s = give_up_at_s - self.clock()
            if sure or time_left_s <= 0:
                raise ConfigError(text)
            self._changes.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(time_left_s):
                    await self._changes.wait()
        self._model = newest_whole(self.views())
        assert self._model is not None
        await self._fetch_tokenizer(self._model.tokenizer_sha256)

    async def _fetch_tokenizer(self, sha256: str | None) -> None:
        """From any stage: each of them carries it. They are asked one after the other until one has sent it."""
        give_up_at_s, stages = self.clock() + self.settings.attempt_s, cycle(self.links.values())
        while sha256 is not None and sha256 != self._tokenizer.sha256:
            self._tokenizer_came.clear()
            next(stages).send_if_up(FetchTokenizer(sha256=sha256))
            time_left_s = give_up_at_s - self.clock()
            if time_left_s <= 0:
                wrong = "; ".join(link.diagnosis() for link in self.links.values())
                raise ConfigError(f"no stage sent the model's tokenizer ({wrong}): start the stages again")
            with suppress(TimeoutError):
                async with asyncio.timeout(min(time_left_s, self.settings.wait_s)):
                    await self._tokenizer_came.wait()

    def _take_tokenizer(self, message: TokenizerFile) -> None:
        if self._model is None or self._tokenizer.sha256 == self._model.tokenizer_sha256:
            return
        self._tokenizer_came.set()  # also if it is wrong: then the next stage is asked
        if hashlib.sha256(message.file).hexdigest() != self._model.tokenizer_sha256:
            raise FrameError("it sent another tokenizer than it announced: start it again from the model's directory")
        self._tokenizer = tokenizer_of_run(None, message.file)

    def _problem(self) -> tuple[bool, str] | None:
        """Why the stages do not make up a model, and whether that is certain, so that waiting cannot help."""
        answered = [link for link in self.links.values() if link.welcome is not None]
        views = [view for link in answered if (view := link.view()) is not None]
        if views and (text := model_problem(views)):
            return True, text
        silent = [link for link in self.links.values() if link.welcome is None]
        if silent and (not views or newest_whole(views) is None or any(link.complaint for link in silent)):
            sure = all(link.complaint or link.state == "refused" for link in silent)
            return sure, "; ".join(link.diagnosis() for link in silent)
        if text := version_problem(views):
            return False, text
        if text := cover_problem(views):
            return not silent, text
        return None


def _stage_stats(link: Link) -> StageStats:
    view, stats = link.view(), link.stats
    return StageStats(
        alive=link.alive,
        blocks=view.blocks if view else (),
        versions=tuple(model.version for model in view.models) if view else (),
        diagnosis=link.diagnosis(),
        **asdict(stats),
    )
