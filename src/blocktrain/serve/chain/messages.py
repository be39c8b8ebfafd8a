"""The messages between a gateway and stages, as frozen models whose every field is bounded. No socket. Next: frames.py
turns them into bytes and back; dispatch.py and stage.py decide what to send. docs/serving.md describes the protocol."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from blocktrain.data.tokenizer import Tokenizer
from blocktrain.serve.traversal import (
    BlockIndex,
    Count,
    Draft,
    ModelInfo,
    Name,
    Noise,
    Piece,
    Seconds,
    StageTiming,
    Traversal,
    Verify,
    Weigh,
    Wire,
)
from blocktrain.settings import MAX_VOCABULARY
from blocktrain.spec import NUM_SYMBOLS

PROTOCOL = 5
WIRES: tuple[Wire, ...] = ("fp32", "fp16", "bf16", "int8")
MAX_TOKENIZER_BYTES = 2**26

Address = Annotated[str, Field(pattern=r"^tcp://[^\s/]+:\d{1,5}$", max_length=300)]
Identity = Annotated[str, Field(pattern="^([0-9a-f]{2}){1,32}$")]  # a ZeroMQ routing id, in hexadecimal
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Code = Literal["overloaded", "cache_miss", "version", "expired", "unreachable", "bad_request", "failed", "malformed"]


class ServedModel(BaseModel):
    """A version of a model of which a stage holds some blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(max_length=200)
    version: Name
    objective: Literal["stacked", "denoise", "end_to_end"]
    blocks: Annotated[int, Field(ge=1, le=4096)]  # how many the whole model has
    context: Annotated[int, Field(ge=1, lt=2**31)]
    longest_sweep: Count
    survives_loss: bool
    vocabulary: Annotated[int, Field(ge=2, le=MAX_VOCABULARY)] = NUM_SYMBOLS
    tokenizer_sha256: Sha256 | None = None  # of the tokenizer's file; None for a model on bytes
    spec_digest: Name

    @classmethod
    def of(cls, info: ModelInfo, spec_digest: str) -> ServedModel:
        facts = {name: value for name, value in vars(info).items() if name != "tokenizer"}
        return cls(**facts, tokenizer_sha256=info.tokenizer.sha256, spec_digest=spec_digest)

    def info(self, tokenizer: Tokenizer) -> ModelInfo:
        return ModelInfo(**self.model_dump(exclude={"spec_digest", "tokenizer_sha256"}), tokenizer=tokenizer)


class Head(BaseModel):
    """All of a Traversal except its tokens and tensors, which are in the second frame."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    session: Name
    start: Count
    read: Count
    draft: Draft | None
    weigh: Weigh | None
    verify: Verify | None
    piece: Piece | None
    noise: Noise | None
    missing: tuple[BlockIndex, ...]
    wire: Wire
    degraded: bool
    trace: Annotated[tuple[StageTiming, ...], Field(max_length=256)]

    @classmethod
    def of(cls, traversal: Traversal) -> Head:
        return cls.model_validate({name: getattr(traversal, name) for name in cls.model_fields})


class StageMessage(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    protocol: Annotated[int, Field(ge=0, lt=2**31, strict=True)] = PROTOCOL


class Hello(StageMessage):
    """Asks a stage what it holds. Sent first, and then as the heartbeat."""

    kind: Literal["hello"] = "hello"
    id: Count


class Welcome(StageMessage):
    """The answer to Hello."""

    kind: Literal["welcome"] = "welcome"
    id: Count
    instance: Name  # changes with every start of the stage
    blocks: Annotated[tuple[BlockIndex, ...], Field(min_length=1, max_length=4096)]
    models: Annotated[tuple[ServedModel, ...], Field(min_length=1, max_length=16)]  # the newest first
    wires: tuple[str, ...] = WIRES
    waiting: Count  # traversals
    limit: Count
    batch_s: Seconds  # smoothed time of one batch


class FetchTokenizer(StageMessage):
    """Asks a stage for the file of a tokenizer, which `welcome` named by its hash."""

    kind: Literal["fetch_tokenizer"] = "fetch_tokenizer"
    sha256: Sha256


class TokenizerFile(StageMessage):
    """The answer to FetchTokenizer. The file is the second frame; it is empty if the stage does not have it."""

    kind: Literal["tokenizer_file"] = "tokenizer_file"
    sha256: Sha256
    file: Annotated[bytes, Field(max_length=MAX_TOKENIZER_BYTES, exclude=True)] = b""


class Advance(StageMessage):
    """Asks a stage to advance a traversal and to pass it on to the first address of `route`. If the route is empty, the
    stage sends an Answer to `reply_to`. All attempts of one traversal have the same id."""

    kind: Literal["advance"] = "advance"
    id: Name
    attempt: Count
    version: Name
    reply_to: Identity
    route: Annotated[tuple[Address, ...], Field(max_length=256)]
    time_left_s: Seconds  # a span, since clocks differ
    head: Head


class Passed(StageMessage):
    """Tells the gateway that a stage has advanced a traversal and passed it on."""

    kind: Literal["passed"] = "passed"
    id: Name
    attempt: Count
    to: Address
    sent_bytes: Count
    waited_s: Seconds
    computed_s: Seconds


class Answer(StageMessage):
    """The finished traversal, from the last stage to the gateway."""

    kind: Literal["answer"] = "answer"
    id: Name
    attempt: Count
    head: Head


class Refused(StageMessage):
    """A traversal could not be advanced, or a message could not be read (then `id` is empty)."""

    kind: Literal["refused"] = "refused"
    id: Annotated[str, Field(max_length=200)] = ""
    attempt: Count = 0
    code: Code
    message: str = Field(max_length=2000)
    retry_after_s: Seconds = 0
    start: Count = 0  # of a cache miss: how many positions were expected
    have: Count = 0  # and how many are cached
    culprit: str = Field(default="", max_length=300)  # the address that could not be reached


class Cancel(StageMessage):
    """The gateway no longer waits for this traversal."""

    kind: Literal["cancel"] = "cancel"
    id: Name


class Forget(StageMessage):
    """The session is over: free its KV caches and drop its traversals."""

    kind: Literal["forget"] = "forget"
    session: Name
