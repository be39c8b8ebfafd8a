"""How much of a worker's time is computing? Workers against a real coordinator on loopback, round by round: the
time in BlockTrainer.step over the time from lease to lease, and the bytes on their sockets.

    python bench/swarms/share.py SETTINGS     one worker; prints a round a line as JSON; swarm.py starts it

A busy machine stretches computing and waiting alike, and not by the same factor: the share is given in CPU time too."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpcore
import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.spec import RunSpec
from blocktrain.swarm.worker.block_cache import BlockCache
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import Worker
from blocktrain.train.trainer import BlockTrainer
from blocktrain.wire.attached import Held
from blocktrain.wire.error_feedback import ErrorFeedback
from blocktrain.wire.invite import Invite, parse_invite
from blocktrain.wire.messages import LeaseReply, LeaseRequest, TrainLease

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is also a process of its own
from swarms.processes import (
    FREE_MEMORY_BYTES,
    CoordinatorProcess,
    Stopwatch,
    num_parameters,
    phase_tensors,
    running_coordinator,
    started,
    watched,
)

MIN_SHARE = 0.95
COMPUTING = "computing"


@dataclass(frozen=True)
class Mark:
    """How things stood when a lease was asked for."""

    wall_s: float
    worker_cpu_s: float
    coordinator_cpu_s: float
    step_cpu_s: float
    sent_bytes: int
    received_bytes: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class RoundCost:
    """From one lease to the next."""

    wall_s: float
    worker_cpu_s: float
    coordinator_cpu_s: float  # all it did meanwhile, whether the worker waited for it or not
    step_cpu_s: float
    sent_bytes: int
    received_bytes: int
    seconds: dict[str, float]  # wall, by what they were spent on

    @property
    def share(self) -> float:
        return self.seconds[COMPUTING] / self.wall_s

    @property
    def cpu_share(self) -> float:
        """As if the worker had waited for all that the coordinator did."""
        return self.step_cpu_s / (self.worker_cpu_s + self.coordinator_cpu_s)


def cost_between(before: Mark, after: Mark) -> RoundCost:
    changes = {
        name: getattr(after, name) - getattr(before, name) for name in RoundCost.__annotations__ if name != "seconds"
    }
    seconds = {kind: spent - before.seconds.get(kind, 0.0) for kind, spent in after.seconds.items()}
    return RoundCost(**changes, seconds={**seconds, "other": changes["wall_s"] - sum(seconds.values())})


# --- in a process of its own: the worker -----------------------------------------------------------------------------


class Traffic:
    """The bytes that went over the sockets of one client, HTTP's own included."""

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = 0

    def transport(self) -> httpx.HTTPTransport:
        transport = httpx.HTTPTransport()
        transport._pool._network_backend = CountingBackend(self)
        return transport


class CountingBackend(httpcore.SyncBackend):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def connect_tcp(self, *arguments: Any, **options: Any) -> httpcore.NetworkStream:
        return CountingStream(super().connect_tcp(*arguments, **options), self._traffic)


class CountingStream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream, traffic: Traffic) -> None:
        self._stream, self._traffic = stream, traffic

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._stream.read(max_bytes, timeout)
        self._traffic.received_bytes += len(data)
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, timeout)
        self._traffic.sent_bytes += len(buffer)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


class MarkingClient(CoordinatorClient):
    """Notes how things stand whenever a lease to train is asked for."""

    def __init__(self, invite: Invite, mark: Callable[[], Mark], **options: Any) -> None:
        super().__init__(invite, **options)
        self._mark, self.marks = mark, list[Mark]()

    def lease(self, request: Callable[[], LeaseRequest], held: Held | None = None) -> LeaseReply:
        mark = self._mark()
        reply = super().lease(request, held)
        if isinstance(reply, TrainLease):
            self.marks.append(mark)
        return reply


