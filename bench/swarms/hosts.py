"""Hosts with addresses and links of their own on one machine: a network namespace for the coordinator and one for each
worker, joined by virtual Ethernet cables that the kernel counts the bytes of. Without root, or without Linux, hosts are
loopback addresses and nothing is counted. Next: run.py, which trains on them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

BENCHMARKS = "198.18"  # addresses that RFC 2544 sets aside for measurements: nobody's own
WATCHERS = "198.19"
LOOPBACK = "127.0.0.1"
Traffic = dict[str, tuple[int, int]]  # host: bytes up to the coordinator and down from it, headers included


@dataclass(frozen=True)
class Host:
    """`within` starts a command on the host; the coordinator is reached under `coordinator`."""

    name: str
    coordinator: str
    listen: str  # where a relay of the host may listen
    within: tuple[str, ...] = ()


@dataclass(frozen=True)
class Network:
    hosts: tuple[Host, ...]
    listen: str  # of the coordinator
    public: str  # where it is reached from here
    within: tuple[str, ...] = ()
    hub: str | None = None  # the coordinator's namespace

    def traffic(self) -> Traffic:
        """On every host's cable since it was laid; nothing where cables are not counted."""
        if self.hub is None:
            return {}
        lines = _said("ip", "netns", "exec", self.hub, "cat", "/proc/net/dev").splitlines()
        counters = {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines) if rest}
        cables = {host.name: counters[_cable(number)] for number, host in enumerate(self.hosts)}
        return {name: (int(fields[0]), int(fields[8])) for name, fields in cables.items()}


def network(num_hosts: int) -> AbstractContextManager[Network]:
    """Of namespaces where they can be had."""
    possible = hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("ip") is not None
    return namespaces(num_hosts) if possible else loopback(num_hosts)


@contextmanager
def loopback(num_hosts: int) -> Iterator[Network]:
    hosts = tuple(Host(f"host-{n}", LOOPBACK, f"127.0.1.{n + 1}") for n in range(num_hosts))
    yield Network(hosts, LOOPBACK, LOOPBACK)


@contextmanager
def namespaces(num_hosts: int) -> Iterator[Network]:
    """Gone, with all cables, when the block is left."""
    run = f"bt{os.getpid()}"
    hub, watch = f"{run}-hub", f"{WATCHERS}.{os.getpid() % 250}"
    with ExitStack() as stack:
        stack.enter_context(_namespace(hub))
        _lay_cable(hub, "watch", f"{watch}.1", None, run, f"{watch}.2")
        hosts = tuple(_host(n, run, hub, stack) for n in range(num_hosts))
        yield Network(hosts, "0.0.0.0", f"{watch}.1", _within(hub), hub)


def _host(number: int, run: str, hub: str, stack: ExitStack) -> Host:
    name, here = f"{run}-{number}", f"{BENCHMARKS}.{number}"
    stack.enter_context(_namespace(name))
    _lay_cable(hub, _cable(number), f"{here}.1", name, "uplink", f"{here}.2")
    return Host(f"host-{number}", f"{here}.1", LOOPBACK, _within(name))


def _cable(number: int) -> str:
    return f"host{number}"


def _within(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


@contextmanager
def _namespace(name: str) -> Iterator[None]:
    _said("ip", "netns", "add", name)
    try:
        _said("ip", "-n", name, "link", "set", "lo", "up")
        yield
    finally:
        _said("ip", "netns", "del", name)


def _lay_cable(hub: str, there: str, hub_address: str, host: str | None, here: str, host_address: str) -> None:
    """`there` is its end in the hub, `here` the other: on a host, or in our own namespace."""
    of_host = ["netns", host] if host else []
    _said("ip", "link", "add", "name", here, *of_host, "type", "veth", "peer", "name", there, "netns", hub)
    for namespace, end, address in ((hub, there, hub_address), (host, here, host_address)):
        inside = ["-n", namespace] if namespace else []
        _said("ip", *inside, "addr", "add", f"{address}/30", "dev", end)
        _said("ip", *inside, "link", "set", "dev", end, "up")


def _said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
