"""A real gateway on a free port, the real openai client, and a trained model in this process. The forward can fail or
stop at a planned traversal, and remembers which sessions were forgotten."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from blocktrain.data.corpus import load_corpus
from blocktrain.http.server import served_in_thread
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.serve.gateway.app import GatewaySettings, build_gateway
from blocktrain.serve.segment.local import LocalForward
from blocktrain.serve.traversal import ModelInfo, Traversal
from blocktrain.spec import Denoise, RunSpec, preset
from blocktrain.train.run import train_run

KEY = "a-key-that-nobody-guesses"
PATIENCE_S = 60


@dataclass
class PlannedForward:
    """The real forward, with faults where a test plans them: {number of the traversal: what it raises}."""

    real: LocalForward
    faults: dict[int, Exception] = field(default_factory=dict)
    stops_at: int | None = None  # from here on it never answers
    when_it_stops: Callable[[], None] = lambda: None
    asked: int = 0
    open: set[str] = field(default_factory=set)
    stopped: threading.Event = field(default_factory=threading.Event)
    forgotten: threading.Event = field(default_factory=threading.Event)

    @property
    def info(self) -> ModelInfo:
        return self.real.info

    async def __call__(self, traversal: Traversal) -> Traversal:
        self.asked += 1
        self.open.add(traversal.session)
        if self.asked in self.faults:
            raise self.faults[self.asked]
        if self.stops_at is not None and self.asked >= self.stops_at:
            self.stopped.set()
            self.when_it_stops()
            await asyncio.Event().wait()
        return await self.real(traversal)

    async def forget(self, session: str) -> None:
        await self.real.forget(session)
        self.open.discard(session)
        self.forgotten.set()


@dataclass
class RunningGateway:
    """A gateway that listens."""

    url: str
    forward: PlannedForward
    app: FastAPI

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)

    def metric(self, line: str) -> float:
        headers = {"Authorization": f"Bearer {KEY}"}
        page = httpx.get(f"{self.url}/metrics", headers=headers, timeout=PATIENCE_S).text
        return next((float(each.rsplit(" ", 1)[1]) for each in page.splitlines() if each.startswith(line)), 0.0)


def _trained(spec: RunSpec, folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text("".join(f"{n} bottles of beer on the wall, {n} bottles of beer – wörk. " for n in range(400)))
    spec = spec.with_(**{"corpus.source": str(text)})
    corpus = load_corpus(spec.corpus, spec.model.context)
    run = RunDirectory.create(folder / "run", spec, corpus.sha256)
    assert train_run(run, corpus)
    return run.path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trained(preset("tiny").with_(**{"train.steps": 10}), tmp_path_factory.mktemp("stacked"))


@pytest.fixture(scope="session")
def denoising_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = preset("tiny").with_(objective=Denoise(span_share=0.5), **{"train.steps": 3})
    return _trained(spec, tmp_path_factory.mktemp("denoise"))


@pytest.fixture(scope="session")
def forward_of() -> Callable[[Path], PlannedForward]:
    return lambda path: PlannedForward(LocalForward.open(path))


@pytest.fixture
def forward(model: Path, forward_of: Callable[[Path], PlannedForward]) -> PlannedForward:
    return forward_of(model)


@pytest.fixture(scope="module")
def opened() -> Iterator[Callable[..., RunningGateway]]:
    """Starts gateways, and stops them at the end."""
    with ExitStack() as stack:

        def open_gateway(forward: PlannedForward, **settings: Any) -> RunningGateway:
            app = build_gateway(forward, GatewaySettings(**settings))
            return RunningGateway(stack.enter_context(served_in_thread(app, grace_s=1)).url, forward, app)

        yield open_gateway


@pytest.fixture(scope="module")
def gateway(
    model: Path, forward_of: Callable[[Path], PlannedForward], opened: Callable[..., RunningGateway]
) -> RunningGateway:
    """One gateway for all tests of a file that plan no faults."""
    return opened(forward_of(model), api_keys=(KEY,))


@pytest.fixture(scope="module")
def client(gateway: RunningGateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as client:
        yield client
