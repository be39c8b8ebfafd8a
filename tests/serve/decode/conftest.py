"""What the decoders' tests share: small models whose weights say something, in one process and cut into segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from blocktrain.model.stack import BlockModel
from blocktrain.serve.decode import Decoder
from blocktrain.serve.segment import LocalForward, Segment
from blocktrain.spec import Denoise, EndToEnd, RunSpec, Stacked, preset

OBJECTIVES = {
    "stacked": Stacked(),
    "end_to_end": EndToEnd(),
    "spans": Denoise(span_share=0.25),
    "closed": Denoise(evidence="closed"),
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
            written[at] += bytes(byte.value for byte in decoders[at].tell(reply, seconds=0.01))
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
