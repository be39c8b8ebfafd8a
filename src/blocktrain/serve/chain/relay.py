"""The relay: stages behind routers are reached through connections that they open themselves. A stage keeps some idle
connections to the relay of a gateway. A caller, which is the gateway or another stage, asks the relay for the stage's
name in SOCKS5; the relay joins the caller's connection to an idle one. What passes is encrypted from end to end with
the key of the chain: the relay cannot read it. Next: tunnel.py, the caller's side.

    stage   "B", then after 32 random bytes of the relay: HMAC-SHA256, instance (16 bytes), length of the name, name
    relay   "+" (or "-": wrong key, "=": the name is taken), then 0 now and then while idle, then 1 for a caller
    caller  a SOCKS5 CONNECT without authentication, by name"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from blocktrain.errors import ConfigError
from blocktrain.serve.chain.sockets import RELAYED, ChainKey, parse_address
from blocktrain.serve.chain.tunnel import (
    BROKEN,
    BY_NAME,
    CONNECT,
    DONE,
    HANDSHAKE_S,
    NO_LOGIN,
    SOCKS,
    UNKNOWN_COMMAND,
    UNKNOWN_KIND,
    UNREACHABLE,
    Streams,
    join,
    notice_death,
)

STAGE = b"B"
ACCEPTED, WRONG_KEY, NAME_TAKEN = b"+", b"-", b"="
IDLE, CALLED = b"\x00", b"\x01"
NAME = re.compile(r"[a-z0-9-]{1,40}")
NONCE_BYTES, PROOF_BYTES, INSTANCE_BYTES = 32, 32, 16
IDLE_EVERY_S, SILENT_AFTER_S = 10.0, 35.0
SPARES = 3  # idle connections of a stage: the gateway and the stage before it call it, and one of them may reconnect
MAX_IDLE, MAX_CONNECTIONS = 16, 4096
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


def relayed_address(name: str) -> str:
    """The address of a stage that a relay reaches by this name."""
    if not NAME.fullmatch(name):
        raise ConfigError(f'--name "{name}" is not a valid stage name: use up to 40 small letters, digits and hyphens')
    return f"tcp://{name}{RELAYED}:1"


def proof(key: ChainKey | None, nonce: bytes, claim: bytes) -> bytes:
    return hmac.digest(key.secret if key else b"", nonce + claim, hashlib.sha256)


@dataclass(frozen=True)
class Call:
    """A caller's connection, and whether it is over."""

    streams: Streams
    over: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Reachable:
    """A stage that keeps connections here. A caller puts its call into one that is idle."""

    instance: bytes
    connections: int = 0
    idle: deque[asyncio.Future[Call]] = field(default_factory=deque)


