"""The messages between a gateway and stages, and the frames that carry them: one frame of JSON, and for a traversal a
second one with its tokens and tensors as safetensors. Everything is bounded and checked before it is used. No socket.
Next: sockets.py sends frames; dispatch.py and stage.py decide what to send. docs/serving.md describes the protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from blocktrain.data.tokenizer import Tokenizer
from blocktrain.errors import FrameError, TensorError, foreign_bytes
from blocktrain.io.arrays import as_arrays, as_tensors
from blocktrain.model.kv_cache import TokenIds
from blocktrain.serve.chain.sockets import MAX_PAYLOAD_BYTES
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
    Weigh,
    Wire,
)
from blocktrain.settings import MAX_VOCABULARY
from blocktrain.spec import NUM_SYMBOLS
from blocktrain.wire import safetensors

PROTOCOL = 4
WIRES: tuple[Wire, ...] = ("fp32", "fp16", "bf16", "int8")
MAX_HEADER_BYTES = 2**17
MAX_TENSOR_HEADER_BYTES = 2**13  # of the second frame: a traversal has fewer than 20 tensors
SCALE = ".scale"  # suffix of the tensor beside an int8 tensor: one number per position
INT8_TOP = 127
HALF: Mapping[Wire, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}

MAX_TOKENIZER_BYTES = 2**26

TOKENS = {"prompt": 1, "tails": 2, "written": 1}  # tensor -> number of axes; uint8 if the tokens are bytes, or int32
FLOATS = {"prompt_state": 3, "tail_state": 3, "prompt_logits": 2, "tail_logits": 3}  # rounded as `wire` says
EXACT = {  # never rounded: they decide what is accepted
    "draft_prompt_logits": 1,
    "draft_tail_logits": 3,
    "draft_log_likelihood": 1,
    "shares": 1,
}
AXES = {**TOKENS, **FLOATS, **EXACT}

Address = Annotated[str, Field(pattern=r"^tcp://[^\s/]+:\d{1,5}$", max_length=300)]
Identity = Annotated[str, Field(pattern="^([0-9a-f]{2}){1,32}$")]  # a ZeroMQ routing id, in hexadecimal
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Code = Literal["overloaded", "cache_miss", "version", "expired", "unreachable", "bad_request", "failed", "malformed"]
_AS_DESCRIBED = "send what docs/serving.md describes"


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

    protocol: Count = PROTOCOL


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


_MESSAGE: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        Hello | Welcome | FetchTokenizer | TokenizerFile | Advance | Passed | Answer | Refused | Cancel | Forget,
        Field(discriminator="kind"),
    ]
)


def encode(message: StageMessage, traversal: Traversal | None = None) -> list[bytes]:
    header = message.model_dump_json().encode()
    if isinstance(message, TokenizerFile):
        return [header, message.file]
    if traversal is None:
        return [header]
    payload = _payload(traversal)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameError(
            f"the traversal has {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are accepted: send fewer rows, or "
            f"choose a smaller wire format"
        )
    return [header, payload]


def decode(frames: Sequence[bytes]) -> tuple[Any, Traversal | None]:
    """The message, and its traversal if it carries one. Raises FrameError for anything else."""
    with foreign_bytes(FrameError, "the message"):
        return _decode(frames)


def _decode(frames: Sequence[bytes]) -> tuple[Any, Traversal | None]:
    if not 1 <= len(frames) <= 2:
        raise FrameError(f"a message has 1 or 2 frames, got {len(frames)}: {_AS_DESCRIBED}")
    message = _message(frames[0])
    head: Head | None = getattr(message, "head", None)
    has_file = isinstance(message, TokenizerFile)
    if (head is not None or has_file) != (len(frames) == 2):
        raise FrameError(f'a "{message.kind}" message came with {len(frames)} frames: {_AS_DESCRIBED}')
    if has_file:
        return _with_file(message, frames[1]), None
    return message, _traversal(head, frames[1]) if head else None


def _with_file(message: TokenizerFile, file: bytes) -> TokenizerFile:
    if len(file) > MAX_TOKENIZER_BYTES or message.file:
        accepted = f"at most {MAX_TOKENIZER_BYTES} are accepted"
        raise FrameError(f"a tokenizer of {len(file)} bytes, {accepted}: {_AS_DESCRIBED}")
    return message.model_copy(update={"file": bytes(file)})


def without_states(traversal: Traversal) -> Traversal:
    """What goes back to the gateway: only blocks read states."""
    return traversal.with_(prompt_state=None, tail_state=None)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values and the scale of each position (last axis): x ≈ q · scale, with an error of at most half a scale."""
    scale = x.abs().amax(-1) / INT8_TOP
    q = (x / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round()
    return q.to(torch.int8), scale


def _payload(traversal: Traversal) -> bytes:
    tensors: dict[str, Tensor] = {}
    for name in ("prompt", "written"):
        if (data := getattr(traversal, name)) is not None:
            tensors[name] = _tokens(data)
    if traversal.tails is not None:
        tensors["tails"] = traversal.tails
    for name in FLOATS:
        if (x := getattr(traversal, name)) is not None:
            tensors |= _packed(name, x.detach().float(), traversal.wire)
    for name in EXACT:
        if (x := getattr(traversal, name)) is not None:
            tensors[name] = _smallest_exact(x.detach().float())
    return safetensors.encode(as_arrays(tensors))


def _packed(name: str, x: Tensor, wire: Wire) -> dict[str, Tensor]:
    """In the number format of the wire. A tensor with a value that half precision cannot hold stays float32."""
    if wire == "int8":
        q, scale = quantised(x)
        return {name: q, name + SCALE: scale} if scale.isfinite().all() else {name: x}
    half = x.to(HALF[wire]) if wire in HALF else x
    return {name: half if _finite(half) else x}


def _finite(x: Tensor) -> bool:
    """The sum is finite only if all values are; it takes a thirtieth of the time of testing each value."""
    return bool(x.float().sum().isfinite()) or bool(x.isfinite().all())


def _smallest_exact(x: Tensor) -> Tensor:
    half = x.half()
    return half if torch.equal(half.float(), x) else x


def _tokens(data: TokenIds) -> Tensor:
    if not isinstance(data, bytes):
        return torch.tensor(data, dtype=torch.int32)
    empty = torch.zeros(0, dtype=torch.uint8)  # frombuffer refuses an empty buffer
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else empty


def _message(header: bytes) -> Any:
    if len(header) > MAX_HEADER_BYTES:
        accepted = f"at most {MAX_HEADER_BYTES} are accepted"
        raise FrameError(f"the header has {len(header)} bytes, {accepted}: {_AS_DESCRIBED}")
    try:
        table = json.loads(header)
    except (ValueError, RecursionError):
        raise FrameError(f"the first frame is not JSON: {_AS_DESCRIBED}") from None
    protocol = table.get("protocol") if isinstance(table, dict) else None
    if protocol != PROTOCOL:
        shown = protocol if isinstance(protocol, int) else "none"
        raise FrameError(
            f"protocol {shown}, this side speaks {PROTOCOL}: install the same version of blocktrain on all hosts"
        )
    try:
        return _MESSAGE.validate_json(header)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:100]
        raise FrameError(f"not a message of this protocol ({where}: {first['msg'][:200]}): {_AS_DESCRIBED}") from None


