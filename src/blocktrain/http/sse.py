"""Server-sent events, and work that is cancelled when its client disconnects. Knows no routes.
Next: swarm/coordinator/watching/status_stream.py and serve/gateway/completion.py, which make the events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # no proxy may buffer the stream


class ClientDisconnected(Exception):
    """The client closed its connection before the answer was complete."""


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the work's result. If the client disconnects first, the work is cancelled; it has ended when this raises
    ClientDisconnected."""
    task, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        disconnected.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def event(data: str, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data}\n\n".encode()


class EventStream(Response):
    """Sends events as they come. At the end, whatever the reason, it closes their source and calls `on_end`.

    A client that does not read is dropped: after `stalled_s` seconds in one send, or at `deadline_at_s` (event loop
    time). Then, and when the client disconnects, the request's state has `disconnected = True`."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        first: bytes = b"",
        deadline_at_s: float | None = None,
        stalled_s: float | None = None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events, self._first, self._on_end = events, first, on_end
        self._deadline_at_s, self._stalled_s = deadline_at_s, stalled_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await cancel_on_disconnect(receive, self._send_all(send))
        except (ClientDisconnected, TimeoutError):
            scope.setdefault("state", {})["disconnected"] = True
        finally:
            try:
                await self._events.aclose()
            finally:
                self._on_end()

    async def _send_all(self, send: Send) -> None:
        async def send_body(body: bytes, more_body: bool = True) -> None:
            async with asyncio.timeout(self._stalled_s):
                await send({"type": "http.response.body", "body": body, "more_body": more_body})

        async with asyncio.timeout_at(self._deadline_at_s):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if self._first:
                await send_body(self._first)
            async for each in self._events:
                await send_body(each)
            await send_body(b"", more_body=False)
