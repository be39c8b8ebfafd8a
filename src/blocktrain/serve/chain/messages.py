"""What a gateway and stages say to each other: small frozen models, nothing else. Tensors never travel in here, only
what is done with them. Next: frames.py makes bytes of these; docs/serving.md tells them to other languages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from blocktrain.serve.traversal import ModelInfo, Wire

PROTOCOL = 2
WIRES: tuple[Wire, ...] = ("fp32", "fp16", "bf16", "int8")

Name = Annotated[str, Field(min_length=1, max_length=200)]
Address = Annotated[str, Field(pattern=r"^tcp://[^\s/]+:\d{1,5}$", max_length=300)]
Identity = Annotated[str, Field(pattern="^([0-9a-f]{2}){1,32}$")]  # a ZeroMQ routing id, in hexadecimal
Count = Annotated[int, Field(ge=0, lt=2**31)]
Block = Annotated[int, Field(ge=0, lt=2**20)]
Seconds = Annotated[float, Field(ge=0, le=1e7)]
Code = Literal["overloaded", "cache_miss", "version", "expired", "unreachable", "bad_request", "failed", "malformed"]


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    protocol: int = PROTOCOL


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Served(Part):
    """A version of the model that a stage holds its blocks of."""

    name: str = Field(max_length=200)
    version: Name
    objective: Literal["stacked", "denoise", "end_to_end"]
    blocks: Block
    context: Count
    longest_sweep: Count
    survives_loss: bool
    spec_digest: Name

    @classmethod
    def of(cls, info: ModelInfo, spec_digest: str) -> Served:
        return cls(**vars(info), spec_digest=spec_digest)

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(**self.model_dump(exclude={"spec_digest"}))


class Hello(Message):
    """Who are you, are you well? Asked at first and then as the heartbeat."""

    kind: Literal["hello"] = "hello"
    id: Count


class Welcome(Message):
    kind: Literal["welcome"] = "welcome"
    id: Count
    instance: Name  # another after a restart
    blocks: Annotated[tuple[Block, ...], Field(min_length=1, max_length=4096)]
    models: Annotated[tuple[Served, ...], Field(min_length=1, max_length=16)]  # the newest first
    wires: tuple[str, ...] = WIRES
    waiting: Count  # traversals
    limit: Count
    batch_s: Seconds  # how long a batch takes of late


class DraftPart(Part):
    length: Annotated[int, Field(ge=0, le=2**16)]
    candidates: Annotated[int, Field(ge=1, le=4096)]
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    temperature: Annotated[float, Field(ge=0, le=1e6)]
    top_p: Annotated[float, Field(ge=0, le=1)]
    offset: Count


class WeighPart(Part):
    temperature: Annotated[float, Field(ge=0, le=1e6)]
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]
    offset: Count


class PiecePart(Part):
    stream: Name
    first: Count
    total: Annotated[int, Field(ge=1, le=2**16)]


class NoisePart(Part):
    length: Annotated[int, Field(ge=1, le=2**16)]
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)]


class HopPart(Part):
    stage: str = Field(max_length=300)
    blocks: tuple[Block, ...]
    queued_s: Seconds
    computed_s: Seconds
    drafted_s: Seconds


class Head(Part):
    """All of a Traversal but its bytes and tensors, which are the second frame."""

    session: Name
    start: Count
    read: Count
    draft: DraftPart | None
    weigh: WeighPart | None
    piece: PiecePart | None
    noise: NoisePart | None
    missing: tuple[Block, ...]
    wire: Wire
    degraded: bool
    trace: Annotated[tuple[HopPart, ...], Field(max_length=256)]


class Walk(Message):
    """A traversal on its way: advance it, hand it to the first address of `route`, or else answer `reply_to`."""

    kind: Literal["walk"] = "walk"
    id: Name
    attempt: Count
    version: Name
    reply_to: Identity
    route: Annotated[tuple[Address, ...], Field(max_length=256)]
    expires_s: Seconds  # from now: clocks differ
    head: Head


class Passed(Message):
    """A stage has done its part of a walk and handed it on."""

    kind: Literal["passed"] = "passed"
    id: Name
    attempt: Count
    to: Address
    sent_bytes: Count
    waited_s: Seconds
    computed_s: Seconds


class Answer(Message):
    """The end of a walk."""

    kind: Literal["answer"] = "answer"
    id: Name
    attempt: Count
    head: Head


class Refused(Message):
    """The end of a walk that could not be done, or of a message that could not be read."""

    kind: Literal["refused"] = "refused"
    id: Annotated[str, Field(max_length=200)] = ""
    attempt: Count = 0
    code: Code
    message: str = Field(max_length=2000)
    retry_after_s: Seconds = 0
    start: Count = 0  # of a cache miss: expected
    have: Count = 0  # and there
    culprit: str = Field(default="", max_length=300)  # the address that could not be reached


class Cancel(Message):
    """Nobody waits for this walk any more."""

    kind: Literal["cancel"] = "cancel"
    id: Name


class Forget(Message):
    """The session is over: free its caches, drop its walks."""

    kind: Literal["forget"] = "forget"
    session: Name


AnyMessage = Annotated[
    Hello | Welcome | Walk | Passed | Answer | Refused | Cancel | Forget, Field(discriminator="kind")
]
