"""ASGI middleware around all routes of a service: checks each request, adds headers, counts and reports answers.
Knows no routes: each service chooses the checks and renders its own errors. Next: rate_limit.py; sse.py."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blocktrain.http.limits import site_of
from blocktrain.http.rate_limit import Rate, RateLimiter

TOKENS_PER_ADDRESS = 4  # access tokens of one address that may all use their full rate


class CheckFailed(Exception):
    """A request is refused before a route sees it. `code` is for programs, the message is for people."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s


Check = Callable[[Scope, Headers], None]  # raises CheckFailed
Authorize = Callable[[Scope, Headers], Awaitable[None]]  # raises what `render` renders


async def _anybody(scope: Scope, headers: Headers) -> None:
    """The routes check who asks, before they read a body."""


@dataclass(frozen=True)
class BodyLimit:
    """The largest body of a request. An announced length is checked before a byte is read."""

    max_bytes: int
    max_upload_bytes: int | None = None  # of PUT requests, if that is different
    length_required: bool = False  # otherwise a body of unknown length is read up to `max_bytes`
    of_path: Mapping[str, int] = field(default_factory=dict)  # paths with another limit: their length is announced

    def check(self, scope: Scope, headers: Headers) -> None:
        announced = headers.get("content-length", "0")
        if self.length_required and ("transfer-encoding" in headers or not re.fullmatch("[0-9]+", announced)):
            raise CheckFailed(411, "length", "the body's length is missing: send it as Content-Length")
        limit = self.of_path.get(scope["path"], self.max_bytes)
        if scope["method"] == "PUT" and self.max_upload_bytes:
            limit = self.max_upload_bytes
        if len(announced) > 15 or not announced.isdecimal() or int(announced) > limit:
            raise _too_large(limit)

    def enforce(self, receive: Receive) -> Receive:
        """`receive` that fails once more than `max_bytes` have come."""
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise _too_large(self.max_bytes)
            return message

        return limited


def _too_large(limit: int) -> CheckFailed:
    return CheckFailed(413, "oversized", f"the body has more than {limit} bytes: send less")


def require_host(hosts: Collection[str], reason: str) -> Check:
    """Accepts only these names in the Host header, so that no web page reaches the service under its own name."""

    def check(scope: Scope, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        name = host if host.endswith("]") else host.partition(":")[0] if "[" not in host else host.rpartition(":")[0]
        if name not in hosts:
            raise CheckFailed(421, "host", f'requests for Host "{host[:80]}" are not answered: {reason}')

    return check


def limit_rate(rate: Rate, clock: Callable[[], float]) -> Check:
    """Limits each access token of each address. The limit for the whole address stops guessing of access tokens."""
    of_token = RateLimiter(rate, clock)
    of_address = RateLimiter(Rate(rate.requests * TOKENS_PER_ADDRESS, rate.window_s), clock)

    def check(scope: Scope, headers: Headers) -> None:
        address = site_of(scope["client"][0]) if scope.get("client") else ""
        access_token = hashlib.sha256(headers.get("authorization", "").encode()).digest()
        wait_s = of_address.wait_s(address) or of_token.wait_s((address, access_token))
        if wait_s:
            message = f"too many requests from {address}: try again in {math.ceil(wait_s)} s"
            raise CheckFailed(429, "rate", message, retry_after_s=wait_s)

    return check


class Middleware:
    """Plain ASGI: Starlette's decorator for middleware functions costs two tasks and a stream per request, about as
    much as a whole small route."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        body: BodyLimit,
        checks: Sequence[Check],
        render: Callable[[Exception], Response | None],
        authorize: Authorize = _anybody,
        direct: Mapping[tuple[str, str], ASGIApp] = MappingProxyType({}),
        headers: Mapping[str, str] | None = None,
        count: Callable[[int], None] = lambda status: None,
        report: Callable[[Scope, int, float], None] = lambda scope, status, seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`authorize` comes after the checks and before any byte of the body. `render` makes the answer to an
        exception; None raises it again. `direct` has routes by method and path that the app need not look for: its
        search costs more than a small answer. `headers` are added where an answer has none of that name. `count` gets
        each status when an answer begins; `report` gets it, and the time taken, when the answer has ended."""
        self._app, self._body, self._checks, self._render = app, body, (*checks, body.check), render
        self._authorize, self._direct = authorize, direct
        self._headers, self._count, self._report, self._clock = headers or {}, count, report, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = self._clock(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._count(status)
                if self._headers:
                    headers = MutableHeaders(scope=message)
                    for name, value in self._headers.items():
                        headers.setdefault(name, value)
            await send(message)

        try:
            request_headers = Headers(scope=scope)
            for check in self._checks:
                check(scope, request_headers)
            await self._authorize(scope, request_headers)
            app = self._direct.get((scope["method"], scope["path"]), self._app)
            await app(scope, receive if self._body.length_required else self._body.enforce(receive), answer)
        except Exception as error:
            response = None if status else self._render(error)  # after the start, the server can only disconnect
            if response is None:
                raise
            await response(scope, receive, answer)
        finally:
            self._report(scope, status, self._clock() - began_s)