class Relay:
    """Used as an async context manager. `address` is where callers on this machine reach it."""

    def __init__(self, listen: str, key: ChainKey | None) -> None:
        self._host, port = parse_address(listen, listen=True)
        self._port, self._key = 0 if port == "*" else int(port), key
        self._stages: dict[str, Reachable] = {}
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(self._accept, self._host, self._port)
        except OSError as error:
            where = f"tcp://{self._host}:{self._port}"
            raise ConfigError(
                f"--relay {where} cannot be listened on ({error.strerror}): end what listens there, or give another "
                f"port"
            ) from None
        self.port = int(self._server.sockets[0].getsockname()[1])
        host = "127.0.0.1" if self._host in ("0.0.0.0", "*") else self._host
        self.address = f"{host}:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in tuple(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            if len(self._open) <= MAX_CONNECTIONS:
                notice_death(writer)
                await self._serve((reader, writer))
        except (*BROKEN, asyncio.CancelledError):
            pass  # the peer is gone, or the relay ends
        finally:
            self._open.discard(task)
            writer.close()

    async def _serve(self, streams: Streams) -> None:
        async with asyncio.timeout(HANDSHAKE_S):
            kind = await streams[0].readexactly(1)
            name = await self._registered(streams) if kind == STAGE else None
            idle = await self._called(streams) if kind == SOCKS else None
        if name is not None:
            try:
                await self._keep(self._stages[name], streams)
            finally:
                if not self._stages[name].connections:
                    del self._stages[name]
        if idle is not None:
            call = Call(streams)
            idle.set_result(call)
            await call.over.wait()

    async def _registered(self, streams: Streams) -> str | None:
        """The name, if the stage has the key of the chain and no other stage has the name."""
        reader, writer = streams
        nonce = os.urandom(NONCE_BYTES)
        writer.write(nonce)
        shown, claim = await reader.readexactly(PROOF_BYTES), await reader.readexactly(INSTANCE_BYTES + 1)
        claim += await reader.readexactly(claim[-1])
        instance, name = claim[:INSTANCE_BYTES], claim[INSTANCE_BYTES + 1 :].decode("ascii", "replace")
        if not hmac.compare_digest(shown, proof(self._key, nonce, claim)) or not NAME.fullmatch(name):
            writer.write(WRONG_KEY)
            return None
        stage = self._stages.setdefault(name, Reachable(instance))
        if stage.instance != instance or len(stage.idle) >= MAX_IDLE:
            writer.write(NAME_TAKEN)
            return None
        writer.write(ACCEPTED)
        stage.connections += 1
        return name

    async def _keep(self, stage: Reachable, streams: Streams) -> None:
        """Until a caller has used the connection and both are done, or the stage is gone."""
        called: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        gone = asyncio.ensure_future(streams[0].read(1))  # it says nothing before it is called
        stage.idle.append(called)
        ends: list[asyncio.Future[Any]] = [called, gone]
        try:
            while not called.done() and not gone.done():
                streams[1].write(IDLE)
                await asyncio.wait(ends, timeout=IDLE_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
            if not gone.done():
                gone.cancel()
                await asyncio.wait([gone])
                streams[1].write(CALLED)
                await join(streams, called.result().streams)
        finally:
            gone.cancel()
            stage.connections -= 1
            with suppress(ValueError):
                stage.idle.remove(called)
            if called.done():
                called.result().over.set()

    async def _called(self, streams: Streams) -> asyncio.Future[Call] | None:
        """Answers in SOCKS5. Returns an idle connection of the stage that the caller names."""
        reader, writer = streams
        await reader.readexactly((await reader.readexactly(1))[0])  # the ways to log in; none is needed
        writer.write(SOCKS + NO_LOGIN)
        _, command, _, kind = await reader.readexactly(4)
        if command != CONNECT or kind != BY_NAME:
            _answer(writer, UNKNOWN_COMMAND if command != CONNECT else UNKNOWN_KIND)
            return None
        host = (await reader.readexactly((await reader.readexactly(1))[0])).decode("ascii", "replace")
        await reader.readexactly(2)  # the port, which a relayed stage has not
        stage = self._stages.get(host.removesuffix(RELAYED))
        if stage is None or not stage.idle:
            _answer(writer, UNREACHABLE)  # the caller tries again
            return None
        _answer(writer, DONE)
        return stage.idle.popleft()


class Dialer:
    """A stage's side: keeps idle connections to the relay, and joins one that is called to the stage's own socket.
    Tells `say` once when the relay does not answer, and once when it does again."""

    def __init__(
        self, relay: str, name: str, target: str, key: ChainKey | None, say: Callable[[str], None] = lambda line: None
    ) -> None:
        self._relay, self._name, self._key, self._say = relay, name, key, say
        self._target, self._instance, self._complaint = parse_address(target), os.urandom(INSTANCE_BYTES), ""

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(SPARES):
                group.create_task(self._dial_always(group))

    async def _dial_always(self, group: asyncio.TaskGroup) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                streams = await self._called()
            except BROKEN as error:
                self._note(f"the relay at {self._relay} does not answer ({_reason(error)}): trying again until it does")
            except ConfigError as error:
                self._note(str(error))
            else:
                pause_s = FIRST_PAUSE_S
                group.create_task(self._connect(streams))
                continue
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _called(self) -> Streams:
        """A connection on which a caller is there now."""
        host, port = parse_address(self._relay)
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(host, int(port))
        try:
            notice_death(writer)
            async with asyncio.timeout(HANDSHAKE_S):
                await self._introduce(reader, writer)
            if self._complaint:
                self._say(f"the relay at {self._relay} answers again")
            self._complaint = ""
            while True:
                async with asyncio.timeout(SILENT_AFTER_S):
                    if await reader.readexactly(1) == CALLED:
                        return reader, writer
        except BaseException:
            writer.close()
            raise

    async def _introduce(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STAGE)
        nonce = await reader.readexactly(NONCE_BYTES)
        claim = self._instance + bytes([len(self._name)]) + self._name.encode()
        writer.write(proof(self._key, nonce, claim) + claim)
        answer = await reader.readexactly(1)
        if answer == NAME_TAKEN:
            raise ConfigError(
                f'the relay at {self._relay} has another stage "{self._name}": end that one, or give this one another '
                f"--name"
            )
        if answer != ACCEPTED:
            raise ConfigError(
                f"the relay at {self._relay} refuses our key: give the stage and the gateway the same --keys file, or "
                f"none to both"
            )

    async def _connect(self, called: Streams) -> None:
        try:
            own = await asyncio.open_connection(self._target[0], int(self._target[1]))
        except OSError:
            called[1].close()  # the stage ends
            return
        await join(called, own)

    def _note(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._say(complaint)
        self._complaint = complaint


def _answer(writer: asyncio.StreamWriter, code: int) -> None:
    writer.write(SOCKS + bytes([code, 0, 1, 0, 0, 0, 0, 0, 0]))


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "it closed the connection" if isinstance(error, EOFError) else "no answer in time"
