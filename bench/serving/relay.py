"""Links with a distance: a TCP relay in front of every stage, which delays each direction by half a round trip, limits
its rate and counts its bytes. A process of its own, so that nobody's computing delays the clock of the links.

    python bench/serving/relay.py RATE_BITS LISTEN=TARGET …     # told "RTT_MS" a line, answers with the bytes so far"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

CHUNK_BYTES = 2**16
Host = tuple[str, int]


@dataclass
class Distance:
    """What all links share; the round-trip time may change at any moment."""

    rate_bits: float
    rtt_s: float = 0.0
    num_bytes: int = 0  # both directions of all links


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, distance: Distance) -> None:
    """One direction. Bytes leave one after the other at the link's rate and arrive half a round trip later; any number
    may be on the way."""
    on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    delivering = asyncio.create_task(deliver(on_the_way, writer))
    free_s = 0.0
    try:
        while data := await reader.read(CHUNK_BYTES):
            free_s = max(free_s, time.monotonic()) + 8 * len(data) / distance.rate_bits
            distance.num_bytes += len(data)
            on_the_way.put_nowait((free_s + distance.rtt_s / 2, data))
    except OSError:
        pass
    finally:
        on_the_way.put_nowait((0.0, b""))
        await delivering


async def deliver(on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while True:
            due_s, data = await on_the_way.get()
            if not data:
                break
            await asyncio.sleep(due_s - time.monotonic())
            writer.write(data)
            await writer.drain()
    writer.close()


async def relay(listen: Host, target: Host, distance: Distance) -> asyncio.Server:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*target)
        except OSError:
            writer.close()
            return
        with suppress(asyncio.CancelledError):  # the experiment is over
            await asyncio.gather(carry(reader, far_writer, distance), carry(far_reader, writer, distance))

    return await asyncio.start_server(connected, *listen)


async def serve(rate_bits: float, pairs: Sequence[tuple[Host, Host]]) -> None:
    """Says where it listens, then obeys lines from stdin until it is closed."""
    distance = Distance(rate_bits)
    servers = [await relay(listen, target, distance) for listen, target in pairs]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        distance.rtt_s = float(line) / 1000
        print(distance.num_bytes, flush=True)


# --- the other side --------------------------------------------------------------------------------------------------


class Links:
    """The relays as the experiment sees them."""

    def __init__(self, process: subprocess.Popen[str], addresses: Sequence[str], targets: Sequence[str]) -> None:
        self.addresses, self.targets = tuple(addresses), tuple(targets)
        self._process, self._rtt_ms = process, 0.0

    def set_rtt(self, rtt_ms: float) -> None:
        self._rtt_ms = rtt_ms
        self.num_bytes()

    def num_bytes(self) -> int:
        """On all links since the start, heartbeats and ZeroMQ's framing included."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{self._rtt_ms}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@contextmanager
def links_to(
    stages: Sequence[str], rate_bits: float, *, listen: str | None = None, within: Sequence[str] = ()
) -> Iterator[Links]:
    """A relay for each address: on the same host, or listening on another, `within` whose namespace it is started."""
    hosts = [address.removeprefix("tcp://").rpartition(":") for address in stages]
    pairs = [f"{listen or host}:0={host}:{port}" for host, _, port in hosts]
    command = [*within, sys.executable, __file__, str(rate_bits), *pairs]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ports = process.stdout.readline().split()
        addresses = [f"tcp://{listen or host}:{port}" for (host, _, _), port in zip(hosts, ports, strict=True)]
        yield Links(process, addresses, stages)
        assert process.stdin is not None
        process.stdin.close()


def _host(text: str) -> Host:
    host, _, port = text.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    rate, *given = sys.argv[1:]
    asyncio.run(
        serve(float(rate), [(_host(here), _host(there)) for here, _, there in (p.partition("=") for p in given)])
    )