def _traversal(head: Head, payload: bytes) -> Traversal:
    try:
        arrays, _ = safetensors.decode(payload, max_bytes=MAX_PAYLOAD_BYTES, max_header_bytes=MAX_TENSOR_HEADER_BYTES)
        tensors = as_tensors(arrays)
    except TensorError as error:
        raise FrameError(f"the second frame: {error}") from None
    values: dict[str, Any] = {name: _value(name, tensors) for name in AXES if name in tensors}
    if unknown := tensors.keys() - AXES.keys() - {name + SCALE for name in FLOATS}:
        raise FrameError(f'"{min(unknown)[:50]}" is no part of a traversal: {_AS_DESCRIBED}')
    if "prompt" not in values:
        raise FrameError(f"a traversal without a prompt: {_AS_DESCRIBED}")
    _check_shapes(values)
    for name in ("prompt", "written"):
        if name in values:
            on_bytes = values[name].dtype == torch.uint8
            values[name] = bytes(values[name].numpy()) if on_bytes else tuple(values[name].tolist())
    return Traversal(**{name: getattr(head, name) for name in Head.model_fields}, **values)


def _value(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    x, scale = tensors[name], tensors.get(name + SCALE)
    if x.dim() != AXES[name]:
        raise FrameError(f'"{name}" has {x.dim()} axes and {AXES[name]} are expected: {_AS_DESCRIBED}')
    if name in TOKENS:
        expected = tensors["prompt"].dtype if "prompt" in tensors else torch.uint8
        if x.dtype != (expected if expected == torch.int32 else torch.uint8):
            raise FrameError(f'"{name}" holds {x.dtype} and bytes are expected: {_AS_DESCRIBED}')
        return x
    if x.dtype == torch.int8 and scale is not None and scale.shape == x.shape[:-1] and scale.dtype == torch.float32:
        x = x.float() * scale[..., None]
    elif x.dtype not in (torch.float32, *HALF.values()) or scale is not None:
        raise FrameError(
            f'"{name}" holds {x.dtype}, with or without a scale: fp32, fp16, bf16 or scaled int8 is expected'
        )
    if not _finite(x):
        raise FrameError(f'"{name}" holds a value that is not finite: the weights of an earlier stage are damaged')
    return x.float()


def _check_shapes(values: Mapping[str, Tensor]) -> None:
    """Tensors about the same rows have the same number of rows, and logits have one column per token: 256 if the tokens
    are bytes. Whether they fit the model's tokenizer is checked by those who know the model."""
    together = ("tails", "tail_state", "tail_logits", "draft_tail_logits")
    rows = {tuple(values[name].shape[:2]) for name in together if name in values}
    if (likelihood := values.get("draft_log_likelihood")) is not None and "tails" in values:
        rows.add((len(likelihood), values["tails"].size(1)))
    if len(rows) > 1 or (rows and "tails" not in values):
        raise FrameError(f"tails and what belongs to them have rows and lengths {sorted(rows)}: {_AS_DESCRIBED}")
    columns = {name: values[name].shape[-1] for name in values if name.endswith("logits")}
    expected = NUM_SYMBOLS if values["prompt"].dtype == torch.uint8 else next(iter(columns.values()), 0)
    for name, number in columns.items():
        if number != expected:
            raise FrameError(f'"{name}" has {number} columns and {expected} are expected: {_AS_DESCRIBED}')
