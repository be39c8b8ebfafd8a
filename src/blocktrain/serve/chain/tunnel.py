"""A tunnel: a port of this machine whose connections lead to one stage through the relay, asked for by name in SOCKS5.
ZeroMQ connects to it instead of using its own SOCKS5 client: that one ends the process if a socket is closed after
the relay has died or refused (libzmq 4.3.5). Next: relay.py, the other side; sockets.py, which opens tunnels."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

SOCKS, NO_LOGIN = b"\x05", b"\x00"
CONNECT, BY_NAME = 1, 3
DONE, UNREACHABLE, UNKNOWN_COMMAND, UNKNOWN_KIND = 0, 4, 7, 8  # answers of SOCKS5
ANSWER_BYTES = 12  # to the login, and to the request
ANY_STAGE_PORT = b"\x00\x01"  # the relay goes by the name
HANDSHAKE_S = 10.0
GONE_AFTER_MS = 30_000  # a peer that acknowledges no bytes for this time is gone
CHUNK_BYTES = 2**16
BROKEN = (OSError, EOFError, TimeoutError)  # asyncio.IncompleteReadError is an EOFError

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Tunnel:
    """Opened inside a running event loop. `joined`: the newest connection has reached the stage."""

    def __init__(self, relay: str, host: str) -> None:
        self._relay, self._host, self.joined = relay, host, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        listening = asyncio.get_running_loop().create_task(self._listen())
        listening.add_done_callback(lambda _: self._listener.close())  # it may be cancelled before it starts
        self._tasks = {listening}

    def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._accept, sock=self._listener)
        try:
            await server.serve_forever()
        finally:
            server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.joined = False
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                streams = await call(self._relay, self._host)
            self.joined = True
            await join((reader, writer), streams)
        except (*BROKEN, asyncio.CancelledError):
            pass  # ZeroMQ tries again, or the tunnel closes
        finally:
            self._tasks.discard(task)
            writer.close()


async def call(relay: str, host: str) -> Streams:
    """A connection to the stage with this host name. Raises one of BROKEN."""
    relay_host, _, port = relay.rpartition(":")
    reader, writer = await asyncio.open_connection(relay_host.strip("[]"), int(port))
    try:
        notice_death(writer)
        name = host.encode("ascii")
        request = SOCKS + bytes([CONNECT, 0, BY_NAME, len(name)]) + name + ANY_STAGE_PORT
        writer.write(SOCKS + bytes([len(NO_LOGIN)]) + NO_LOGIN + request)  # without waiting for the first answer
        answer = await reader.readexactly(ANSWER_BYTES)
        if answer[3] != DONE:
            raise ConnectionRefusedError("the relay has no such stage now")
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def join(one: Streams, other: Streams) -> None:
    """Passes bytes both ways until one side ends, then closes both."""
    pumps = [asyncio.create_task(_pump(one[0], other[1])), asyncio.create_task(_pump(other[0], one[1]))]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for pump in pumps:
            pump.cancel()
        one[1].close()
        other[1].close()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


def notice_death(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_AFTER_MS)
