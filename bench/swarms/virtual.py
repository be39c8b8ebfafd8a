"""A swarm in one process and in virtual time: the coordinator's and the workers' own code, real training, a clock that
jumps from one event to the next, and planned faults on the way of the updates. What a round decides is decided as
always; only seconds are not waited for. Next: late.py, which asks what late updates cost."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from blocktrain.data.corpus import Corpus
from blocktrain.errors import RequestRefused
from blocktrain.io.arrays import as_tensors
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.initial_blocks import initial_blocks_here
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import Worker, WorkReport
from blocktrain.wire.attached import Held
from blocktrain.wire.messages import (
    Blob,
    EvaluationNotice,
    LeaseReply,
    LeaseRequest,
    RunInfo,
    UpdateNotice,
    UpdateReceipt,
    VetNotice,
)
from blocktrain.wire.safetensors import decode
from swarms.processes import FREE_MEMORY_BYTES

STEP_S = 1.0  # virtual, of a worker as fast as the plan
SPEED_SPREAD = 0.1  # workers differ by so much, either way
SHORTEST_NAP_S = 0.2  # a waiting worker asks no more often: it would find nothing new and costs real time

Tensors = dict[str, Tensor]
Answer = TypeVar("Answer")


class VirtualClock:
    """Of all threads it started one runs at a time, the one whose time comes first; time passes when all sleep."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._sleepers: list[tuple[float, int, threading.Event]] = []
        self._order, self._threads, self._errors = count(), list[threading.Thread](), list[BaseException]()

    def sleep(self, seconds: float) -> None:
        turn = self._sleeper(seconds)
        self._wake_next()
        turn.wait()

    def start(self, work: Callable[[], None]) -> None:
        turn = self._sleeper(0.0)
        self._threads.append(threading.Thread(target=self._run, args=(turn, work), daemon=True))
        self._threads[-1].start()

    def run(self) -> None:
        """Until all threads have ended; the first error of one is raised."""
        self._wake_next()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _run(self, turn: threading.Event, work: Callable[[], None]) -> None:
        turn.wait()
        try:
            work()
        except Exception as error:
            self._errors.append(error)
        finally:
            self._wake_next()

    def _sleeper(self, seconds: float) -> threading.Event:
        turn = threading.Event()
        heappush(self._sleepers, (self.now_s + max(0.0, seconds), next(self._order), turn))
        return turn

    def _wake_next(self) -> None:
        if self._sleepers:
            self.now_s, _, turn = heappop(self._sleepers)
            turn.set()


@dataclass(frozen=True)
class Faults:
    """A share of all updates is late or lost, half of them each; either way its worker is away for the delay. A
    function of (seed, worker, number of the update), so that everybody who is compared meets the same."""

    share: float
    seed: int
    delay_s: tuple[float, float]

    def drawn(self, worker: int, number: int) -> tuple[float, bool]:
        """Seconds that the update is late, and whether it is lost."""
        chance = random.Random(f"{self.seed} {worker} {number}")
        if chance.random() >= self.share:
            return 0.0, False
        return chance.uniform(*self.delay_s), chance.random() < 0.5


