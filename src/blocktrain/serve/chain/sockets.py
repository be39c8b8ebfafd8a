"""ZeroMQ sockets between a gateway and stages: addresses, the shared key of a chain, and the state of a connection.
zmq's own errors stop here. A chain has one CURVE key pair in one file; every host of the chain has a copy. Stages
listen with it and callers show it. Next: stage.py listens, links.py connects."""

from __future__ import annotations

import re
import tomllib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from blocktrain.errors import ConfigError, StageUnreachable
from blocktrain.http.limits import is_loopback
from blocktrain.serve.chain.event_socket import EventSocket
from blocktrain.serve.chain.tunnel import Tunnel

MAX_PAYLOAD_BYTES = 2**28  # of one frame
ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(\d{1,5}|\*)")
ANY_PORT = ("*", "0")
RELAYED = ".via"  # ends the name of a host that a relay reaches
HIGHEST_PORT = 65535
KEY_TEXT = """\
# The key of a chain of blocktrain stages. Anyone who has it can call the stages and pass for one: keep it private.
public = "{public}"
secret = "{secret}"
"""

LinkState = Literal["silent", "reached", "refused", "up"]  # no TCP; TCP only; handshake failed; handshake done

ALIVE_EVERY_MS, DEAD_AFTER_MS = 5_000, 20_000
RECONNECT_MS, LONGEST_RECONNECT_MS = 50, 2_000
DOMAIN = "chain"  # of ZAP, ZeroMQ's authentication protocol
MAX_QUEUED = 1_000  # messages in each direction
LINK_STATES: dict[int, LinkState] = {
    zmq.EVENT_CONNECT_RETRIED: "silent",
    zmq.EVENT_CONNECTED: "reached",
    zmq.EVENT_DISCONNECTED: "silent",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "up",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "refused",
}


@dataclass(frozen=True)
class ChainKey:
    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "ChainKey(…)"  # keeps the secret out of logs


def new_key_text() -> str:
    public, secret = zmq.curve_keypair()
    return KEY_TEXT.format(public=public.decode(), secret=secret.decode())


def read_key(path: Path) -> ChainKey:
    try:
        table = tomllib.loads(path.read_text(encoding="ascii"))
        key = ChainKey(str(table["public"]).encode(), str(table["secret"]).encode())
        fits = zmq.curve_public(key.secret) == key.public
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}): make one with blocktrain keys {path} and copy it to all hosts"
        ) from None
    except (ValueError, KeyError, zmq.ZMQError):
        fits = False
    if not fits:
        raise ConfigError(f"{path} is not a key that blocktrain keys wrote: copy it again from another host")
    return key


@lru_cache(maxsize=1024)  # a stage reads the next one's with every traversal
def parse_address(text: str, *, listen: bool = False) -> tuple[str, str]:
    """Host and port. Raises ConfigError."""
    found = ADDRESS.fullmatch(text)
    if found is None or (found[2] != "*" and int(found[2]) > HIGHEST_PORT):
        raise ConfigError(f'"{text}" is not an address of a stage: write for example tcp://192.168.1.7:7001')
    if found[2] in ANY_PORT and not listen:
        raise ConfigError(f'"{text}" names no port: write for example tcp://192.168.1.7:7001')
    return found[1].strip("[]"), found[2]


def require_key(address: str, key: ChainKey | None, insecure: bool, *, listen: bool = False) -> None:
    """Raises ConfigError for another host without a key: anyone on the network could call, answer and listen."""
    host, _ = parse_address(address, listen=listen)
    if key is None and not insecure and not _is_here(host):
        raise ConfigError(
            f"{address} is not on this machine and would be open to everyone: make a key with blocktrain keys "
            f"chain.key, copy it to all hosts and give --keys chain.key everywhere (or --insecure on a trusted network)"
        )


_is_here = lru_cache(maxsize=1024)(is_loopback)


@dataclass(frozen=True)
class _OnlyThisKey:
    """Answers ZAP, which asks for every caller whether its key is known."""

    public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


