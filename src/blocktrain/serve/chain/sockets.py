"""The border to ZeroMQ: one context with the chain's key, sockets with their bounds, and what a connection is going
through. zmq's own errors stop here. Next: stage.py listens with it, links.py connects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from blocktrain.errors import ConfigError, StageUnreachable
from blocktrain.serve.chain.frames import MAX_PAYLOAD_BYTES
from blocktrain.serve.chain.keys import ChainKey, parse_address

Socket = zmq.asyncio.Socket
Standing = Literal["silent", "reached", "refused", "up"]  # no TCP; TCP only; handshake failed; handshake done

ALIVE_EVERY_MS, DEAD_AFTER_MS = 5_000, 20_000
RECONNECT_MS, LONGEST_RECONNECT_MS = 50, 2_000
DOMAIN = "chain"  # of ZAP, which asks whether a caller's key is known
MAX_QUEUED = 1_000  # messages each way
STANDINGS: dict[int, Standing] = {
    zmq.EVENT_CONNECT_RETRIED: "silent",
    zmq.EVENT_CONNECTED: "reached",
    zmq.EVENT_DISCONNECTED: "silent",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "up",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "refused",
}


@dataclass(frozen=True)
class _OnlyThisKey:
    """ZAP's question for each caller: is this one of us?"""

    public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


class Network:
    """Opened inside a running event loop; closing it closes all of its sockets."""

    def __init__(self, key: ChainKey | None) -> None:
        self.key = key
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self._open: set[Socket] = set()
        self._guard: Any = None
        if key is not None:
            self._guard = AsyncioAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve_callback(DOMAIN, _OnlyThisKey(key.public))

    def listen(self, address: str) -> tuple[Socket, str]:
        """A ROUTER, and the address with the port it got."""
        socket = self._socket(zmq.ROUTER, address)
        socket.set(zmq.ROUTER_MANDATORY, 1)  # an answer to nobody is an error, not silence
        socket.set(zmq.ROUTER_HANDOVER, 1)  # a gateway that connects anew takes its name with it
        if self.key is not None:
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.CURVE_SECRETKEY, self.key.secret)
            socket.set(zmq.ZAP_DOMAIN, DOMAIN.encode())
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self.close_socket(socket)
            remedy = "end what listens there, or give another port" if error.errno == zmq.EADDRINUSE else "mend it"
            raise ConfigError(f"{address} cannot be listened on ({_reason(error)}): {remedy}") from None
        return socket, socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def connect(self, address: str, identity: bytes | None = None) -> Socket:
        """A DEALER that takes messages only while the other side is there."""
        socket = self._socket(zmq.DEALER, address)
        socket.set(zmq.IMMEDIATE, 1)
        if identity is not None:
            socket.set(zmq.ROUTING_ID, identity)
        if self.key is not None:
            socket.set(zmq.CURVE_SERVERKEY, self.key.public)
            socket.set(zmq.CURVE_PUBLICKEY, self.key.public)
            socket.set(zmq.CURVE_SECRETKEY, self.key.secret)
        return socket

    def close_socket(self, socket: Socket) -> None:
        self._open.discard(socket)
        with suppress(zmq.ZMQError):
            socket.disable_monitor()
        socket.close(linger=0)

    def close(self) -> None:
        for socket in tuple(self._open):
            self.close_socket(socket)
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger=0)

    def _socket(self, kind: int, address: str) -> Socket:
        host, _ = parse_address(address, listen=True)
        socket = self._context.socket(kind)
        self._open.add(socket)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES),
            (zmq.SNDHWM, MAX_QUEUED),
            (zmq.RCVHWM, MAX_QUEUED),
            (zmq.HEARTBEAT_IVL, ALIVE_EVERY_MS),
            (zmq.HEARTBEAT_TIMEOUT, DEAD_AFTER_MS),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, LONGEST_RECONNECT_MS),
            (zmq.IPV6, int(":" in host)),
        ):
            socket.set(option, value)
        return socket


async def standings(socket: Socket, address: str) -> AsyncIterator[Standing]:
    """Connects, and tells from then on how the connection stands, since a refused handshake is silent otherwise."""
    monitor: Any = socket.get_monitor_socket(sum(STANDINGS))
    with zmq_errors(address):
        socket.connect(address)
    while True:
        event = await recv_monitor_message(monitor)
        yield STANDINGS[event["event"]]


async def send(socket: Socket, frames: Sequence[bytes], to: str) -> None:
    """Waits while the other side is away or slow; the caller bounds the wait."""
    with zmq_errors(to):
        await socket.send_multipart(frames)


def post(socket: Socket, frames: Sequence[bytes], to: str) -> None:
    """At once or not at all."""
    with zmq_errors(to):
        sent: Any = socket.send_multipart(frames, flags=zmq.NOBLOCK)
        if sent.done():
            sent.result()
        else:
            sent.cancel()
            raise StageUnreachable(f"{to} takes no messages now: try again")


@contextmanager
def zmq_errors(address: str) -> Iterator[None]:
    try:
        yield
    except zmq.ZMQError as error:
        raise StageUnreachable(f"{address} cannot be reached ({_reason(error)}): check that it runs") from None


def _reason(error: zmq.ZMQError) -> str:
    return error.strerror or str(error)
