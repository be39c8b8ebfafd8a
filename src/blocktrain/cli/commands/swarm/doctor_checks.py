"""The checks of blocktrain doctor: from a fact to a verdict and a remedy. Pure: it gathers nothing itself. No torch.
Next: doctor.py, which gathers the facts."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from blocktrain.cli.console import quantity

Level = Literal["ok", "warn", "fail"]
OLDEST_PYTHON = (3, 11)
TESTED_TORCH = "2.13.0"  # what the Makefile installs: equal weights are promised for this version only
SCARCE_MEMORY_BYTES = 2**30
ROOM_BYTES = 2**30  # for downloads, if no run says how much it needs
CLOCK_TOLERANCE_S = 5.0  # a Date header counts whole seconds, and a request takes some time
TRANSFER_SHARE = 0.2  # of a deadline: transfers may take this much without costing steps


@dataclass(frozen=True)
class Check:
    """One line of the report. The remedy is empty if there is nothing to do."""

    name: str
    level: Level
    found: str
    remedy: str = ""


def python_check(version: tuple[int, ...]) -> Check:
    found = ".".join(map(str, version[:3]))
    if version[:2] >= OLDEST_PYTHON:
        return Check("Python", "ok", found)
    oldest = ".".join(map(str, OLDEST_PYTHON))
    return Check("Python", "fail", found, f"install Python {oldest} or later, and BlockTrain with it")


def torch_check(found: str | None) -> Check:
    if found is None:
        return Check("torch", "fail", "cannot be imported", f"pip install torch=={TESTED_TORCH}")
    if found.partition("+")[0] != TESTED_TORCH:
        remedy = f"pip install torch=={TESTED_TORCH}: equal specs train equal weights only with the same torch version"
        return Check("torch", "warn", f"{found}, tested with {TESTED_TORCH}", remedy)
    return Check("torch", "ok", found)


def memory_check(free_bytes: int) -> Check:
    found = f"{quantity(free_bytes, 'B')} free"
    if free_bytes >= SCARCE_MEMORY_BYTES:
        return Check("memory", "ok", found)
    return Check("memory", "warn", found, "close other programs, or train only small blocks with worker --memory")


def disk_check(folder: str, free_bytes: int | None, needed_bytes: int | None) -> Check:
    """`free_bytes` is None if the folder cannot be written."""
    needed = ROOM_BYTES if needed_bytes is None else needed_bytes
    if free_bytes is None:
        return Check("disk", "fail", f"{folder} cannot be written", "make it writable, or choose another with --home")
    found = f"{quantity(free_bytes, 'B')} free in {folder}"
    if free_bytes >= needed:
        return Check("disk", "ok", found)
    level: Level = "warn" if needed_bytes is None else "fail"
    return Check("disk", level, f"{found}, {quantity(needed, 'B')} needed", "make room, or choose another --home")


def place_check(where: str, why_not: str, same_run: bool, another_answers: bool) -> Check:
    """One address of an invite that has several."""
    name = f"at {where}"
    if why_not:
        remedy = "workers use the others meanwhile" if another_answers else "the next address is tried"
        return Check(name, "warn", why_not, f"tell the operator of the run; {remedy}")
    if not same_run:
        return Check(name, "fail", "another run than at the addresses before", "ask the operator for a new invite")
    return Check(name, "ok", "answers, the same run")


def clock_check(here_s: float, there_s: float | None) -> Check:
    if there_s is None:
        return Check("clock", "warn", "the coordinator's answers have no date", "look for a proxy between you and it")
    ahead_s = here_s - there_s
    found = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the coordinator's"
    if abs(ahead_s) <= CLOCK_TOLERANCE_S:
        return Check("clock", "ok", "agrees with the coordinator's")
    return Check("clock", "warn", found, "synchronise it (timedatectl set-ntp true): certificates have dates")


def dns_check(host: str, addresses: Sequence[str], problem: str = "") -> Check:
    if _is_address(host):
        return Check("DNS", "ok", f"{host} is an address: no lookup needed")
    if addresses:
        return Check("DNS", "ok", f"{host} is {', '.join(addresses)}")
    remedy = "check the invite's host, and that this machine is online"
    return Check("DNS", "fail", f"{host} is unknown ({problem})", remedy)


def reach_check(where: str, connect_s: float | None, problem: str = "") -> Check:
    if connect_s is not None:
        return Check("reachable", "ok", f"{where} answers in {1000 * connect_s:.3g} ms")
    if "refused" in problem.lower():
        remedy = "start the coordinator, or correct the port: nothing listens there"
    else:
        remedy = "open the port in the firewalls between, or use an address that this machine can reach"
    return Check("reachable", "fail", f"{where} does not answer ({problem})", remedy)


def tls_check(host: str, tls: bool, pinned: bool) -> Check:
    """For a connection that works."""
    if tls:
        return Check("TLS", "ok", "the invite's certificate" if pinned else "a certificate that this system trusts")
    if _is_loopback(host):
        return Check("TLS", "ok", "none, and none needed: the coordinator is on this machine")
    remedy = "start the coordinator with --tls-self-signed and use its new invite"
    return Check("TLS", "warn", "none: others on the network can read the access token and change updates", remedy)


def role_check(may_work: bool) -> Check:
    if may_work:
        return Check("role", "ok", "may train")
    return Check("role", "warn", "may watch, not train", "ask for a worker's invite: blocktrain access-token add NAME")


def protocol_check(here: int, there: int) -> Check:
    if here == there:
        return Check("protocol", "ok", f"version {here} on both sides")
    remedy = "install the coordinator's version of blocktrain"
    return Check("protocol", "fail", f"{here} here, {there} at the coordinator", remedy)


def rate_check(name: str, bytes_per_s: float, round_bytes: int, limit_s: float) -> Check:
    """Compares the speed with what a round transfers and how long it may take."""
    found = f"{quantity(bytes_per_s, 'B/s')}, at most {quantity(round_bytes, 'B')} per round"
    if round_bytes / bytes_per_s <= TRANSFER_SHARE * limit_s:
        return Check(name, "ok", found)
    remedy = f"a round may take {limit_s:.3g} s: increase swarm.deadline_ceiling_s, or train smaller blocks"
    return Check(name, "warn", found, remedy)


def blocks_check(fitting: Sequence[tuple[int, ...]], num_phases: int) -> Check:
    found = f"this machine can train {', '.join('+'.join(map(str, blocks)) for blocks in fitting) or 'none'}"
    if len(fitting) == num_phases:
        return Check("blocks", "ok", found)
    return Check("blocks", "warn" if fitting else "fail", found, "free memory, or train with smaller or fewer blocks")


def speed_check(steps_per_lease: Sequence[int], limit_s: float) -> Check:
    """Whether one step ends before a round's deadline, in the phases that fit."""
    if any(steps_per_lease):
        return Check("speed", "ok", "fast enough for the deadlines of the rounds")
    remedy = "increase swarm.deadline_ceiling_s, use fewer train.windows, or take a faster machine"
    return Check("speed", "warn", f"not one step would end within the {limit_s:.3g} s of a round", remedy)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
