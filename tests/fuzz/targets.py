"""What is fuzzed: every parser of bytes that strangers send, with inputs to begin from. A target may return or raise
one of our errors; anything else is a defect, and so is what only the guard `errors.foreign_bytes` caught.
Next: fuzz.py, which runs them; test_corpus.py, which replays the kept inputs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
from pydantic import TypeAdapter, ValidationError
from uvicorn.server import ServerState

from blocktrain import errors
from blocktrain.cli.shared.gateway_client import read_event
from blocktrain.errors import BlockTrainError
from blocktrain.http.limits import HttpLimits
from blocktrain.http.protocol import BoundedProtocol
from blocktrain.serve.chain import frames
from blocktrain.serve.chain import messages as chain
from blocktrain.serve.gateway.openai import ApiError, CompletionRequest, api_error_of
from blocktrain.serve.gateway.validate import Limits, validate
from blocktrain.serve.traversal import Draft, ModelInfo, Traversal
from blocktrain.spec import RunSpec, preset
from blocktrain.wire import attached, messages, people_messages, safetensors
from blocktrain.wire.codecs.table import CODECS, make_codec
from blocktrain.wire.invite import parse_invite
from blocktrain.wire.recipes import Recipe, RecipeUpdate, read_recipe
from blocktrain.wire.updates import encode_update, read_update

MESSAGES = [
    each
    for each in {**vars(messages), **vars(people_messages)}.values()
    if isinstance(each, type) and issubclass(each, messages.Message)
]
ANY_MESSAGE: list[TypeAdapter[Any]] = [TypeAdapter(each) for each in MESSAGES]
SHAPES = {"0.a": (3, 5), "0.b": (7,)}
INFO = ModelInfo("tiny", "v", "stacked", 4, 64, 0, False)
TEXT = Traversal("s", b"It was the best", read=2, draft=Draft(4, candidates=2))
FRAMES_END = b"\xff\xfe--frame--\xfe\xff"  # separates the frames of one input


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]


def _update(data: bytes) -> None:
    update = read_update(data, SHAPES)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    update.squared_norm(zeros, zeros)


def _message(data: bytes) -> str:
    """FastAPI answers 422 to a ValidationError."""
    kinds = set()
    for adapter in ANY_MESSAGE:
        try:
            adapter.validate_json(data)
        except ValidationError as error:
            kinds.add(error.errors(include_url=False, include_input=False)[0]["type"])
    return " ".join(sorted(kinds))


def _spec(data: bytes) -> str:
    try:
        RunSpec.model_validate_json(data)
        return "accepted"
    except ValidationError as error:
        return error.errors(include_url=False, include_input=False)[0]["type"]


def _openai(data: bytes) -> None:
    try:
        asked = CompletionRequest.model_validate_json(data)
    except ValidationError as error:
        refusal = api_error_of(error.errors(include_url=False))
        refusal.reply().model_dump_json()
        raise refusal from None
    validate(asked, INFO, Limits(), fresh_seed=1)


def _sse(data: bytes) -> str:
    try:
        read_event(data.decode("utf-8", "replace"))
        return "accepted"
    except (ValueError, RecursionError) as error:
        return type(error).__name__  # the client says that this is no gateway


class _Transport(SimpleNamespace):
    """Takes what the protocol writes."""

    closing = False

    def get_extra_info(self, name: str) -> Any:
        return ("192.0.2.1", 1) if name in ("peername", "sockname") else None

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def write(self, data: bytes) -> None:
        self.written = data

    def nothing(self) -> int:
        return 0

    written = b""
    abort = close
    pause_reading = resume_reading = write_eof = get_write_buffer_size = can_write_eof = nothing


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.Future()


LOOP = asyncio.new_event_loop()
CONFIG = uvicorn.Config(_nothing, lifespan="off", ws="none", log_level="critical")
CONFIG.load()


def _http(data: bytes) -> str:
    """A connection that gets these bytes in pieces of various sizes; no request is ever answered."""
    asyncio.set_event_loop(LOOP)
    protocol = BoundedProtocol(CONFIG, ServerState(), HttpLimits(max_header_bytes=512, max_headers=10))
    protocol._start_asgi_task = lambda cycle, app: None  # type: ignore[method-assign]
    transport = _Transport()
    protocol.connection_made(transport)  # type: ignore[arg-type]
    at = 0
    while at < len(data) and not transport.is_closing():
        size = 1 + data[at] * 4
        protocol.data_received(data[at : at + size])
        protocol.check(float(at))
        at += size
    state = protocol._state()[0]
    protocol.connection_lost(None)
    return f"{transport.written[:12].decode()} {state} {len(protocol.pipeline)}"


def _updates() -> tuple[bytes, ...]:
    rng = np.random.default_rng(1)
    before, after = ({n: rng.normal(size=s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(2))
    return tuple(encode_update(before, after, make_codec(name)) for name in CODECS)


def _frames() -> tuple[bytes, ...]:
    advance = chain.Advance(
        id="x", attempt=1, version="v", reply_to="ab", route=("tcp://a:1",), time_left_s=1.0, head=chain.Head.of(TEXT)
    )
    welcome = chain.Welcome(
        id=1, instance="i", blocks=(0, 1), models=(chain.ServedModel.of(INFO, "d"),), waiting=0, limit=1, batch_s=0.0
    )
    sent = [
        frames.encode(advance, TEXT),
        frames.encode(welcome),
        frames.encode(chain.Hello(id=1)),
        frames.encode(chain.FetchTokenizer(sha256="0" * 64)),
        frames.encode(chain.TokenizerFile(sha256="0" * 64, file=b"{}")),
        frames.encode(advance, TEXT.with_(prompt=(1, 300, 70_000))),
        frames.encode(chain.Refused(code="failed", message="x")),
        frames.encode(chain.Passed(id="x", attempt=1, to="tcp://a:1", sent_bytes=1, waited_s=0, computed_s=0)),
    ]
    return tuple(FRAMES_END.join(frames) for frames in sent)


BLOB = messages.Blob(sha256="0" * 64, num_bytes=10)
LEASE = {
    "protocol": messages.PROTOCOL_VERSION,
    "nonce": 1,
    "worker": "0" * 64,
    "name": "w",
    "device": "cpu",
    "memory_bytes": 2**33,
    "steps_per_s": 1.0,
    "signature": messages.UNSIGNED,
}
NOTICE = {
    "lease": "1",
    "worker": "0" * 64,
    "tensors": {"0.a": [3, 5]},
    "payload": BLOB.model_dump(),
    "steps": 2,
    "tokens": 100,
    "loss": 5.0,
    "signature": messages.UNSIGNED,
}
GRANTED = messages.TrainLease(
    lease="1", phase=0, shard=0, step_start=0, steps=1, time_left_s=1.0, trained=(), below=(), ahead=()
)
COMPLETION = {"prompt": ["a", "b"], "max_tokens": 5, "n": 2, "stop": ["x"], "mode": "sweep", "candidates": 3, "seed": 1}
EVENT = {"choices": [{"text": "a", "index": 0}], "blocktrain": {"bytes_written": 3, "traversals": 1}}
REQUEST = b"POST /v1/updates HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\nContent-Length: 3\r\n\r\nabc"
CHUNKED = b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n3\r\nabc\r\n0\r\nA: b\r\n\r\n"
UPGRADE = b"GET /a?b#c HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"

TARGETS = {
    "safetensors": Target(
        lambda data: bool(safetensors.decode(data, max_bytes=2**20)),
        (safetensors.encode({"a": np.ones((2, 3), np.float32), "b": np.zeros(0, np.uint8)}, {"k": "v"}),),
    ),
    "updates": Target(_update, _updates()),
    "messages": Target(_message, tuple(json.dumps(each).encode() for each in (LEASE, NOTICE, BLOB.model_dump()))),
    "spec": Target(_spec, (preset("tiny").model_dump_json().encode(),)),
    "invite": Target(
        lambda data: bool(parse_invite(data.decode("utf-8", "replace"))),
        (b"bt://127.0.0.1:7000/#an-access-token-of-24", b"bts://[::1]:7000/" + b"a" * 64 + b"#an-access-token-of-24"),
    ),
    "recipes": Target(
        lambda data: bool(read_recipe(data)),
        (Recipe(blocks=(0, 1), updates=(RecipeUpdate(payload=BLOB, share=0.5),)).encode(),),
    ),
    "attached": Target(
        lambda data: bool(attached.read_attached(data)),
        (
            b"".join(
                attached.encode_attached(
                    GRANTED, [messages.Blob(sha256=hashlib.sha256(b"x").hexdigest(), num_bytes=1)], [b"x"]
                )
            ),
        ),
    ),
    "frames": Target(lambda data: type(frames.decode(data.split(FRAMES_END))[0]), _frames()),
    "openai": Target(_openai, (json.dumps(COMPLETION).encode(), b'{"prompt": "a", "stream": true}')),
    "sse": Target(
        _sse, (b"data: " + json.dumps(EVENT).encode(), b'data: {"error": {"message": "m"}}', b"data: [DONE]")
    ),
    "http": Target(_http, (REQUEST, CHUNKED, UPGRADE, REQUEST + CHUNKED, b"GET / HTTP/1.0\r\n\r\n")),
}


class Overlooked(BaseException):
    """A parser raised something else than our errors; the guard caught it."""


def run(target: Target, data: bytes) -> str:
    """Raises what is a defect. Returns in what kind of way the input was accepted or refused."""

    def overlooked(text: str) -> None:
        raise Overlooked(text)

    before, errors._overlooked.warning = errors._overlooked.warning, overlooked  # type: ignore[method-assign]
    try:
        return str(target.run(data))[:60]
    except (BlockTrainError, ApiError) as error:
        return re.sub(r'"[^"]*"|[^a-z ]', "", str(error))[:60]
    finally:
        errors._overlooked.warning = before  # type: ignore[method-assign]
