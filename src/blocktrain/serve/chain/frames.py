"""Messages <-> the frames that travel: one of JSON, and for a traversal a second one with its bytes and tensors as
safetensors. Bounded and checked before anything is built; no socket. Next: stage.py and pipeline.py send them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from blocktrain.errors import FrameError, TensorError
from blocktrain.io.arrays import as_arrays, as_tensors
from blocktrain.serve.chain.messages import PROTOCOL, AnyMessage, Head, Message
from blocktrain.serve.traversal import Draft, Hop, Noise, Piece, Traversal, Weigh, Wire
from blocktrain.spec import NUM_SYMBOLS
from blocktrain.wire import safetensors as wire_tensors

MAX_HEADER_BYTES = 2**17
MAX_PAYLOAD_BYTES = 2**28
SCALE = ".scale"  # beside an int8 tensor: one number a position
INT8_TOP = 127

BYTES = {"prompt": 1, "tails": 2, "written": 1}  # name -> axes
FLOATS = {"prompt_state": 3, "tail_state": 3, "prompt_logits": 2, "tail_logits": 3}  # as `wire` says
EXACT = {  # what was drawn from decides what is accepted
    "draft_prompt_logits": 1,
    "draft_tail_logits": 3,
    "draft_log_likelihood": 1,
    "shares": 1,
}
AXES = {**BYTES, **FLOATS, **EXACT}
PARTS: dict[str, type[Draft | Weigh | Piece | Noise]] = {
    "draft": Draft,
    "weigh": Weigh,
    "piece": Piece,
    "noise": Noise,
}
STATES = ("prompt_state", "tail_state")
HALF: Mapping[Wire, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}

_MESSAGE: TypeAdapter[Any] = TypeAdapter(AnyMessage)


def encode(message: Message, traversal: Traversal | None = None) -> list[bytes]:
    header = message.model_dump_json().encode()
    if traversal is None:
        return [header]
    payload = _payload(traversal)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise FrameError(
            f"a traversal of {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are accepted: send fewer rows, or a "
            f"smaller wire format"
        )
    return [header, payload]


def decode(frames: Sequence[bytes]) -> tuple[Any, Traversal | None]:
    """The message, and the traversal where it carries one; FrameError says what is wrong with anything else."""
    if not 1 <= len(frames) <= 2:
        raise FrameError(f"a message has 1 or 2 frames, got {len(frames)}: {_SPEAK}")
    message = _message(frames[0])
    head: Head | None = getattr(message, "head", None)
    if (head is None) == (len(frames) == 2):
        raise FrameError(f'a "{message.kind}" came with {len(frames)} frames: {_SPEAK}')
    return message, _traversal(head, frames[1]) if head else None


def head_of(traversal: Traversal) -> Head:
    t = traversal
    parts = {name: asdict(part) if (part := getattr(t, name)) else None for name in PARTS}
    trace = [asdict(hop) for hop in t.trace]
    plain = {name: getattr(t, name) for name in ("session", "start", "read", "missing", "wire", "degraded")}
    return Head.model_validate({**plain, **parts, "trace": trace})


def without_states(traversal: Traversal) -> Traversal:
    """What goes back to the gateway: only blocks read states."""
    return traversal.with_(prompt_state=None, tail_state=None)


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 and the scale of each position (the last axis): x ≈ q · scale, off by at most half a scale."""
    scale = x.abs().amax(-1) / INT8_TOP
    q = (x / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round()
    return q.to(torch.int8), scale


def _payload(traversal: Traversal) -> bytes:
    tensors: dict[str, Tensor] = {}
    for name in ("prompt", "written"):
        if (data := getattr(traversal, name)) is not None:
            tensors[name] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else _nothing()
    if traversal.tails is not None:
        tensors["tails"] = traversal.tails.to(torch.uint8)
    for name in FLOATS:
        if (x := getattr(traversal, name)) is not None:
            tensors |= _packed(name, x.detach().float(), traversal.wire)
    for name in EXACT:
        if (x := getattr(traversal, name)) is not None:
            tensors[name] = _smallest_exact(x.detach().float())
    return wire_tensors.encode(as_arrays(tensors))


def _packed(name: str, x: Tensor, wire: Wire) -> dict[str, Tensor]:
    """As few bytes as the wire says; a value that half precision cannot hold makes the tensor travel whole."""
    if wire == "int8":
        q, scale = quantised(x)
        return {name: q, name + SCALE: scale} if scale.isfinite().all() else {name: x}
    half = x.to(HALF[wire]) if wire in HALF else x
    return {name: half if _finite(half) else x}


def _finite(x: Tensor) -> bool:
    """A sum is finite only where all of it is, and takes a thirtieth of the time of looking at each."""
    return bool(x.float().sum().isfinite()) or bool(x.isfinite().all())


def _smallest_exact(x: Tensor) -> Tensor:
    half = x.half()
    return half if torch.equal(half.float(), x) else x


def _nothing() -> Tensor:
    return torch.zeros(0, dtype=torch.uint8)


def _message(header: bytes) -> Any:
    if len(header) > MAX_HEADER_BYTES:
        raise FrameError(f"a header of {len(header)} bytes, at most {MAX_HEADER_BYTES} are accepted: {_SPEAK}")
    try:
        table = json.loads(header)
    except (ValueError, RecursionError):
        raise FrameError(f"the first frame is not JSON: {_SPEAK}") from None
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
        raise FrameError(f"not a message of this protocol ({where}: {first['msg'][:200]}): {_SPEAK}") from None


def _traversal(head: Head, payload: bytes) -> Traversal:
    try:
        tensors = as_tensors(wire_tensors.decode(payload, max_bytes=MAX_PAYLOAD_BYTES)[0])
    except TensorError as error:
        raise FrameError(f"the second frame: {error}") from None
    values: dict[str, Any] = {name: _value(name, tensors) for name in AXES if name in tensors}
    if unknown := tensors.keys() - AXES.keys() - {name + SCALE for name in FLOATS}:
        raise FrameError(f'"{min(unknown)[:50]}" is no part of a traversal: {_SPEAK}')
    if "prompt" not in values:
        raise FrameError(f"a traversal without a prompt: {_SPEAK}")
    _check_shapes(values)
    for name in ("prompt", "written"):
        if name in values:
            values[name] = bytes(values[name].numpy())
    plain = {name: getattr(head, name) for name in ("session", "start", "read", "missing", "wire", "degraded")}
    parts: dict[str, Any] = {
        name: kind(**vars(part)) if (part := getattr(head, name)) else None for name, kind in PARTS.items()
    }
    return Traversal(
        **plain,
        **parts,
        trace=tuple(Hop(**vars(hop)) for hop in head.trace),
        **values,
    )


def _value(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    x, scale = tensors[name], tensors.get(name + SCALE)
    if x.dim() != AXES[name]:
        raise FrameError(f'"{name}" has {x.dim()} axes and {AXES[name]} are expected: {_SPEAK}')
    if name in BYTES:
        if x.dtype != torch.uint8:
            raise FrameError(f'"{name}" holds {x.dtype} and bytes are expected: {_SPEAK}')
        return x
    if x.dtype == torch.int8 and scale is not None and scale.shape == x.shape[:-1] and scale.dtype == torch.float32:
        x = x.float() * scale[..., None]
    elif x.dtype not in (torch.float32, *HALF.values()) or scale is not None:
        raise FrameError(f'"{name}" holds {x.dtype}, with a scale or without: fp32, fp16, bf16 or scaled int8 expected')
    if not _finite(x):
        raise FrameError(f'"{name}" holds a value that is not finite: the weights of an earlier stage are damaged')
    return x.float()


def _check_shapes(values: Mapping[str, Tensor]) -> None:
    """What belongs to the same rows has as many of them, and logits are over bytes."""
    together = ("tails", "tail_state", "tail_logits", "draft_tail_logits")
    rows = {tuple(values[name].shape[:2]) for name in together if name in values}
    if (likelihood := values.get("draft_log_likelihood")) is not None and "tails" in values:
        rows.add((len(likelihood), values["tails"].size(1)))
    if len(rows) > 1 or (rows and "tails" not in values):
        raise FrameError(f"tails and what belongs to them have rows and lengths {sorted(rows)}: {_SPEAK}")
    for name in values:
        if name.endswith("logits") and values[name].shape[-1] != NUM_SYMBOLS:
            raise FrameError(f'"{name}" has {values[name].shape[-1]} columns and {NUM_SYMBOLS} are expected: {_SPEAK}')


_SPEAK = "send what docs/serving.md describes"
