"""A client of a gateway: OpenAI's streamed completions over HTTP, for generate and demo. No torch.
Next: serve/gateway/app.py, the other end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from blocktrain.errors import ConfigError, GatewayUnreachable, RequestRefused

if TYPE_CHECKING:
    from blocktrain.serve.decode.request import Request

Show = Callable[[str], None]
CONNECT_TIMEOUT_S, SILENCE_TIMEOUT_S = 10.0, 120.0
MAX_DIGITS = 20


@dataclass(frozen=True)
class Output:
    """A generated text and its cost, for --json."""

    text: str
    bytes: int
    traversals: int
    bytes_per_traversal: float
    seconds: float
    prompt_bytes_unread: int  # at its start: of a long prompt, the model reads the end
    tokens: int = 0  # bytes, unless the model has a tokenizer
    exact: int = 0  # tokens that were drawn from the whole model's own distribution


def is_url(run: str) -> bool:
    return run.startswith(("http://", "https://"))


def generate_remotely(
    url: str,
    request: Request,
    stop: list[str],
    show: Show,
    api_key: str | None = None,
    longest_bytes: int | None = None,
    simulated_rtt_ms: int = 0,
) -> Output:
    """`longest_bytes` cuts the text of a model with a tokenizer, whose gateway counts tokens."""
    began_s, text, last = time.perf_counter(), "", StreamedPart("")
    body = _body(request, stop) | ({"simulated_rtt_ms": simulated_rtt_ms} if simulated_rtt_ms else {})
    with closing(_parts(url, body, api_key)) as parts:
        for number, part in enumerate(parts):
            if not number:
                show(request.prompt.decode())
            new, full = part.text, longest_bytes is not None and part.bytes_written > longest_bytes
            if full:
                new = (text + new).encode()[:longest_bytes].decode("utf-8", "ignore")[len(text) :]
            show(new)
            text, last = text + new, part if part.traversals else last
            if full:
                break
    written = last.bytes_written if longest_bytes is None else min(last.bytes_written, longest_bytes)
    seconds, per_traversal = time.perf_counter() - began_s, written / max(1, last.traversals)
    cost = (written, last.traversals, per_traversal, seconds, last.prompt_bytes_unread, last.tokens_written)
    return Output(text, *cost, last.exact)


def _body(request: Request, stop: list[str]) -> dict[str, Any]:
    if request.draft_tokens is not None:
        raise ConfigError("a gateway chooses the draft length itself: leave --draft-bytes out")
    try:
        prompt = request.prompt.decode()
    except UnicodeDecodeError:
        raise ConfigError("the prompt is not UTF-8, which a gateway needs: change it") from None
    body = {
        "prompt": prompt,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
        "mode": request.mode.value,
        "stream": True,
    }
    optional = {"stop": stop or None, "candidates": request.candidates}
    return body | {key: value for key, value in optional.items() if value is not None}


@dataclass(frozen=True)
class StreamedPart:
    """One event of a streamed completion: new text, and the cost so far."""

    text: str
    bytes_written: int = 0
    traversals: int = 0
    prompt_bytes_unread: int = 0
    tokens_written: int = 0
    exact: int = 0


def read_event(line: str) -> StreamedPart | None:
    """One line of a stream; None if it is no event with text. ValueError or RecursionError if no gateway sent it;
    GatewayUnreachable if the gateway says that it failed."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return None
    part = json.loads(line.removeprefix("data: "), parse_int=_small_number, parse_constant=_small_number)
    try:
        if "error" in part:
            raise GatewayUnreachable(f"the gateway stopped in the middle: {part['error']['message']}")
        effort = part.get("blocktrain") or {}
        text = "".join(choice.get("text") or "" for choice in part.get("choices") or ())
        names = ("bytes_written", "traversals", "prompt_bytes_unread", "tokens_written", "exact")
        costs = (int(effort.get(name, 0)) for name in names)
        return StreamedPart(text, *costs)
    except (TypeError, AttributeError, KeyError, OverflowError) as error:
        raise ValueError("an event of another form") from error


def _small_number(text: str) -> int:
    if len(text) > MAX_DIGITS or not text.lstrip("-").isdecimal():
        raise ValueError(f"{text[:20]} is not a number that a gateway sends")
    return int(text)


def _parts(url: str, body: dict[str, Any], api_key: str | None) -> Generator[StreamedPart, None, None]:
    """The events of the stream, as they arrive."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    base = url.rstrip("/").removesuffix("/v1")
    with (
        _explained(url),
        httpx.Client(headers=headers, timeout=timeout) as http,
        http.stream("POST", f"{base}/v1/completions", json=body) as reply,
    ):
        if reply.status_code != httpx.codes.OK:
            reply.read()
            raise _refusal(url, reply)
        for line in reply.iter_lines():
            if (part := read_event(line)) is not None:
                yield part


def _refusal(url: str, reply: httpx.Response) -> RequestRefused:
    try:
        error = reply.json()["error"]
        return RequestRefused(f"{url} refused: {error['message']}", code=str(error.get("code")))
    except (ValueError, KeyError, TypeError):
        return RequestRefused(
            f"{url} answered {reply.status_code} and is not a gateway: give the URL that blocktrain gateway prints",
            code="not_a_gateway",
        )


@contextmanager
def _explained(url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise GatewayUnreachable(
            f"{url} cannot be reached ({reason}): check the URL, and that blocktrain gateway runs there"
        ) from None
    except (ValueError, RecursionError):
        raise GatewayUnreachable(
            f"{url} did not send the JSON of a completion: give the URL of a blocktrain gateway"
        ) from None
