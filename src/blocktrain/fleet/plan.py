"""What a fleet is made of: its members, where their files are, and what each takes of a cluster. Pure: no Ray, socket
or process. Next: member.py, which runs one; fleet.py, which places them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from blocktrain.errors import ConfigError
from blocktrain.io.private import cache_home

COORDINATOR, GATEWAY, WORKER, STAGE = "coordinator", "gateway", "worker", "stage"
ROLES = (COORDINATOR, WORKER, STAGE, GATEWAY)
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


@dataclass(frozen=True)
class Share:
    """What one worker or stage reserves. Memory is that of the machine, not of its GPU."""

    cpus: float
    gpus: float
    memory_bytes: int

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPU" if self.gpus else ""
        return f"{self.cpus:g} CPU{gpus}, {self.memory_bytes / 1e9:.3g} GB"


@dataclass(frozen=True)
class Store:
    """Where the coordinator keeps the run: in its folder, or in a database and a bucket. Holds no secret."""

    ledger: str | None = None
    blobs: str | None = None
    presigned: bool | None = None

    def __post_init__(self) -> None:
        url = urlsplit(self.ledger or "")
        if url.password or "password" in parse_qs(url.query):
            raise ConfigError(
                "--ledger holds a password, which all machines of the cluster would see: leave it out of the URL, and "
                "put it into ~/.pgpass, or into PGPASSWORD before Ray is started"
            )

    @property
    def is_shared(self) -> bool:
        """Then the coordinator may move to another machine."""
        return bool(self.ledger and self.blobs)

    @property
    def words(self) -> tuple[str, ...]:
        """The options of blocktrain coordinator."""
        ledger = ("--ledger", self.ledger) if self.ledger else ()
        blobs = ("--blobs", self.blobs) if self.blobs else ()
        presigned = {True: ("--presigned",), False: ("--no-presigned",), None: ()}[self.presigned]
        return (*ledger, *blobs, *presigned)


@dataclass(frozen=True)
class FleetPlan:
    """Everything that a member must know, also when it is started again elsewhere. It holds no secret."""

    name: str
    folder: Path  # of the coordinator
    work_folder: Path  # where `fleet up` ran: the names of texts in the settings are relative to it
    node: str  # address of the machine where `fleet up` ran: the gateway stays there
    worker: Share
    stage: Share
    blocks: tuple[str, ...]  # of each stage, as in --blocks
    port: int  # of the gateway
    home: Path | None = None  # of the others, on every machine
    poll_s: float = 10.0  # between two looks of a stage for a newer version
    ray_process: int | None = None  # of the Ray cluster, if `fleet up` started it
    store: Store = Store()

    @property
    def namespace(self) -> str:
        return namespace_of(self.name)

    @property
    def stages(self) -> list[str]:
        return [f"{STAGE}-{number}" for number in range(1, len(self.blocks) + 1)]

    def folder_of(self, member: str) -> Path:
        """A member that is started again on the same machine finds its key and its downloads there."""
        if role_of(member) == COORDINATOR:
            return self.folder
        return (self.home or cache_home() / "fleet") / self.name / member


def namespace_of(name: str) -> str:
    """Ray's namespace for the members of a fleet."""
    if not NAME.fullmatch(name):
        raise ConfigError(f'--name "{name}" is not a valid fleet name: use up to 40 small letters, digits and hyphens')
    return f"blocktrain-{name}"


def role_of(member: str) -> str:
    return member.partition("-")[0]


def number_of(member: str) -> int:
    """ "worker-12" -> 12; 0 for a role with one member"""
    return int(member.partition("-")[2] or 0)


def in_order(members: Sequence[str]) -> list[str]:
    return sorted(members, key=lambda member: (ROLES.index(role_of(member)), number_of(member)))


def workers_to_add(members: Sequence[str], wanted: int) -> list[str]:
    """The lowest numbers that are free: a worker that was there before continues with its key."""
    present = {number_of(member) for member in members if role_of(member) == WORKER}
    free = [number for number in range(1, wanted + 1) if number not in present]
    return [f"{WORKER}-{number}" for number in free[: max(0, wanted - len(present))]]


def workers_to_stop(members: Sequence[str], wanted: int) -> list[str]:
    """The highest numbers, so that the lowest stay."""
    return in_order([member for member in members if role_of(member) == WORKER])[wanted:]


def require_room(
    workers: int,
    worker: Share,
    stages: int,
    stage: Share,
    nodes: Sequence[Mapping[str, float]],
    free: Mapping[str, float],
) -> None:
    """Refuses what Ray could never place, or not while others use the cluster. `nodes` has the resources of each
    machine, `free` those of the whole cluster that nobody has reserved."""
    wanted = [*[worker] * workers, *[stage] * stages]
    number = min(_fitting(wanted, nodes), _affordable(wanted, free))
    if number == len(wanted):
        return
    asked = [f"{count} {what} of {share}" for count, what, share in _asked(workers, worker, stages, stage)]
    there = [
        f"{node.get('CPU', 0):g} CPU, {node.get('GPU', 0):g} GPU, {node.get('memory', 0) / 1e9:.3g} GB"
        for node in nodes
    ]
    raise ConfigError(
        f"the Ray cluster has room for {number} of {len(wanted)} ({' and '.join(asked)}): its machines have "
        f"{'; '.join(there) or 'nothing'}, of which {free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU and "
        f"{free.get('memory', 0) / 1e9:.3g} GB are free. Add machines (ray start --address=…), ask for fewer "
        f"(--workers, --stages), or reserve less for each (--cpus, --gpus, --memory, --stage-memory)"
    )


def _asked(workers: int, worker: Share, stages: int, stage: Share) -> list[tuple[int, str, Share]]:
    both = [
        (workers, "workers" if workers != 1 else "worker", worker),
        (stages, "stages" if stages != 1 else "stage", stage),
    ]
    return [each for each in both if each[0]]


def _fitting(wanted: Sequence[Share], nodes: Sequence[Mapping[str, float]]) -> int:
    """How many fit on the empty machines, each on the first that has room."""
    left = [[node.get("CPU", 0.0), node.get("GPU", 0.0), node.get("memory", 0.0)] for node in nodes]
    for number, share in enumerate(wanted):
        takes = (share.cpus, share.gpus, share.memory_bytes)
        room = next((node for node in left if all(a >= b for a, b in zip(node, takes, strict=True))), None)
        if room is None:
            return number
        room[:] = [a - b for a, b in zip(room, takes, strict=True)]
    return len(wanted)


def _affordable(wanted: Sequence[Share], free: Mapping[str, float]) -> int:
    left = [free.get("CPU", 0.0), free.get("GPU", 0.0), free.get("memory", 0.0)]
    for number, share in enumerate(wanted):
        left = [a - b for a, b in zip(left, (share.cpus, share.gpus, share.memory_bytes), strict=True)]
        if min(left) < -math.ulp(1e12):
            return number
    return len(wanted)
