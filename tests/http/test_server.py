"""The HTTP server: its socket, its certificate, and how it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from blocktrain.errors import ConfigError
from blocktrain.http.server import Tls, end_on_shutdown, listening, serve_until_cancelled, served_in_thread

PATIENCE_S = 60.0


def test_an_answer_is_sent_at_once_and_waits_for_no_acknowledgement():
    with (
        listening("127.0.0.1", 0, "nobody") as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_that_is_taken_is_an_error_with_a_remedy():
    with (
        listening("127.0.0.1", 0, "nobody") as first,
        pytest.raises(ConfigError, match=r"is taken: stop what listens there \(another gateway\?\)"),
        listening("127.0.0.1", first.getsockname()[1], "another gateway"),
    ):
        pass


def test_files_that_are_no_certificate_are_an_error_before_anything_is_served(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text("no certificate")
    key.write_text("no key")
    with (
        pytest.raises(ConfigError, match="give PEM files that belong together"),
        served_in_thread(FastAPI(), tls=Tls(cert, key, None)),
    ):
        pass


def app_that_streams_until(ended: asyncio.Event) -> FastAPI:
    app = FastAPI()

    async def events() -> AsyncIterator[bytes]:
        yield b"begun\n"
        await ended.wait()
        yield b"ended\n"

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(events())

    return app


def test_a_server_that_stops_ends_the_requests_that_its_app_holds_open():
    ended = asyncio.Event()
    app = app_that_streams_until(ended)
    end_on_shutdown(app, ended.set)
    with (
        served_in_thread(app) as server,
        httpx.stream("GET", f"{server.url}/stream", timeout=PATIENCE_S) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == "begun"
        server.stop()
        assert list(lines) == ["ended"]


def test_a_cancelled_server_finishes_the_request_under_way():
    ended = asyncio.Event()
    app = app_that_streams_until(ended)
    end_on_shutdown(app, ended.set)

    async def cancel_in_the_middle() -> list[str]:
        with listening("127.0.0.1", 0, "nobody") as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/stream"
            serving = asyncio.create_task(serve_until_cancelled(app, listener))
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client, client.stream("GET", url) as answer:
                lines = answer.aiter_lines()
                first = await anext(lines)
                serving.cancel()
                rest = [line async for line in lines]
            with pytest.raises(asyncio.CancelledError):
                await serving
            return [first, *rest]

    assert asyncio.run(cancel_in_the_middle()) == ["begun", "ended"]
