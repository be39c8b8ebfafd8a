"""The messages and errors of OpenAI's completions API. A token is a byte, unless the model has a tokenizer. What a
request may ask of this model is checked elsewhere. Next: validate.py, which checks it; app.py, the routes."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from blocktrain.errors import BlockTrainError
from blocktrain.serve.decode.request import MAX_CANDIDATES
from blocktrain.wire.messages import Message

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256
MAX_LOGPROBS = 5
MAX_TEMPERATURE = 2.0
MAX_MESSAGE_CHARACTERS = 1000
MAX_SIMULATED_RTT_MS = 1000
ModeName = Literal["speculative", "sweep", "autoregressive"]
ErrorType = Literal["invalid_request_error", "authentication_error", "rate_limit_error", "server_error"]
TYPE_OF_STATUS: dict[int, ErrorType] = {401: "authentication_error", 429: "rate_limit_error"}

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class StreamOptions(Message):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # ignored: nothing is padded here


class CompletionRequest(Message):
    """OpenAI's fields, then three of our own. Null means the default."""

    model_config = ConfigDict(strict=True)

    model: str | None = None  # the gateway serves one model, so the name is optional
    prompt: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, lt=2**53)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    user: str | None = None  # ignored
    # of these, only the defaults are accepted
    suffix: str | None = None
    best_of: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # ours
    mode: ModeName | None = None
    candidates: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] | None = None
    simulated_rtt_ms: Annotated[int, Field(ge=0, le=MAX_SIMULATED_RTT_MS)] | None = None  # between hosts


class Effort(Message):
    """What the texts cost. Our addition to OpenAI's fields."""

    mode: ModeName
    seed: int  # the same request with this seed gives the same text
    tokens_written: int
    bytes_written: int
    traversals: int
    bytes_per_traversal: float
    seconds: float
    first_byte_s: float | None
    drafted: int
    accepted: int
    exact: int  # tokens that were drawn from the whole model's own distribution
    degraded: bool  # a stage was missing
    prompt_bytes_unread: int  # the most bytes at the start of a prompt that were not read: the model reads the end


class Logprobs(Message):
    """A token is written as its text, or as "bytes:\\xe2" if it is not whole characters. Offsets count characters."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token, which has nothing before it
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Choice(Message):
    text: str
    index: int
    logprobs: Logprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None  # null: more will come


class Usage(Message):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(Message):
    """The answer; in a stream, each part of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str  # the version of the blocks
    choices: list[Choice]
    usage: Usage | None = None
    blocktrain: Effort


class ModelCard(Message):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["blocktrain"] = "blocktrain"
    version: str
    objective: str
    blocks: int
    context: int  # tokens that the model reads: of a longer prompt, the end
    longest_sweep: int
    max_tokens: int
    max_choices: int
    modes: list[ModeName]
    tokenizer: Literal["bytes", "bpe"]  # what a token is
    vocabulary: int


class ModelList(Message):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(Message):
    status: Literal["ok", "degraded", "unavailable"]
    model: str | None
    version: str | None
    reasons: list[str]


class ErrorDetail(Message):
    message: str
    type: ErrorType
    param: str | None = None
    code: str | None = None


class ErrorReply(Message):
    error: ErrorDetail


class ApiError(BlockTrainError):
    """An error as the client gets it. `code` is for programs; with `retry_after_s`, trying again later may help."""

    def __init__(
        self, status: int, message: str, code: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s

    def reply(self) -> ErrorReply:
        """A message may quote what the client sent, so it is shortened and made encodable as UTF-8."""
        message = str(self)[:MAX_MESSAGE_CHARACTERS].encode("utf-8", "replace").decode()
        kind = TYPE_OF_STATUS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return ErrorReply(error=ErrorDetail(message=message, type=kind, param=self.param, code=self.code))


def api_error_of(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """pydantic's errors about a request, as one sentence about the first of them."""
    first = errors[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON ({first['ctx']['error']}): send a JSON object", "invalid_json")
    if not path:
        return ApiError(400, "the body is not a JSON object: send one with the fields of a completion", "invalid_json")
    param = path[0]
    if first["type"] == "extra_forbidden":
        return _unknown_field(path)
    return ApiError(400, _bad_value(param, path, first), "invalid_value", param=param)


def request_schema() -> dict[str, Any]:
    """The JSON schema of a request, without references."""
    schema = CompletionRequest.model_json_schema()
    options = schema.pop("$defs")["StreamOptions"]
    schema["properties"]["stream_options"]["anyOf"][0] = options
    return schema


def _unknown_field(path: Sequence[str]) -> ApiError:
    known: type[BaseModel] = StreamOptions if path[0] == "stream_options" else CompletionRequest
    near = difflib.get_close_matches(path[-1], known.model_fields, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(known.model_fields)}"
    name = ".".join(path)[:80]
    return ApiError(400, f"unknown field {name}: {hint}", "unknown_parameter", param=name)


def _bad_value(param: str, path: Sequence[str], error: Mapping[str, Any]) -> str:
    if param == "prompt":
        return "prompt must be UTF-8 text: give a string or a list of strings"
    if param == "stop":
        return f"stop must be a string of 1 to {MAX_STOP_CHARACTERS} characters, or a list of at most {MAX_STOPS}"
    got = json.dumps(error["input"], default=str)[:80]
    allowed = _range(param) if "than" in error["type"] else None
    return f"{'.'.join(path)[:80]} = {got} is not accepted: " + (f"give {allowed}" if allowed else error["msg"])


def _range(param: str) -> str | None:
    """ "0 to 5", as the schema says."""
    for kind in CompletionRequest.model_json_schema()["properties"][param]["anyOf"]:
        low, high = kind.get("minimum"), kind.get("maximum")
        above = kind.get("exclusiveMinimum")
        if high is not None:
            return f"{low:g} to {high:g}" if above is None else f"more than {above:g}, at most {high:g}"
        if low is not None:
            return f"{low:g} or more"
    return None