def work(invite: Invite, coordinator: CoordinatorProcess, home: Path, num_rounds: int) -> list[RoundCost]:
    """So many whole rounds of a worker; the next lease is submitted after a step."""
    watch, step_cpu, traffic = Stopwatch(), Stopwatch(time.process_time), Traffic()

    def mark() -> Mark:
        return Mark(
            wall_s=time.perf_counter(),
            worker_cpu_s=time.process_time(),
            coordinator_cpu_s=coordinator.cpu_s(),
            step_cpu_s=step_cpu.seconds[COMPUTING],
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            seconds=dict(watch.seconds),
        )

    client = MarkingClient(invite, mark, transport=traffic.transport())
    calls = [
        (CoordinatorClient, "lease", "lease"),
        (CoordinatorClient, "download", "download"),
        (CoordinatorClient, "upload", "upload"),
        (CoordinatorClient, "submit", "hand in and merge"),
        (ErrorFeedback, "compress", "encode"),
        (BlockCache, "_fetch", "decode"),
        (Worker, "_prepare_trainer", "load weights"),
        (ErrorFeedback, "accepted", "keep what was left out"),
    ]
    step = (BlockTrainer, "step", COMPUTING)
    with client, watched(step_cpu, step), watched(watch, step, *calls):
        Worker(
            client,
            home,
            key=Ed25519PrivateKey.generate(),
            memory_bytes=FREE_MEMORY_BYTES,
            stop=lambda: len(client.marks) > num_rounds,
            sleep=watch.timed(time.sleep, "wait"),
        ).run()
    return [cost_between(*pair) for pair in zip(client.marks, client.marks[1:], strict=False)]


def main(settings: Mapping[str, Any]) -> None:
    invite = parse_invite(settings["invite"])
    coordinator = CoordinatorProcess(settings["coordinator_pid"], invite)
    for cost in work(invite, coordinator, Path(settings["home"]), settings["rounds"]):
        print(json.dumps(asdict(cost)))


# --- in swarm.py: the rows -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Some workers at a run, for so many rounds after the first."""

    name: str
    spec: RunSpec
    workers: int
    rounds: int


def share_part(cases: Iterable[Case], folder: Path) -> list[dict[str, Any]]:
    return [share_row(case, folder / f"share-{number}") for number, case in enumerate(cases)]


def share_row(case: Case, folder: Path) -> dict[str, Any]:
    """The first round is told apart: in it a worker loads its libraries and fetches everything whole."""
    with running_coordinator(case.spec, folder) as coordinator:
        measured = list(_worked(coordinator, case, folder))
    first, rounds = [costs[0] for costs in measured], [cost for costs in measured for cost in costs[1:]]
    parameters = num_parameters(phase_tensors(case.spec))
    return {
        "name": case.name,
        "workers": case.workers,
        "update": case.spec.swarm.update,
        "download": case.spec.swarm.download,
        "round_steps": case.spec.swarm.round_steps,
        "parameters": parameters,
        "rounds": [_described(cost) for cost in rounds],
        "first_rounds": [_described(cost) for cost in first],
        **_summary(rounds, parameters),
    }


def _summary(rounds: Sequence[RoundCost], parameters: int) -> dict[str, Any]:
    """Over all rounds: what was computed of all the time, and the bytes of the median round."""
    total_s, kinds = sum(cost.wall_s for cost in rounds), sorted({kind for cost in rounds for kind in cost.seconds})
    cpu_s = sum(cost.worker_cpu_s + cost.coordinator_cpu_s for cost in rounds)
    return {
        "share": sum(cost.seconds[COMPUTING] for cost in rounds) / total_s,
        "cpu_share": sum(cost.step_cpu_s for cost in rounds) / cpu_s,
        "spent": {kind: sum(cost.seconds.get(kind, 0.0) for cost in rounds) / total_s for kind in kinds},
        "sent_bytes_per_parameter": statistics.median(cost.sent_bytes for cost in rounds) / parameters,
        "received_bytes_per_parameter": statistics.median(cost.received_bytes for cost in rounds) / parameters,
    }


def _worked(coordinator: CoordinatorProcess, case: Case, folder: Path) -> Iterator[list[RoundCost]]:
    """The rounds of each worker; they work at the same time."""
    settings = {"invite": str(coordinator.invite), "coordinator_pid": coordinator.pid, "rounds": case.rounds + 1}
    with ExitStack() as stack:
        homes = [str(folder / f"home-{number}") for number in range(case.workers)]
        commands = [[sys.executable, __file__, json.dumps({**settings, "home": home})] for home in homes]
        processes = [stack.enter_context(started(command)) for command in commands]
        for process in processes:
            said, _ = process.communicate()
            if process.returncode:
                raise RuntimeError(f"a worker of {case.name} ended with {process.returncode}")
            yield [RoundCost(**json.loads(line)) for line in said.splitlines()]


def _described(cost: RoundCost) -> dict[str, Any]:
    return {**asdict(cost), "share": cost.share, "cpu_share": cost.cpu_share}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
