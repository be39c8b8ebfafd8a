"""Serves an app over HTTP: the listening socket, TLS, uvicorn and a graceful shutdown. Knows no routes.
Next: protocol.py, which reads requests; middleware.py, which every request passes first."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from blocktrain.errors import ConfigError
from blocktrain.http.limits import LOOPBACK, HttpLimits, Listener
from blocktrain.http.protocol import BoundedProtocol

GRACE_S = 5  # for requests under way at shutdown
TICKS_PER_CHECK = 5  # uvicorn ticks ten times per second


@dataclass(frozen=True)
class Tls:
    """The files of a certificate and its key."""

    cert: Path
    key: Path
    fingerprint: str | None  # of a self-signed certificate, which clients then pin


@contextmanager
def listening(host: str, port: int, occupant: str) -> Iterator[Listener]:
    """A listening socket. Port 0 takes a free port. `occupant` names what may already listen there, for the error."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = Listener(fileno=socket.create_server((host, port), family=family, backlog=512).detach())
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = f"stop what listens there ({occupant}?), or choose another port with --port"
            raise ConfigError(f"port {port} on {host} is taken: {remedy}") from None
        detail = error.strerror or error
        raise ConfigError(
            f"cannot listen on --host {host}, port {port} ({detail}): give an address of this machine"
        ) from None
    with listener:
        # Accepted connections inherit it. asyncio sets it only on sockets that name their protocol, which these do not.
        # Without it, the last part of an answer waits 40 ms for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


def end_on_shutdown(app: FastAPI, end: Callable[[], None]) -> None:
    """At shutdown the server calls `end`, which ends requests that the app holds open, such as streams and long polls.
    Without it, the server waits for them until the grace period is over."""
    app.state.ends_on_shutdown = [*getattr(app.state, "ends_on_shutdown", ()), end]


def serve(
    app: ASGIApp,
    listener: Listener,
    *,
    tls: Tls | None = None,
    limits: HttpLimits | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, then raises the signal again for the caller's own handler."""
    _Server(app, tls, limits, GRACE_S).run(sockets=[listener])


async def serve_until_cancelled(
    app: ASGIApp,
    listener: Listener,
    *,
    tls: Tls | None = None,
    limits: HttpLimits | None = None,
) -> None:
    """Serves until cancelled. The caller handles signals."""
    server = _Server(app, tls, limits, GRACE_S, handles_signals=False)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        await serving


@dataclass(frozen=True)
class RunningServer:
    """A server in a thread. `stop` requests a graceful shutdown and returns at once."""

    port: int
    url: str
    stop: Callable[[], None]


@contextmanager
def served_in_thread(
    app: ASGIApp,
    listener: Listener | None = None,
    *,
    tls: Tls | None = None,
    limits: HttpLimits | None = None,
    grace_s: int = GRACE_S,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[RunningServer]:
    """Serves from a thread while the `with` block runs: on `listener`, or else on a free port of this machine. `clock`
    measures how long clients make the server wait."""
    with ExitStack() as stack:
        listener = listener or stack.enter_context(listening(LOOPBACK, 0, "nobody"))
        server = _Server(app, tls, limits, grace_s, handles_signals=False, clock=clock)

        def stop() -> None:
            server.should_exit = True

        host, port = listener.getsockname()[:2]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http server", daemon=True)
        thread.start()
        try:
            yield RunningServer(port, f"{'https' if tls else 'http'}://{host}:{port}", stop)
        finally:
            stop()
            thread.join()


class _Server(uvicorn.Server):
    def __init__(
        self,
        app: ASGIApp,
        tls: Tls | None,
        limits: HttpLimits | None,
        grace_s: int,
        *,
        handles_signals: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._limits, self._handles_signals, self._clock = (
            app,
            limits or HttpLimits(),
            handles_signals,
            clock,
        )
        config = uvicorn.Config(
            app,
            log_level="error",
            lifespan="off",
            loop="asyncio",  # others do not ask the listener to accept
            ws="none",  # a web socket would leave the protocol and its bounds
            timeout_keep_alive=self._limits.idle_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=grace_s,
            proxy_headers=bool(self._limits.trusted_proxies),
            forwarded_allow_ips=list(self._limits.trusted_proxies),
            ssl_certfile=tls.cert if tls else None,
            ssl_keyfile=tls.key if tls else None,
        )
        try:
            config.load()
        except (ssl.SSLError, OSError) as error:
            if tls is None:
                raise
            problem = f"{tls.cert} and {tls.key} are not a certificate and its key ({error})"
            raise ConfigError(f"{problem}: give PEM files that belong together") from None
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Instead of uvicorn's own, which bounds neither connections nor handshakes."""
        loop, self.servers = asyncio.get_running_loop(), []
        protocol = partial(BoundedProtocol, self.config, self.server_state, self._limits)
        context = self.config.ssl
        handshake_s = self._limits.header_s if context else None
        for listener in sockets or ():
            assert isinstance(listener, Listener)
            listener.bound(self._limits, tls=context is not None)
            server = await loop.create_server(
                protocol, sock=listener, ssl=context, ssl_handshake_timeout=handshake_s, backlog=self.config.backlog
            )
            self.servers.append(server)
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_CHECK == 0:
            now_s = self._clock()
            for connection in list(self.server_state.connections):
                assert isinstance(connection, BoundedProtocol)
                connection.check(now_s)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for end in getattr(getattr(self._app, "state", None), "ends_on_shutdown", ()):
            end()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if not self._handles_signals:
            yield
            return
        with super().capture_signals():
            yield
