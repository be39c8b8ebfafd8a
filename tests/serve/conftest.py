"""What the tests of serving share: small models with weights of their own, chains of stages on free ports, and gates
and clocks that decide what happens first."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blocktrain.data.tokenizer import Tokenizer, learn_tokenizer
from blocktrain.model.block import build_block
from blocktrain.model.stack import BlockModel
from blocktrain.serve.chain.pipeline import Pipeline, PipelineSettings
from blocktrain.serve.chain.stage import Stage, StageSettings
from blocktrain.serve.decode.request import Decoder
from blocktrain.serve.segment.local import LocalForward
from blocktrain.serve.segment.segment import Segment
from blocktrain.serve.traversal import Traversal
from blocktrain.spec import Denoise, EndToEnd, RunSpec, Stacked, preset

LIMIT_S = 120.0  # for what happens at once, also on a busy machine
KINDS = ("stacked", "denoise", "end_to_end", "droppable")
CHANGES: dict[str, dict[str, Any]] = {
    "stacked": {"objective": {"kind": "stacked"}},
    "droppable": {"objective": {"kind": "stacked", "state_dropout": 0.3}},
    "denoise": {"objective": {"kind": "denoise", "span_share": 0.5}},
    "end_to_end": {"objective": {"kind": "end_to_end"}},
}
QUICK = PipelineSettings(
    wire="fp32",
    heartbeat_s=0.1,
    dead_after_s=LIMIT_S,
    wait_s=LIMIT_S,
    start_s=LIMIT_S,
    attempt_s=LIMIT_S,
    time_limit_s=LIMIT_S,
)


@cache
def spec_of(kind: str) -> RunSpec:
    base = preset("tiny").model_dump(mode="json")
    return RunSpec.model_validate({**base, **CHANGES[kind], "name": kind})


@cache
def tensors_of(kind: str, seed: int) -> dict[int, dict[str, Tensor]]:
    """As if trained: an initial block has no opinion."""
    spec, generator = spec_of(kind), torch.Generator().manual_seed(seed)
    return {
        index: {
            name: value + 0.3 * torch.randn(value.shape, generator=generator)
            for name, value in build_block(spec, index).state_dict().items()
        }
        for index in range(spec.model.blocks)
    }


def segment_of(kind: str, blocks: Sequence[int], seed: int = 0, version: str | None = None) -> Segment:
    tensors = tensors_of(kind, seed)
    weights = dict.fromkeys(("stack", "mean"), (0.1, 0.2, 0.3, 0.4))
    return Segment(spec_of(kind), {k: tensors[k] for k in blocks}, weights, version=version or f"seed-{seed}")


def local_of(kind: str, *spans: Sequence[int], seed: int = 0) -> LocalForward:
    return LocalForward(*(segment_of(kind, span, seed) for span in spans or (range(4),)))


class Gated:
    """A segment that computes only while its gate is open, and says when a batch waits at the gate."""

    def __init__(self, segment: Any) -> None:
        self.spec, self.info, self.blocks = segment.spec, segment.info, segment.blocks
        self.segment, self.gate, self.entered = segment, threading.Event(), threading.Event()
        self.batches: list[int] = []

    def advance(self, batch: Sequence[Traversal], ahead: Any = None) -> Any:
        self.batches.append(len(batch))
        self.entered.set()
        assert self.gate.wait(LIMIT_S)
        return self.segment.advance(batch, ahead)

    def forget(self, session: str) -> None:
        self.segment.forget(session)

    async def has_a_batch(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, LIMIT_S)


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def move(self, seconds: float, pipeline: Pipeline) -> None:
        """Dispatches read the clock when something changes."""
        self.now_s += seconds
        pipeline._changed(next(iter(pipeline.links.values())))


@asynccontextmanager
async def stages_of(
    segments: Sequence[Any], clock: Callable[[], float] = time.monotonic, **settings: Any
) -> AsyncIterator[list[Stage]]:
    patient = StageSettings(**{"pass_s": LIMIT_S, **settings})
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Stage(each, patient, clock=clock)) for each in segments]


@asynccontextmanager
async def chain_of(segments: Sequence[Any], settings: PipelineSettings = QUICK) -> AsyncIterator[Pipeline]:
    async with (
        stages_of(segments) as stages,
        Pipeline([stage.address for stage in stages], settings) as pipeline,
    ):
        yield pipeline


async def until(condition: Callable[[], bool]) -> None:
    """For what other tasks bring about: they run while this one yields."""

    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), LIMIT_S)


async def all_known(pipeline: Pipeline) -> None:
    """A pipeline begins as soon as there is one route."""
    await until(lambda: all(link.alive for link in pipeline.links.values()))


def assert_right(reply: Traversal, text: Traversal, kind: str = "stacked") -> None:
    """The reply has the logits of the model in one process."""
    truth = local_of(kind).run(text.with_(session="truth"))
    torch.testing.assert_close(reply.prompt_logits, truth.prompt_logits, atol=1e-5, rtol=1e-4)


class Helpers:
    """The functions above, for tests that get them as the fixture `serve`."""

    kinds, quick, limit_s = KINDS, QUICK, LIMIT_S
    spec_of, tensors_of = staticmethod(spec_of), staticmethod(tensors_of)
    segment_of, local_of = staticmethod(segment_of), staticmethod(local_of)
    stages_of, chain_of, until = staticmethod(stages_of), staticmethod(chain_of), staticmethod(until)
    all_known, assert_right = staticmethod(all_known), staticmethod(assert_right)
    gated, clock = Gated, Clock


@pytest.fixture
def serve() -> type[Helpers]:
    return Helpers


@pytest.fixture
def free_address() -> Iterator[str]:
    """Nothing listens there, and no other process can take it."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{reserved.getsockname()[1]}"