class Network:
    """One ZeroMQ context. Opened inside a running event loop; closing it closes all of its sockets."""

    def __init__(self, key: ChainKey | None, relay: str | None = None) -> None:
        self.key, self._relay = key, relay
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self._open: set[EventSocket] = set()
        self._tunnels: dict[EventSocket, Tunnel] = {}
        self._guard: Any = None
        if key is not None:
            self._guard = AsyncioAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve_callback(DOMAIN, _OnlyThisKey(key.public))

    def listen(self, address: str) -> tuple[EventSocket, str]:
        """A ROUTER socket, and its address with the actual port."""
        opened = self._socket(zmq.ROUTER, address)
        socket = opened.plain
        socket.set(zmq.ROUTER_MANDATORY, 1)  # sending to an unknown peer is an error
        socket.set(zmq.ROUTER_HANDOVER, 1)  # a gateway that reconnects keeps its routing id
        if self.key is not None:
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.CURVE_SECRETKEY, self.key.secret)
            socket.set(zmq.ZAP_DOMAIN, DOMAIN.encode())
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self.close_socket(opened)
            remedy = (
                "end what listens there, or give another port"
                if error.errno == zmq.EADDRINUSE
                else "correct the address"
            )
            raise ConfigError(f"{address} cannot be listened on ({_reason(error)}): {remedy}") from None
        return opened, socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def connect(self, address: str, identity: bytes | None = None) -> EventSocket:
        """A DEALER socket that accepts messages only while the other side is connected. The caller connects it: to its
        tunnel if it has one."""
        host, _ = parse_address(address)
        relayed = host.endswith(RELAYED)
        if relayed and self._relay is None:
            raise StageUnreachable(
                f"{address} is behind a relay: give the gateway --relay, and every stage of its chain --via"
            )
        opened = self._socket(zmq.DEALER, address)
        socket = opened.plain
        socket.set(zmq.IMMEDIATE, 1)
        if relayed and self._relay is not None:
            self._tunnels[opened] = Tunnel(self._relay, host)
        if identity is not None:
            socket.set(zmq.ROUTING_ID, identity)
        if self.key is not None:
            socket.set(zmq.CURVE_SERVERKEY, self.key.public)
            socket.set(zmq.CURVE_PUBLICKEY, self.key.public)
            socket.set(zmq.CURVE_SECRETKEY, self.key.secret)
        return opened

    def tunnel(self, socket: EventSocket) -> Tunnel | None:
        """How the socket reaches a stage behind the relay."""
        return self._tunnels.get(socket)

    def close_socket(self, socket: EventSocket) -> None:
        self._open.discard(socket)
        if (tunnel := self._tunnels.pop(socket, None)) is not None:
            tunnel.close()
        with suppress(zmq.ZMQError):
            socket.plain.disable_monitor()
        socket.close()

    def close(self) -> None:
        for socket in tuple(self._open):
            self.close_socket(socket)
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger=0)

    def _socket(self, kind: int, address: str) -> EventSocket:
        host, _ = parse_address(address, listen=True)
        socket: zmq.Socket[bytes] = zmq.Socket(self._context, kind)
        opened = EventSocket(socket)
        self._open.add(opened)
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
        return opened


async def link_states(socket: EventSocket, address: str, tunnel: Tunnel | None) -> AsyncIterator[LinkState]:
    """Connects and yields every change of the connection. ZeroMQ reports a refused handshake in no other way. A stage
    that the tunnel does not reach is silent, although the tunnel takes the connection."""
    monitor: Any = socket.plain.get_monitor_socket(sum(LINK_STATES))
    with zmq_errors(address):
        socket.connect(tunnel.address if tunnel else address)
    while True:
        event = await recv_monitor_message(monitor)
        yield "silent" if tunnel and not tunnel.joined else LINK_STATES[event["event"]]


async def send(socket: EventSocket, frames: Sequence[bytes], to: str) -> None:
    """Waits while the other side is away or slow. The caller sets the time limit."""
    with zmq_errors(to):
        await socket.send(frames)


def posted(socket: EventSocket, frames: Sequence[bytes], to: str) -> bool:
    """Sends at once, or returns False."""
    try:
        return socket.post(frames)
    except zmq.ZMQError as error:
        raise _unreachable(to, error) from None


def post(socket: EventSocket, frames: Sequence[bytes], to: str) -> None:
    """Sends at once, or raises StageUnreachable."""
    if not posted(socket, frames, to):
        raise StageUnreachable(f"{to} takes no messages now: try again")


@contextmanager
def zmq_errors(address: str) -> Iterator[None]:
    try:
        yield
    except zmq.ZMQError as error:
        raise _unreachable(address, error) from None


def _unreachable(address: str, error: zmq.ZMQError) -> StageUnreachable:
    return StageUnreachable(f"{address} cannot be reached ({_reason(error)}): check that it runs")


def _reason(error: zmq.ZMQError) -> str:
    return error.strerror or str(error)
