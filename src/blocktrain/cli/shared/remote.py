"""What generate does with a gateway's URL: OpenAI's streamed completions, over HTTP. Next: serve/gateway/app.py, the
other
end."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx

from blocktrain.cli.commands.training.generate import Output, Show
from blocktrain.errors import ConfigError, GatewayUnreachable, RequestRefused

if TYPE_CHECKING:
    from blocktrain.serve.decode.exact import Request

CONNECT_TIMEOUT_S, SILENCE_TIMEOUT_S = 10.0, 120.0


def is_url(run: str) -> bool:
    return run.startswith(("http://", "https://"))


def write_remotely(url: str, request: Request, stop: list[str], show: Show, api_key: str | None = None) -> Output:
    began_s, text, effort = time.perf_counter(), "", dict[str, Any]()
    for number, part in enumerate(_parts(url, _body(request, stop), api_key)):
        if not number:
            show(request.prompt.decode())
        new = "".join(choice.get("text") or "" for choice in part.get("choices", ()))
        show(new)
        text, effort = text + new, part.get("blocktrain") or effort
    written, traversals = int(effort.get("bytes_written", 0)), int(effort.get("traversals", 0))
    return Output(text, written, traversals, written / max(1, traversals), time.perf_counter() - began_s)


def _body(request: Request, stop: list[str]) -> dict[str, Any]:
    if request.draft_bytes is not None:
        raise ConfigError("a gateway chooses by itself how far to draft: leave --draft-bytes out")
    try:
        prompt = request.prompt.decode()
    except UnicodeDecodeError:
        raise ConfigError("the prompt is not UTF-8, which a gateway needs: mend it") from None
    body = {
        "prompt": prompt,
        "max_tokens": request.max_bytes,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
        "mode": request.mode.value,
        "stream": True,
    }
    optional = {"stop": stop or None, "candidates": request.candidates}
    return body | {key: value for key, value in optional.items() if value is not None}


def _parts(url: str, body: dict[str, Any], api_key: str | None) -> Iterator[dict[str, Any]]:
    """The stream's events, as they come."""
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
            if line.startswith("data: ") and line != "data: [DONE]":
                part = json.loads(line.removeprefix("data: "))
                if "error" in part:
                    raise GatewayUnreachable(f"{url} broke off: {part['error'].get('message')}")
                yield part


def _refusal(url: str, reply: httpx.Response) -> RequestRefused:
    try:
        error = reply.json()["error"]
        return RequestRefused(f"{url} refused: {error['message']}", code=str(error.get("code")))
    except (ValueError, KeyError, TypeError):
        return RequestRefused(
            f"{url} answered {reply.status_code} and is no gateway: give the URL that blocktrain gateway prints",
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
    except ValueError:
        raise GatewayUnreachable(f"{url} sent what is no JSON: give the URL of a blocktrain gateway") from None