class DirectClient:
    """The coordinator as a worker sees it, without HTTP between; updates meet the faults."""

    def __init__(self, coordinator: Coordinator, clock: VirtualClock, faults: Faults, worker: int) -> None:
        self._coordinator, self._clock, self._faults, self._worker = coordinator, clock, faults, worker
        self._number = count()
        self.access_token: str | None = None

    def run_info(self) -> RunInfo:
        return self._coordinator.info()

    def lease(self, request: Callable[[], LeaseRequest], held: Held | None = None) -> LeaseReply:
        return self._settled(lambda: self._coordinator.lease(request(), access_token=self.access_token))

    def download(self, blob: Blob, cache: Path) -> memoryview:
        return self._coordinator.blobs.get(blob.sha256)

    def upload(self, data: bytes, lease: str) -> Blob:
        delay_s, lost = self._faults.drawn(self._worker, next(self._number))
        if delay_s:
            self._clock.sleep(delay_s)
        if lost:
            raise RequestRefused("the update was lost on its way: go on with another lease", code="lost")
        blob = Blob(sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))
        self._coordinator.intake.receive(lease, blob.sha256, 0, len(data), data)
        return blob

    def send(
        self, payload: bytes, lease: str, notice: Callable[[Blob], UpdateNotice]
    ) -> tuple[UpdateNotice, UpdateReceipt]:
        told = notice(self.upload(payload, lease))
        return told, self.submit(told)

    def submit(self, notice: UpdateNotice) -> UpdateReceipt:
        return self._settled(lambda: self._coordinator.update(notice))

    def _settled(self, ask: Callable[[], Answer]) -> Answer:
        """A request that finds the coordinator's loop idle and leaves it idle: merging takes no virtual time."""
        self._coordinator.loop.settle()
        answer = ask()
        self._coordinator.loop.settle()
        return answer

    def submit_evaluation(self, notice: EvaluationNotice) -> None:
        self._coordinator.intake.evaluation(notice)

    def submit_vetting(self, notice: VetNotice) -> None:
        self._settled(lambda: self._coordinator.vetted(notice))


@dataclass(frozen=True)
class Published:
    """The newest version of every block, from then on."""

    at_s: float
    blocks: dict[int, Tensors]


def train_virtually(
    spec: RunSpec, corpus: Corpus, num_workers: int, faults: Faults, folder: Path
) -> tuple[list[Published], dict[str, Any]]:
    """All models that were published, the last one finished, and what became of the updates."""
    clock, ledger, blobs = VirtualClock(), Ledger(folder / "ledger.db"), Blobs(folder / "blobs")
    try:
        found_run(spec, corpus, ledger, blobs, clock.now_s)
        coordinator = Coordinator(
            spec, ledger, blobs, initial_block=initial_blocks_here(spec), clock=lambda: clock.now_s
        )
        for number in range(num_workers):
            clock.start(_worker(number, coordinator, clock, faults, folder).run)
        clock.run()
        curves = coordinator.watching.curves().training
        refused = [event.data["code"] for event in ledger.events() if event.kind == "refused"]
        account = {
            "rounds": sum(len(curve.points) for curve in curves),
            "updates": sum(point.updates for curve in curves for point in curve.points),
            "refused": len(refused),
            "tokens": sum(point.tokens for curve in curves for point in curve.points),
        }
        return _published(spec, ledger, blobs), account
    finally:
        ledger.close()


def _worker(number: int, coordinator: Coordinator, clock: VirtualClock, faults: Faults, folder: Path) -> Worker:
    step_s = STEP_S * random.Random(f"speed {faults.seed} {number}").uniform(1 - SPEED_SPREAD, 1 + SPEED_SPREAD)

    def report(report: WorkReport) -> None:
        if report.kind == "step":
            clock.sleep(step_s)

    return Worker(
        cast(CoordinatorClient, DirectClient(coordinator, clock, faults, number)),
        folder / "home",
        key=Ed25519PrivateKey.generate(),
        name=f"worker-{number}",
        memory_bytes=FREE_MEMORY_BYTES,
        report=report,
        clock=lambda: clock.now_s,
        sleep=lambda seconds: clock.sleep(max(seconds, SHORTEST_NAP_S)),
    )


def _published(spec: RunSpec, ledger: Ledger, blobs: Blobs) -> list[Published]:
    versions = sorted(
        (version for block in range(spec.model.blocks) for version in ledger.versions(block)),
        key=lambda version: (version.created_s, version.version),
    )
    newest, published = dict[int, Tensors](), list[Published]()
    for version in versions:
        newest = newest | {version.block: as_tensors(decode(blobs.get(version.sha256))[0])}
        published.append(Published(version.created_s, newest))
    return last_of_each_instant(published)


def last_of_each_instant(published: Sequence[Published]) -> list[Published]:
    """The versions of one round come together."""
    return list({each.at_s: each for each in published}.values())
