"""What one client may take of a server: real sockets, and a clock that tests move."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from blocktrain.http import server
from blocktrain.http.limits import HttpLimits
from blocktrain.http.server import served_in_thread

PATIENCE_S = 30.0
UPLOAD = b"PUT /size HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(autouse=True)
def _quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "TICKS_PER_CHECK", 1)


@dataclass
class Served:
    """A server whose clock stands still unless a test moves it."""

    port: int = 0
    now_s: float = 0.0
    checks: threading.Condition = field(default_factory=threading.Condition)
    num_checks: int = 0
    sizes: queue.Queue[int] = field(default_factory=queue.Queue)

    def clock(self) -> float:
        with self.checks:
            self.num_checks += 1
            self.checks.notify_all()
            return self.now_s

    def pass_s(self, seconds: float) -> None:
        """Moves the clock between two looks of the server at its connections."""
        for step_s in (0.0, seconds):
            with self.checks:
                self.now_s += step_s
                last = self.num_checks + 2  # one may be under way
                assert self.checks.wait_for(lambda last=last: self.num_checks >= last, PATIENCE_S)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    async def size(self, request: Request) -> Response:
        num_bytes = 0
        try:
            async for chunk in request.stream():
                num_bytes += len(chunk)
        except ClientDisconnect:
            num_bytes = -num_bytes
        self.sizes.put(num_bytes)
        return PlainTextResponse(str(num_bytes))

    async def refuse(self, request: Request) -> Response:
        return PlainTextResponse("no", 401)

    async def much(self, request: Request) -> Response:
        return StreamingResponse(iter([bytes(2**20)] * 64))


@contextmanager
def served(**limits: float) -> Iterator[Served]:
    each = Served()
    routes = [
        Route("/size", each.size, methods=["GET", "PUT"]),
        Route("/refuse", each.refuse, methods=["PUT"]),
        Route("/much", each.much),
    ]
    with served_in_thread(Starlette(routes=routes), limits=HttpLimits(**limits), clock=each.clock) as running:
        each.port = running.port
        yield each


def until(client: socket.socket, ending: bytes) -> bytes:
    data = b""
    while not data.endswith(ending):
        more = client.recv(1000)
        assert more, f"the connection ended after {data!r}"
        data += more
    return data


def send(client: socket.socket, chunk: bytes, times: int) -> None:
    for _ in range(times):
        client.sendall(chunk)


def all_of(client: socket.socket) -> bytes:
    """Everything until the server ends the connection."""
    data = b""
    try:
        while more := client.recv(2**20):
            data += more
    except ConnectionResetError:
        pass
    return data


@pytest.mark.parametrize("head", [b"X: " + b"a" * 40_000, b"X: 1\r\n" * 102, b"X: 1\r\n" * 8000])
def test_headers_that_are_too_large_or_too_many_are_refused_before_they_end(head):
    with served() as each, each.connect() as client:
        client.sendall(b"GET /size HTTP/1.1\r\n" + head)
        assert all_of(client).startswith(b"HTTP/1.1 431 ")


def test_an_endless_request_line_is_refused():
    with served() as each, each.connect() as client:
        with pytest.raises(OSError):
            send(client, b"GET /" + b"a" * 4096, 100_000)
        assert each.sizes.empty()


def test_trailers_count_as_headers():
    with served() as each, each.connect() as client:
        client.sendall(b"PUT /size HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: 1\r\n" * 102)
        assert all_of(client).startswith(b"HTTP/1.1 431 ")


def test_large_headers_within_the_limit_and_the_body_behind_them_arrive():
    with served() as each, each.connect() as client:
        head = b"PUT /size HTTP/1.1\r\nContent-Length: 300000\r\nConnection: close\r\nX: " + b"a" * 30_000 + b"\r\n\r\n"
        client.sendall(head + bytes(300_000))
        assert all_of(client).endswith(b"\r\n\r\n300000")


@pytest.mark.parametrize("sent, answer", [(b"", b""), (b"GET /size HT", b"HTTP/1.1 408 "), (b"\r\n", b"HTTP/1.1 408 ")])
def test_headers_that_do_not_end_in_time_end_the_connection(sent, answer):
    with served(header_s=10) as each, each.connect() as client:
        client.sendall(sent)
        each.pass_s(10)
        assert all_of(client).startswith(answer)


def test_headers_that_drip_end_the_connection_too_on_the_second_request_as_well():
    with served(header_s=10) as each, each.connect() as client:
        client.sendall(b"GET /size HTTP/1.1\r\nHost: x\r\n\r\n")
        until(client, b"\r\n\r\n0")
        for letter in (b"G", b"E", b"T"):
            client.sendall(letter)
            each.pass_s(4)
        assert all_of(client).startswith(b"HTTP/1.1 408 ")


def test_an_idle_connection_is_closed():
    with served(idle_s=0.1) as each, each.connect() as client:
        client.sendall(b"GET /size HTTP/1.1\r\nHost: x\r\n\r\n")
        assert all_of(client).endswith(b"0")


def test_a_body_that_drips_is_dropped_and_its_route_keeps_what_came():
    with served(progress_s=10) as each, each.connect() as client:
        client.sendall(UPLOAD % 10_000)
        for _ in range(3):
            client.sendall(b"ab")
            each.pass_s(4)
        assert all_of(client) == b""
        assert each.sizes.get(timeout=PATIENCE_S) == -6


def test_a_slow_upload_that_makes_progress_arrives_however_long_it_takes():
    with served(progress_s=10, progress_bytes=100) as each, each.connect() as client:
        client.sendall(UPLOAD % 500)
        for _ in range(5):
            client.sendall(bytes(100))
            each.pass_s(9)
        assert each.sizes.get(timeout=PATIENCE_S) == 500
        until(client, b"\r\n\r\n500")


def test_a_client_that_does_not_read_its_answer_is_dropped():
    with served(unread_s=10) as each, each.connect() as client:
        client.sendall(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n")
        client.recv(1, socket.MSG_PEEK)
        each.pass_s(10)
        assert len(all_of(client)) < 64 * 2**20


def test_an_answer_before_the_end_of_the_body_arrives_and_the_rest_is_not_read():
    with served() as each, each.connect() as client:
        client.sendall(UPLOAD.replace(b"size", b"refuse") % 10**12)
        assert client.recv(1000).startswith(b"HTTP/1.1 401 ")
        with pytest.raises(OSError):
            send(client, bytes(2**20), 64)


def test_a_client_that_is_gone_when_it_is_refused_is_no_error(monkeypatch, caplog):
    def gone(transport: object) -> None:
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr("asyncio.selector_events._SelectorSocketTransport.write_eof", gone)
    with served() as each, each.connect() as client:
        monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
        client.sendall(UPLOAD.replace(b"size", b"refuse") % 10**6)
        assert client.recv(1000).startswith(b"HTTP/1.1 401 ")
    assert "Exception" not in caplog.text


def test_after_a_refusal_a_silent_connection_is_closed():
    with served() as each, each.connect() as client:
        client.sendall(UPLOAD.replace(b"size", b"refuse") % 10**12)
        assert all_of(client).endswith(b"no")  # the server's end of the connection is closed at once
        each.pass_s(2)
        with pytest.raises(OSError):
            send(client, b"more", 3)


def test_more_requests_than_may_wait_on_one_connection_are_refused():
    with served() as each, each.connect() as client:
        client.sendall(b"GET /size HTTP/1.1\r\nHost: x\r\n\r\n" * 5000)
        assert all_of(client).count(b"HTTP/1.1 200") <= 10


def test_a_few_requests_at_once_are_answered_in_order():
    with served() as each, each.connect() as client:
        bodies = b"".join(UPLOAD % n + bytes(n) for n in (1, 2)) + b"GET /size HTTP/1.0\r\n\r\n"
        client.sendall(bodies)
        assert [part.rpartition(b"\r\n\r\n")[2] for part in all_of(client).split(b"HTTP/1.1 ")[1:]] == [
            b"1",
            b"2",
            b"0",
        ]


def test_a_web_socket_gets_a_plain_answer_and_stays_within_the_limits():
    with served(header_s=10) as each, each.connect() as client:
        client.sendall(b"GET /size HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        until(client, b"\r\n\r\n0")
        client.sendall(b"x")
        each.pass_s(10)
        all_of(client)
