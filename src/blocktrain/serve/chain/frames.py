"""Frames: a message as bytes and back. One frame of JSON, and for a traversal a second one with its tokens and tensors
as safetensors. Everything is bounded and checked before it is used. No socket. Next: sockets.py sends frames."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from blocktrain.errors import FrameError, TensorError, foreign_bytes
from blocktrain.io.arrays import as_arrays, as_tensors
from blocktrain.model.kv_cache import TokenIds
from blocktrain.serve.chain.messages import (
    MAX_TOKENIZER_BYTES,
    PROTOCOL,
    Advance,
    Answer,
    Cancel,
    FetchTokenizer,
    Forget,
    Head,
    Hello,
    Passed,
    Refused,
    StageMessage,
    TokenizerFile,
    Welcome,
)
from blocktrain.serve.chain.sockets import MAX_PAYLOAD_BYTES
from blocktrain.serve.traversal import Traversal, Wire
from blocktrain.spec import NUM_SYMBOLS
from blocktrain.wire import safetensors

MAX_HEADER_BYTES = 2**17
MAX_TENSOR_HEADER_BYTES = 2**13  # of the second frame: a traversal has fewer than 20 tensors
SCALE = ".scale"  # suffix of the tensor beside an int8 tensor: one number per position
INT8_TOP = 127
HALF: Mapping[Wire, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}

TOKENS = {"prompt": 1, "tails": 2, "written": 1}  # tensor -> number of axes; uint8 if the tokens are bytes, or int32
FLOATS = {"prompt_state": 3, "tail_state": 3, "prompt_logits": 2, "tail_logits": 3}  # rounded as `wire` says
EXACT = {  # never rounded: they decide what is accepted
    "draft_log_likelihood": 1,
    "log_weights": 1,
}
ROWS = {"parents": 2}  # uint8: numbers of rows
AXES = {**TOKENS, **FLOATS, **EXACT, **ROWS}
_AS_DESCRIBED = "send what docs/serving.md describes"

_MESSAGE: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        Hello | Welcome | FetchTokenizer | TokenizerFile | Advance | Passed | Answer | Refused | Cancel | Forget,
        Field(discriminator="kind"),
    ]
)


def encode(message: StageMessage, payload: Traversal | bytes | None = None) -> list[bytes]:
    """`payload` is the message's traversal, or what payload_of has made of it."""
    header = message.model_dump_json().encode()
    if isinstance(message, TokenizerFile):
        return [header, message.file]
    if payload is None:
        return [header]
    return [header, payload_of(payload) if isinstance(payload, Traversal) else payload]


def payload_of(traversal: Traversal) -> bytes:
    """The second frame. Raises FrameError if it is larger than any stage accepts."""
    payload = _payload(traversal)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameError(
            f"the traversal has {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are accepted: send fewer rows, or "
            f"choose a smaller wire format"
        )
    return payload


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
    for name in ("tails", "parents"):
        if (rows := getattr(traversal, name)) is not None:
            tensors[name] = rows
    for name in FLOATS:
        if (x := getattr(traversal, name)) is not None:
            tensors |= _packed(name, x.float(), traversal.wire)
    for name in EXACT:
        if (x := getattr(traversal, name)) is not None:
            tensors[name] = _smallest_exact(x.float())
    return safetensors.encode(as_arrays(tensors))


def _packed(name: str, x: Tensor, wire: Wire) -> dict[str, Tensor]:
    """In the number format of the wire. A tensor with a value that half precision cannot hold stays float32."""
    if wire == "int8":
        q, scale = quantised(x)
        return {name: q, name + SCALE: scale} if scale.isfinite().all() else {name: x}
    half = x.to(HALF[wire]) if wire in HALF else x
    return {name: half if _finite(half) else x}


def _finite(x: Tensor) -> bool:
    """The sum is finite only if all values are; it takes a thirtieth of the time of testing each value, and no copy."""
    return math.isfinite(x.sum(dtype=torch.float32).item()) or bool(x.isfinite().all())


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
        message = _MESSAGE.validate_json(header)
    except ValidationError as error:
        _check_protocol(header)
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:100]
        raise FrameError(f"not a message of this protocol ({where}: {first['msg'][:200]}): {_AS_DESCRIBED}") from None
    if message.protocol != PROTOCOL or "protocol" not in message.model_fields_set:
        _check_protocol(header)
    return message


def _check_protocol(header: bytes) -> None:
    """Raises FrameError if it is another one: that explains everything else."""
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


def _traversal(head: Head, payload: bytes) -> Traversal:
    try:
        arrays, _ = safetensors.decode(payload, max_bytes=MAX_PAYLOAD_BYTES, max_header_bytes=MAX_TENSOR_HEADER_BYTES)
        tensors = as_tensors(arrays)
    except TensorError as error:
        raise FrameError(f"the second frame: {error}") from None
    values: dict[str, Any] = {name: _value(name, tensors) for name in AXES if name in tensors}
    if unknown := tensors.keys() - AXES.keys() - {name + SCALE for name in FLOATS}:
        raise FrameError(f'"{min(unknown)[:50]}" is not part of a traversal: {_AS_DESCRIBED}')
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
    if name in ROWS:
        if x.dtype != torch.uint8:
            raise FrameError(f'"{name}" holds {x.dtype} and uint8 is expected: {_AS_DESCRIBED}')
        return x
    if x.dtype == torch.int8 and scale is not None and scale.shape == x.shape[:-1] and scale.dtype == torch.float32:
        x = x.float() * scale[..., None]
    elif x.dtype not in (torch.float32, *HALF.values()) or scale is not None:
        raise FrameError(
            f'"{name}" holds {x.dtype}, with or without a scale: fp32, fp16, bf16 or scaled int8 is expected'
        )
    x = x.float()
    if not _finite(x):
        raise FrameError(f'"{name}" holds a value that is not finite: the weights of an earlier stage are damaged')
    return x


def _check_shapes(values: Mapping[str, Tensor]) -> None:
    """Tensors about the same rows have the same number of rows, and logits have one column per token: 256 if the tokens
    are bytes. Whether they fit the model's tokenizer is checked by those who know the model."""
    together = ("tails", "parents", "tail_state", "tail_logits")
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
