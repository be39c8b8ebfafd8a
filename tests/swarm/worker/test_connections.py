"""Connections to a coordinator, to a socket that answers as planned."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.connections import Connections
from blocktrain.wire.invite import Invite

TIMEOUT_S = 20.0
BODY = bytes(range(256)) * 4000
OK = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"
Talk = Callable[[socket.socket], object]  # with one client that has connected


class Server:
    """Talks with one connection after the other, and counts them."""

    def __init__(self, *talks: Talk) -> None:
        self._listener, self.accepted = socket.create_server(("127.0.0.1", 0)), 0
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, args=(talks,), daemon=True)
        self._thread.start()

    def _serve(self, talks: tuple[Talk, ...]) -> None:
        for talk in talks:
            connection, _ = self._listener.accept()
            self.accepted += 1
            with connection:
                talk(connection)

    @contextmanager
    def asked(self) -> Iterator[Connections]:
        connections = Connections("127.0.0.1", self.port, TIMEOUT_S, None)
        yield connections
        connections.close()
        self._thread.join(TIMEOUT_S)
        self._listener.close()

    def get(self) -> httpx.Request:
        return httpx.Request("GET", f"http://127.0.0.1:{self.port}/path?query=1")


def head_of(connection: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += connection.recv(1)
    return head


def answering(*answers: bytes) -> Talk:
    """One answer per request that has no body; then the connection is closed."""

    def talk(connection: socket.socket) -> None:
        for answer in answers:
            head_of(connection)
            connection.sendall(answer)

    return talk


def keep(response: httpx.Response, got: bytearray) -> None:
    for chunk in response.iter_bytes():
        got += chunk


def whole(body: bytes) -> bytes:
    return OK % len(body) + body


def test_a_connection_is_used_again_when_its_answer_was_read_to_the_end():
    server = Server(answering(whole(BODY), whole(b""), whole(b"three")))
    with server.asked() as connections:
        contents = [connections.send(server.get(), stream=False).content for _ in range(3)]
    assert (contents, server.accepted) == ([BODY, b"", b"three"], 1)


@pytest.fixture
def many_open_files():
    """So many that the next one has a number above 1023, which select.select does not know."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    numbers = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for number in numbers:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_connection_is_used_again_in_a_process_with_many_open_files(many_open_files):
    server = Server(answering(whole(b"one"), whole(b"two")))
    with server.asked() as connections:
        assert [connections.send(server.get(), stream=False).content for _ in range(2)] == [b"one", b"two"]
    assert server.accepted == 1


def test_a_connection_that_the_coordinator_has_ended_is_replaced_before_it_is_used():
    closed = threading.Event()

    def one_answer(connection: socket.socket) -> None:
        answering(whole(b"one"))(connection)
        connection.close()
        closed.set()

    server = Server(one_answer, answering(whole(b"two")))
    with server.asked() as connections:
        first = connections.send(server.get(), stream=False).content
        assert closed.wait(TIMEOUT_S)
        assert [first, connections.send(server.get(), stream=False).content] == [b"one", b"two"]


def test_an_answer_that_is_not_read_to_its_end_ends_its_connection():
    server = Server(answering(whole(BODY)), answering(whole(b"two")))
    with server.asked() as connections:
        connections.send(server.get(), stream=True).close()
        assert connections.send(server.get(), stream=False).content == b"two"


def test_the_bytes_before_a_connection_broke_are_given_and_then_the_error():
    server = Server(answering(OK % len(BODY) + BODY[:1000]))
    with server.asked() as connections:
        response, got = connections.send(server.get(), stream=True), bytearray()
        with pytest.raises(httpx.RemoteProtocolError, match=f"ended {len(BODY) - 1000} bytes too soon"):
            keep(response, got)
        response.close()
    assert got == BODY[:1000]


def ending(answer: bytes, ended: threading.Event) -> Talk:
    """One answer, and nothing after it; then the client has to end the connection."""

    def talk(connection: socket.socket) -> None:
        answering(answer)(connection)
        connection.shutdown(socket.SHUT_WR)
        if not connection.recv(1):
            ended.set()

    return talk


def test_a_connection_that_broke_within_an_answer_is_closed():
    ended = threading.Event()
    server = Server(ending(OK % len(BODY) + BODY[:1000], ended))
    with server.asked() as connections:
        with pytest.raises(httpx.RemoteProtocolError):
            connections.send(server.get(), stream=False)
        assert ended.wait(TIMEOUT_S)


def test_an_answer_that_is_read_after_the_end_leaves_no_connection():
    ended = threading.Event()
    server = Server(ending(whole(BODY), ended))
    with server.asked() as connections:
        response, got = connections.send(server.get(), stream=True), bytearray()
        connections.close()
        keep(response, got)
        response.close()
        assert ended.wait(TIMEOUT_S)
    assert got == BODY


def test_a_refusal_that_comes_before_the_whole_body_was_sent_is_read():
    def refuse(connection: socket.socket) -> None:
        head_of(connection)
        connection.sendall(b"HTTP/1.1 413 Too Large\r\nconnection: close\r\ncontent-length: 4\r\n\r\nless")
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(2**16):  # else the kernel may discard the answer
            pass

    server = Server(refuse)
    with server.asked() as connections:
        headers = {"Content-Length": str(2 * len(BODY))}
        request = httpx.Request("PUT", server.get().url, headers=headers, content=iter([BODY, BODY]))
        response = connections.send(request, stream=False)
    assert (response.status_code, response.content) == (413, b"less")


def test_a_request_has_the_path_the_query_and_the_headers_that_it_was_given():
    heads = list[bytes]()

    def talk(connection: socket.socket) -> None:
        heads.append(head_of(connection))
        connection.sendall(whole(b""))

    server = Server(talk)
    with server.asked() as connections:
        connections.send(httpx.Request("GET", server.get().url, headers={"Prefer": "wait=2"}), stream=False)
    first, *rest = heads[0].decode().strip().split("\r\n")
    assert first == "GET /path?query=1 HTTP/1.1"
    assert sorted(line.lower() for line in rest) == [f"host: 127.0.0.1:{server.port}", "prefer: wait=2"]


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n"], ids=["none", "not HTTP"])
def test_what_is_no_answer_is_an_error_of_the_connection(answer):
    server = Server(answering(answer))
    with server.asked() as connections, pytest.raises(httpx.TransportError):
        connections.send(server.get(), stream=False)


def test_nobody_who_listens_is_an_error_of_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    with pytest.raises(httpx.ConnectError, match="refused"):
        Connections("127.0.0.1", port, TIMEOUT_S, None).send(
            httpx.Request("GET", f"http://127.0.0.1:{port}/"), stream=False
        )


def test_a_machine_behind_a_proxy_asks_through_it(monkeypatch):
    heads = list[bytes]()

    def proxy(connection: socket.socket) -> None:
        heads.append(head_of(connection))
        connection.sendall(whole(b'{"done": true}'))

    server = Server(proxy)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
    with server.asked(), CoordinatorClient(Invite("coordinator.test", 80, "x" * 20)) as client:
        assert client.status() == {"done": True}
    assert heads[0].startswith(b"GET http://coordinator.test/v1/status HTTP/1.1")
