"""Event streams: what is sent, and how they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from blocktrain.http.sse import ClientDisconnected, EventStream, cancel_on_disconnect, event

DISCONNECT = {"type": "http.disconnect"}


class Client:
    """An ASGI client that disconnects, or stops to read, after so many messages."""

    def __init__(self, leaves_after: int = 1000, stalls_after: int = 1000) -> None:
        self.messages: list[dict] = []
        self._leaves_after, self._stalls_after, self._left = leaves_after, stalls_after, asyncio.Event()

    async def receive(self) -> dict:
        await self._left.wait()
        return DISCONNECT

    async def send(self, message: dict) -> None:
        if len(self.messages) == self._stalls_after:
            await asyncio.Event().wait()
        self.messages.append(message)
        if len(self.messages) == self._leaves_after:
            self._left.set()


class Source:
    def __init__(self, endless: bool = False) -> None:
        self.closed, self._endless = False, endless

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b"one"
            yield b"two"
            if self._endless:
                await asyncio.Event().wait()
        finally:
            self.closed = True


def stream_to(client: Client, source: Source, **options) -> tuple[dict, list[str]]:
    ended: list[str] = []
    scope: dict = {"type": "http"}

    async def run() -> None:
        stream = EventStream(source.events(), on_end=lambda: ended.append("ended"), **options)
        await stream(scope, client.receive, client.send)

    asyncio.run(run())
    return scope.get("state", {}), ended


def test_events_are_sent_one_by_one_and_the_source_is_closed():
    client, source = Client(), Source()
    state, ended = stream_to(client, source, first=b"zero")
    start, *bodies = client.messages
    assert dict(start["headers"])[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert [message["body"] for message in bodies] == [b"zero", b"one", b"two", b""]
    assert [message["more_body"] for message in bodies] == [True, True, True, False]
    assert (source.closed, ended, state) == (True, ["ended"], {})


@pytest.mark.parametrize(
    "client, options",
    [
        (lambda: Client(leaves_after=3), {}),
        (lambda: Client(stalls_after=2), {"stalled_s": 0.0}),
        (lambda: Client(), {"deadline_at_s": 0.0}),
    ],
)
def test_a_client_that_leaves_or_does_not_read_ends_the_stream(client, options):
    source = Source(endless=True)
    state, ended = stream_to(client(), source, **options)
    assert (ended, state) == (["ended"], {"disconnected": True})


def test_an_event_may_have_a_name():
    assert event("{}") == b"data: {}\n\n"
    assert event("{}", "status") == b"event: status\ndata: {}\n\n"


def test_work_is_cancelled_and_has_ended_when_its_client_disconnects():
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    async def receive() -> dict:
        await asyncio.sleep(0)
        return DISCONNECT

    with pytest.raises(ClientDisconnected):
        asyncio.run(cancel_on_disconnect(receive, work()))
    assert ended == ["work"]
