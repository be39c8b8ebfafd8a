"""Where HTTP and our code meet, as ASGI: bodies that end at a limit, work that ends when its client has gone, headers
that every answer has. Knows no route. Next: gateway.py."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blocktrain.serve.gateway.openai import ApiError, defect

log = logging.getLogger(__name__)
Result = TypeVar("Result")
EVENT_HEADERS = {"X-Accel-Buffering": "no"}  # no proxy may hold a stream back
COMMON_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result; when the client goes first the work is cancelled, and has ended when this raises."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events as they come. Whatever happens, their source is closed at the end; a client that does not
    read is left at the deadline, in the loop's time."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], deadline_s: float) -> None:
        super().__init__(headers=EVENT_HEADERS)
        del self.headers["content-length"]
        self._first, self._rest, self._deadline_s = first, rest, deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except (ClientGone, TimeoutError):
            scope.setdefault("state", {})["gone"] = True  # there is nobody else to tell
        finally:
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        async with asyncio.timeout_at(self._deadline_s):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for event in self._rest:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def error_response(error: ApiError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return JSONResponse(error.reply().model_dump(), error.status, headers)


class Border:
    """Around the whole app: a Host that is ours where only this machine may ask, bodies up to a limit however they are
    sent, the common headers on every answer, and a report after it."""

    def __init__(
        self,
        app: ASGIApp,
        max_body_bytes: int,
        hosts: Collection[str] | None,
        report: Callable[[Scope, int, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._app, self._max_body_bytes, self._hosts = app, max_body_bytes, hosts
        self._report, self._clock = report, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, sender = self._clock(), _Sender(send)
        try:
            await self._inside(scope, receive, sender)
        finally:
            self._report(scope, sender.status, self._clock() - began_s)

    async def _inside(self, scope: Scope, receive: Receive, sender: _Sender) -> None:
        try:
            self._check(Headers(scope=scope))
            await self._app(scope, self._counted(receive), sender)
        except Exception as error:
            if sender.status:
                raise  # too late for another answer: the server closes the connection
            refusal = error if isinstance(error, ApiError) else None
            if refusal is None:
                log.exception("unexpected")
                refusal = defect()
            await error_response(refusal)(scope, receive, sender)

    def _check(self, headers: Headers) -> None:
        host = headers.get("host", "").lower()
        name = host if host.endswith("]") else host.partition(":")[0] if "[" not in host else host.rpartition(":")[0]
        if self._hosts is not None and name not in self._hosts:
            message = f"no API key is set, so only this machine is answered, not Host {host[:80]}: set a key"
            raise ApiError(421, message, "host")
        announced = headers.get("content-length", "0")
        if len(announced) > 15 or not announced.isdecimal() or int(announced) > self._max_body_bytes:
            raise self._too_large()

    def _counted(self, receive: Receive) -> Receive:
        """A body of unknown length is read to the limit and no further."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body_bytes:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_body_bytes} bytes: send less", "body_too_large")


class _Sender:
    """Send, with the common headers; remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send, self.status = send, 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in COMMON_HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)
