"""What one HTTP client may take: sizes, times and connections. Bounds for all, and one listening socket that enforces
the number of connections. Knows no requests. Next: protocol.py, which enforces the rest."""

from __future__ import annotations

import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from blocktrain.errors import ConfigError
from blocktrain.logs import SparingLog

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
LOOPBACK = "127.0.0.1"
IPV6_SITE_BITS = 64  # one customer of a provider has at least that much, so it counts as one address
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class HttpLimits:
    """Bodies are bounded by progress and not by time, so that large uploads over slow links arrive."""

    max_header_bytes: int = 32 * 1024  # request line and headers
    max_headers: int = 100
    header_s: float = 15.0  # for a TLS handshake, and for the request line and headers
    idle_s: float = 30.0  # between two requests of one connection
    progress_s: float = 30.0  # in each such span, a body must bring `progress_bytes` or its end
    progress_bytes: int = 4096
    unread_s: float = 60.0  # for a client that does not read its answer
    max_connections: int = 2048
    max_connections_per_address: int = 512
    trusted_proxies: tuple[str, ...] = ()  # addresses or networks whose X-Forwarded-For is believed

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_connections_per_address"):
            if getattr(self, name) < 1:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} {getattr(self, name)} is too small: give 1 or more")
        _networks(self.trusted_proxies)


def _networks(proxies: Sequence[str]) -> list[Network]:
    try:
        return [ipaddress.ip_network(proxy) for proxy in proxies]
    except ValueError as error:
        raise ConfigError(f"--trusted-proxy: {error}: give an IP address or a network like 10.0.0.0/8") from None


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@lru_cache(maxsize=4096)
def site_of(address: str) -> str:
    """What counts as one address: an IPv4 address, or the network of an IPv6 customer."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, IPV6_SITE_BITS), strict=False))


def room_for(max_connections: int) -> int:
    """Raises this process's limit of open files if so many connections need it. Returns how many there is room for."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return max_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if connections_within(soft, max_connections) < max_connections:
        most = 2 * max_connections if hard == resource.RLIM_INFINITY else min(2 * max_connections, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return connections_within(soft, max_connections)


def connections_within(open_files: int, max_connections: int) -> int:
    """Half of the files that may be open are left for other uses."""
    import resource

    return max_connections if open_files == resource.RLIM_INFINITY else max(1, min(max_connections, open_files // 2))


class Listener(socket.socket):
    """A listening socket. With `bound`, it refuses connections beyond the limits, before any byte of them is read. This
    machine and trusted proxies speak for many, so the limit per address does not apply to them."""

    _admission: Admission | None = None

    def bound(self, limits: HttpLimits, *, tls: bool) -> None:
        self._admission = Admission(limits, b"" if tls else FULL)

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if self._admission is None:
            return connection, address
        return self._admission.admitted(connection, str(address[0])), address


class Admission:
    """Counts open connections, in all and per address."""

    def __init__(self, limits: HttpLimits, refusal: bytes) -> None:
        self._most, self._most_per_site = room_for(limits.max_connections), limits.max_connections_per_address
        self._refusal, self._log = refusal, SparingLog(__name__)
        self._many = [*_networks(limits.trusted_proxies), *_networks(("127.0.0.0/8", "::1/128"))]
        self._open: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        return self._open.total()

    def admitted(self, connection: socket.socket, address: str) -> socket.socket:
        """The connection, counted until it is closed. BlockingIOError, as if nobody had called, if there are too
        many."""
        site = site_of(address)
        if self.num_open >= self._most:
            raise self._refused(connection, f"{self._most} connections are open")
        if self._open[site] >= self._most_per_site and not self._speaks_for_many(address):
            raise self._refused(connection, f"{site} has {self._most_per_site} connections")
        self._open[site] += 1
        return _Counted(connection, lambda: self._closed(site))

    def _closed(self, site: str) -> None:
        self._open[site] -= 1
        if not self._open[site]:
            del self._open[site]

    def _speaks_for_many(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(parsed, "ipv4_mapped", None) or parsed
        return any(mapped in network for network in self._many)

    def _refused(self, connection: socket.socket, reason: str) -> BlockingIOError:
        with connection, suppress(OSError):
            connection.setblocking(False)
            connection.send(self._refusal)
        self._log.warning(f"a connection was refused: {reason}")
        return BlockingIOError(reason)


class _Counted(socket.socket):
    """An accepted connection that says when it is closed."""

    def __init__(self, accepted: socket.socket, on_close: Callable[[], None]) -> None:
        family, kind, proto, timeout = accepted.family, accepted.type, accepted.proto, accepted.gettimeout()
        super().__init__(family, kind, proto, fileno=accepted.detach())
        self.settimeout(timeout)
        self._on_close: Callable[[], None] | None = on_close

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
        super().close()
