"""Who asks too often and what is too large is refused before a byte of the body is read; all answers are counted.
Next: rates.py, how often; refusals.py, how; service.py, behind it."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blocktrain.http.rate_limit import Limiter, Rate
from blocktrain.swarm.coordinator.metrics import Answers
from blocktrain.swarm.coordinator.refusals import refusal
from blocktrain.wire.messages import Problem

TOKENS = 4  # of one address that may all ask as often as one may
MAX_MESSAGE_BYTES = 2**20
MAX_UPLOAD_BYTES = 2**40  # of any run's; how much this run's may have is looked up before they are read: intake.py


class Doorkeeper:
    """Plain ASGI: the decorator for functions costs every request two tasks and a stream, about as much as the whole of
    a small route."""

    def __init__(self, app: ASGIApp, rate: Rate, clock: Callable[[], float], answers: Answers) -> None:
        self._app, self._answers = app, answers
        self._of_token = Limiter(rate, clock)
        self._of_address = Limiter(replace(rate, per_s=rate.per_s * TOKENS), clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answers.count(message["status"])
            await send(message)

        headers = Headers(scope=scope)
        refused = self._too_often(scope, headers) or _too_large(scope["method"], headers)
        await (refused or self._app)(scope, receive, counted)

    def _too_often(self, scope: Scope, headers: Headers) -> Response | None:
        address = scope["client"][0] if scope.get("client") else ""
        token = hashlib.sha256(headers.get("authorization", "").encode()).digest()
        wait_s = self._of_address.wait_s(address) or self._of_token.wait_s((address, token))
        if not wait_s:
            return None
        after_s = math.ceil(wait_s)
        message = f"too many requests from {address} at once: ask again after {after_s} s"
        return refusal(429, Problem(code="rate", message=message, retry=True), {"Retry-After": str(after_s)})


def _too_large(method: str, headers: Headers) -> Response | None:
    announced = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not re.fullmatch("[0-9]+", announced):
        message = "the body's length was not announced: send it with a Content-Length"
        return refusal(411, Problem(code="length", message=message, retry=False))
    limit = MAX_UPLOAD_BYTES if method == "PUT" else MAX_MESSAGE_BYTES
    if len(announced) > 15 or int(announced) > limit:
        message = f"a body of {announced[:20]} bytes was announced, at most {limit} are read: send less"
        return refusal(413, Problem(code="oversized", message=message, retry=False))
    return None