@pytest.fixture
def trained_segments(trained_run: Path) -> list[Segment]:
    return [Segment.open(trained_run, blocks) for blocks in ((0, 1), (2,), (3,))]


OBJECTIVES = {
    "stacked": Stacked(),
    "end_to_end": EndToEnd(),
    "spans": Denoise(span_share=0.25),
}
WEIGHTS = {"stack": (0.1, 0.2, -0.3, 1.0), "mean": (0.1, 0.2, 0.3, 0.4)}
LETTERS = b"abc"
Cut = Sequence[Sequence[int]]


@cache
def model_of(kind: str, weighted: bool = True) -> BlockModel:
    """The tiny preset; weights that are zero at birth are not."""
    model = BlockModel(preset("tiny").with_(objective=OBJECTIVES[kind]), WEIGHTS if weighted else None)
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval().requires_grad_(False)


@cache
def three_letters() -> BlockModel:
    """Two blocks that nearly always write a, b or c, and do not agree on which."""
    spec = RunSpec.model_validate({"model": {"width": 16, "heads": 2, "context": 16, "blocks": 2, "layers": 2}})
    model = BlockModel(spec)
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator)
    for block in model.blocks:
        block.gain.data.fill_(1.0)
        block.embedding.data.abs_()  # so that the stream leans to one side, and a row of ones finds it
        block.readout.data.zero_()
        block.readout.data[list(LETTERS)] = 1.8 + 0.3 * torch.randn(len(LETTERS), 16, generator=generator)
    return model.eval().requires_grad_(False)


def segments_of(model: BlockModel, cut: Cut, **settings: object) -> list[Segment]:
    tensors = {index: block.state_dict() for index, block in enumerate(model.blocks)}
    return [
        Segment(model.spec, {index: tensors[index] for index in part}, model.combine, version="v", **settings)
        for part in cut
    ]


def in_step(segments: Sequence[Segment], decoders: Sequence[Decoder]) -> list[bytes]:
    """What each decoder writes; what all ask for goes through each segment as one batch."""
    written = [b""] * len(decoders)
    while asked := {at: ask for at, each in enumerate(decoders) if (ask := each.ask()) is not None}:
        batch = list(asked.values())
        for segment in segments:
            batch = segment.advance(batch)
        for at, reply in zip(asked, batch, strict=True):
            written[at] += bytes(byte.value for byte in decoders[at].take(reply, seconds=0.01))
    return written


@pytest.fixture(scope="session")
def model() -> Callable[..., BlockModel]:
    return model_of


@pytest.fixture(scope="session")
def letters() -> BlockModel:
    return three_letters()


@pytest.fixture(scope="session")
def segments() -> Callable[..., list[Segment]]:
    return segments_of


@pytest.fixture(scope="session")
def write() -> Callable[..., list[bytes]]:
    return in_step


@pytest.fixture(params=[*OBJECTIVES])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def agreeing() -> LocalForward:
    """Its first segment drafts bytes that the whole model often accepts."""
    return LocalForward(*segments_of(three_letters(), [[0], [1]]))


@pytest.fixture
def stacked() -> LocalForward:
    return LocalForward(*segments_of(model_of("stacked"), [[0, 1], [2, 3]]))


@pytest.fixture
def local(kind: str) -> LocalForward:
    return LocalForward(*segments_of(model_of(kind), [[0, 1], [2, 3]]))


# Models with a tokenizer

WORDS = "Ein Fluß, zwei Flüsse – das Wasser fließt. Übermut tut selten gut, 你好 Wörter. " * 4
LEARNED_TOKENS = 310
THREE_TOKENS = (300, 301, 302)  # of the model whose outputs can be counted


@cache
def learned_tokenizer() -> Tokenizer:
    """Some of its tokens end in the middle of a character."""
    return learn_tokenizer(iter([WORDS]), LEARNED_TOKENS)


@cache
def token_model_of(kind: str) -> BlockModel:
    """As model_of, with a tokenizer."""
    return _with_opinions(_token_spec(preset("tiny").with_(objective=OBJECTIVES[kind])), WEIGHTS, seed=4)


@cache
def three_tokens() -> BlockModel:
    """Two blocks that nearly always write one of three tokens, and do not agree on which."""
    shape = {"width": 16, "heads": 2, "context": 16, "blocks": 2, "layers": 2}
    model = _with_opinions(_token_spec(RunSpec.model_validate({"model": shape})), None, seed=11)
    generator = torch.Generator().manual_seed(12)
    for block in model.blocks:
        block.gain.data.fill_(1.0)
        block.embedding.data.abs_()  # as in three_letters
        block.readout.data.zero_()
        block.readout.data[list(THREE_TOKENS)] = 1.8 + 0.3 * torch.randn(len(THREE_TOKENS), 16, generator=generator)
    return model


def _token_spec(spec: RunSpec) -> RunSpec:
    tokenizer = learned_tokenizer()
    facts = {"corpus.tokenizer": tokenizer.name, "corpus.tokenizer_sha256": tokenizer.sha256}
    return spec.with_(**facts, **{"model.vocabulary": tokenizer.vocabulary})


def _with_opinions(spec: RunSpec, weights: dict[str, Sequence[float]] | None, seed: int) -> BlockModel:
    model, generator = BlockModel(spec, weights), torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return learned_tokenizer()


@pytest.fixture(scope="session")
def token_model() -> Callable[[str], BlockModel]:
    return token_model_of


@pytest.fixture(scope="session")
def counted_model() -> BlockModel:
    return three_tokens()


@pytest.fixture(scope="session")
def token_segments() -> Callable[..., list[Segment]]:
    return partial(segments_of, tokenizer=learned_tokenizer())
