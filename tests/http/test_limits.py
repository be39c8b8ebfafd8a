"""How many connections a server keeps: in all, and per address."""

from __future__ import annotations

import ipaddress
import resource
import socket
from contextlib import ExitStack

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from blocktrain.cli.shared.certificates import tls_files
from blocktrain.errors import ConfigError
from blocktrain.http.limits import FULL, Admission, HttpLimits, connections_within, room_for, site_of
from blocktrain.http.server import served_in_thread

PATIENCE_S = 30.0
ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def address(request: Request) -> Response:
    return PlainTextResponse(f"<{request.client.host}>")


APP = Starlette(routes=[Route("/", address)])


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def answer(client: socket.socket, request: bytes = ASK) -> bytes:
    client.sendall(request)
    data = b""
    while not data.endswith(b">") and (more := client.recv(1000)):
        data += more
    return data


def test_connections_beyond_the_limit_are_refused_until_one_ends():
    with served_in_thread(APP, limits=HttpLimits(max_connections=2)) as server, ExitStack() as stack:
        first, second = (stack.enter_context(connect(server.port)) for _ in range(2))
        assert b"200 OK" in answer(first)
        assert b"200 OK" in answer(second)
        with connect(server.port) as third:
            assert third.recv(1000).startswith(b"HTTP/1.1 503 ")
        first.sendall(ASK.replace(b"\r\nHost", b"\r\nConnection: close\r\nHost"))
        while first.recv(1000):
            pass
        with connect(server.port) as third:
            assert b"200 OK" in answer(third)


def test_a_handshake_that_never_comes_takes_a_place_only_for_a_while(tmp_path):
    tls = tls_files(tmp_path, "127.0.0.1", None, None)
    limits = HttpLimits(max_connections=1, header_s=0.2)
    with served_in_thread(APP, tls=tls, limits=limits) as server, connect(server.port) as silent:
        assert silent.recv(1000) == b""


@pytest.mark.parametrize(
    "callers, accepted",
    [
        (["10.0.0.1", "10.0.0.1", "10.0.0.1"], [True, True, False]),
        (["10.0.0.1", "10.0.0.1", "10.0.0.2"], [True, True, True]),
        (["2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8:0:1::"], [True, True, False, True]),
        (["::ffff:10.0.0.1", "10.0.0.1", "10.0.0.1"], [True, True, False]),
        (["127.0.0.1"] * 4, [True] * 4),  # many may share this machine,
        (["192.0.2.7"] * 4, [True] * 4),  # and a proxy that the operator named
    ],
)
def test_one_address_gets_its_share_of_the_connections(callers, accepted):
    limits = HttpLimits(max_connections_per_address=2, trusted_proxies=("192.0.2.0/24",))
    admission, kept, results = Admission(limits, FULL), [], []
    for caller in callers:
        ours, theirs = socket.socketpair()
        kept.append(theirs)
        try:
            kept.append(admission.admitted(ours, caller))
            results.append(True)
        except BlockingIOError:
            assert theirs.recv(100) == FULL
            results.append(False)
    assert results == accepted
    for each in kept:
        each.close()
    assert admission.num_open == 0


@pytest.mark.parametrize(
    "proxies, named, seen",
    [
        ((), "198.51.100.1", "127.0.0.1"),  # anybody can write the header
        (("127.0.0.1",), "198.51.100.1", "198.51.100.1"),
        (("127.0.0.0/8",), "6.6.6.6, 198.51.100.1", "198.51.100.1"),  # the last one is the proxy's own word
        (("192.0.2.1",), "198.51.100.1", "127.0.0.1"),
    ],
)
def test_only_a_named_proxy_may_say_who_the_client_is(proxies, named, seen):
    with served_in_thread(APP, limits=HttpLimits(trusted_proxies=proxies)) as server, connect(server.port) as client:
        request = ASK.replace(b"\r\nHost", f"\r\nX-Forwarded-For: {named}\r\nHost".encode())
        assert answer(client, request).endswith(f"<{seen}>".encode())


def test_a_proxy_that_is_no_address_is_an_error_with_a_remedy():
    with pytest.raises(ConfigError, match="give an IP address or a network"):
        HttpLimits(trusted_proxies=("proxy.example",))


@pytest.mark.parametrize(
    "files, most", [(100, 50), (4096, 2048), (10**6, 2048), (1, 1), (resource.RLIM_INFINITY, 2048)]
)
def test_connections_leave_half_of_the_open_files_for_other_uses(files, most):
    assert connections_within(files, 2048) == most
    assert room_for(16) == 16


def test_what_is_no_address_counts_as_it_is():
    assert site_of("testclient") == "testclient"
    assert ipaddress.ip_address("2001:db8::5") in ipaddress.ip_network(site_of("2001:db8::5%eth0"))
