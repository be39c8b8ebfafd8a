"""A port to listen on, or a sentence why not. Next: serving.py and gateway.py, which answer on it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from blocktrain.errors import ConfigError


@contextmanager
def listening(host: str, port: int, occupant: str) -> Iterator[socket.socket]:
    """Port 0 takes a free one. `occupant` is who may be there already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = f"end what listens there ({occupant}?), or give another with --port"
            raise ConfigError(f"port {port} on {host} is taken: {remedy}") from None
        detail = error.strerror or error
        raise ConfigError(
            f"--host {host} cannot be listened on, port {port} ({detail}): give an address of this machine"
        ) from None
    with listener:
        # Accepted connections inherit it. asyncio sets it only where a socket names its protocol, which these do not;
        # without it the last part of an answer waits for the other end's delayed acknowledgement, 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener
