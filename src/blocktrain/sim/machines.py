"""Machines that run a coordinator: the real one on a simulated disk, its loop, and the requests that it is answering. A
kill ends all of them between two transactions; a start opens the ledger again as the server does.
Next: service.py, which answers requests; ../swarm/coordinator/loop.py, which the loop's task runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import httpx

from blocktrain.errors import BlockTrainError, StorageError
from blocktrain.sim.disk import SimDisk, SimFolder, SimLedger
from blocktrain.sim.network import REFUSED_S, Delivery
from blocktrain.sim.service import answer
from blocktrain.sim.tasks import Scheduler, Task
from blocktrain.sim.volunteers import key_of
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator import server
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.ledger.chain import NotedHead
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.run_clock import RunClock
from blocktrain.wire.messages import UpdateReceipt
from blocktrain.wire.safetensors import Array

LONGEST_GAP_S = 0.02  # between two transactions of one request


@dataclass
class Surroundings:
    """What the machines of a run share."""

    scheduler: Scheduler
    disk: SimDisk
    spec: RunSpec
    initial_blocks: Mapping[int, dict[str, Array]]
    seed: int
    gaps: float
    true_wall: Callable[[], float]
    acknowledged: Callable[[UpdateReceipt], None]
    defect: Callable[[str, BaseException], None]
    detected_loss: Callable[[str], None]


class Machine:
    def __init__(self, name: str, around: Surroundings) -> None:
        self.name, self._around = name, around
        self.clock_offset_s = 0.0
        self.coordinator: Coordinator | None = None
        self.ledger: Ledger | None = None
        self._loop: Task | None = None
        self._tasks: dict[Task, Delivery] = {}
        self._waiting: list[tuple[Task, int]] = []
        self._gaps = random.Random(f"gaps {around.seed} {name}")
        self.trouble = ""  # the loop's last error

    @property
    def now_s(self) -> float:
        return self._around.scheduler.now_s

    def wall(self) -> float:
        return self._around.true_wall() + self.clock_offset_s

    def start(self) -> bool:
        """False if the disk does not allow it now: try again later, as a supervisor does."""
        if self.coordinator is not None:
            return True
        around = self._around
        ledger = SimLedger(around.disk, self._gap)
        try:
            noted = NotedHead(around.disk.head_path)
            try:
                server._require_head(ledger, noted)
            except StorageError as error:  # as the operator is told to
                around.detected_loss(str(error))
                noted.path.unlink()
                noted = NotedHead(around.disk.head_path)
            coordinator = self._made(ledger, noted)
        except BlockTrainError as error:
            self.trouble = str(error)
            ledger.close()
            return False
        self.ledger, self.coordinator = ledger, coordinator
        self._loop = around.scheduler.start(f"{self.name}'s loop", self._run_loop)
        return True

    def _made(self, ledger: Ledger, noted: NotedHead) -> Coordinator:
        around = self._around
        clock = RunClock(ledger.latest_moment_s(), wall=self.wall, monotonic=lambda: around.scheduler.now_s)
        made = Coordinator(
            around.spec,
            ledger,
            Blobs(SimFolder(around.disk, self.wall)),
            initial_block=lambda block: dict(around.initial_blocks[block]),
            clock=clock,
            receipt_key=key_of(self.name, around.seed),
            noted_head=noted,
        )
        made.loop.wall_clock = RunClock(0.0, wall=self.wall, monotonic=lambda: around.scheduler.now_s)
        unlimited: Any = nullcontext()
        made.intake.opening = unlimited  # it would stop the one thread that all tasks share
        return made

    def kill(self) -> None:
        if self.coordinator is None:
            return
        scheduler, ledger = self._around.scheduler, self.ledger
        self.coordinator = self.ledger = None
        if self._loop:
            scheduler.kill(self._loop)
        for task, delivery in list(self._tasks.items()):
            scheduler.kill(task)
            delivery.answer(httpx.ReadError("the connection was reset"))
        self._tasks.clear()
        self._waiting.clear()
        if ledger:
            ledger.close()

    def hours_later(self, moves: Callable[[], None]) -> None:
        """Does what the loop does when `moves` has set the clock on. Nothing else runs any more."""
        assert self.coordinator is not None
        for task in (self._loop, *self._tasks):
            if task:
                self._around.scheduler.kill(task)
        moves()
        self.coordinator.loop.settle()

    # Requests

    def handle(self, delivery: Delivery) -> None:
        coordinator = self.coordinator
        if coordinator is None:
            self._around.scheduler.after(REFUSED_S, lambda: delivery.answer(httpx.ConnectError("connection refused")))
            return

        def work() -> None:
            try:
                reply = answer(coordinator, delivery, self)
                if delivery.request.url.path == "/v1/updates" and reply.is_success:
                    self._around.acknowledged(UpdateReceipt.model_validate_json(reply.content))
                delivery.answer(reply)
            except Exception as error:
                self._around.defect(f"{self.name} failed to answer {delivery.request.url.path}", error)
                delivery.answer(httpx.Response(500))
            finally:
                self._tasks.pop(task, None)
            if coordinator.loop.due.is_set():
                self._wake_loop()

        task = self._around.scheduler.start(f"{self.name} answers", work)
        self._tasks[task] = delivery

    def wait_for_work(self, rung: int, longest_s: float) -> None:
        """As a lease request waits for the bell."""
        scheduler, coordinator = self._around.scheduler, self.coordinator
        assert scheduler.current is not None
        if coordinator is not None and coordinator.bell.rung == rung:
            self._waiting.append((scheduler.current, scheduler.current.turn + 1))
            scheduler.wait(longest_s)

    def _gap(self) -> None:
        """Between two transactions: others may run, and a kill may come."""
        scheduler = self._around.scheduler
        if scheduler.current is not None and self._gaps.random() < self._around.gaps:
            scheduler.sleep(self._gaps.random() * LONGEST_GAP_S)

    # The loop

    def _run_loop(self) -> None:
        coordinator, scheduler = self.coordinator, self._around.scheduler
        assert coordinator is not None
        while True:
            rung = coordinator.bell.rung
            coordinator.loop.due.clear()
            try:
                coordinator.loop.tick()
                self.trouble = ""
            except BlockTrainError as error:
                self.trouble = str(error)
            except Exception as error:
                self._around.defect(f"{self.name}'s loop", error)
            if coordinator.bell.rung != rung:
                self._ring()
            if not coordinator.loop.due.is_set():
                scheduler.wait(coordinator.loop.pause_s())

    def _wake_loop(self) -> None:
        if self._loop and not self._loop.is_over:
            self._around.scheduler.wake(self._loop, self._loop.turn, None)

    def _ring(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task, turn in waiting:
            self._around.scheduler.wake(task, turn, None)
