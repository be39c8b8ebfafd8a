"""Our side: a real coordinator process, and worker processes that are `swarm.worker.Worker` in all but one thing: what
they submit was not trained but given. They lease, fetch, encode, upload, announce, wait for the merge and fetch it.

    python ours.py drive CELL            starts them and measures
    python ours.py work CELL NUMBER INVITE

Next: work.py, what is averaged; hivemind_side.py and flower_side.py, the same for the others."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor
from trained import held_out_loss
from work import Cell, Leader, Led, Memory, error_of_step, step, write_result

from blocktrain.io.allocator import keep_freed_memory
from blocktrain.io.arrays import as_arrays, as_tensors
from blocktrain.spec import RunSpec
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import Worker
from blocktrain.train.trainer import BlockTrainer, Weights
from blocktrain.wire.invite import parse_invite
from blocktrain.wire.messages import TrainLease, VetLease
from blocktrain.wire.safetensors import Tensors

sys.path.insert(0, str(Path(__file__).parents[1]))
from swarms.processes import FREE_MEMORY_BYTES, running_coordinator

PATIENCE_S = 300.0
DOWNLOADS = {"fp32": "fp32"}  # with any other codec the mean comes as the swarm's default


def swarm_spec(spec: RunSpec, codec: str, workers: int, trains: bool) -> RunSpec:
    """Every round has an update of every worker, nobody is late and nothing is evaluated. All updates count the same,
    as on the other sides: steps of independent noise would be left out as pointing elsewhere. Where nothing is trained,
    a round is one step of every worker's lease and the end is far."""
    changes = {
        "swarm.averaging": "mean",
        "swarm.min_updates": workers,
        "swarm.update": codec,
        "swarm.download": DOWNLOADS.get(codec, spec.swarm.download),
        "swarm.deadline_floor_s": PATIENCE_S,
        "swarm.evaluate_every": 10**6,
    }
    return spec.with_(**changes, **({} if trains else {"swarm.round_steps": 1, "train.steps": 10**4}))


class Given:
    """Stands where a trainer stands, and has the tensors that it was given."""

    def __init__(self, phase: Any, weights: dict[int, dict[str, Tensor]]) -> None:
        self.phase, self._weights = phase, weights

    def current(self) -> dict[int, dict[str, Tensor]]:
        return self._weights


class AveragingWorker(Worker):
    def averaging(self, cell: Cell, number: int) -> None:
        keep_freed_memory()  # as trainers do
        self._cell, self._number, self._round, self._led = cell, number, 0, Led()
        self._before: Mapping[str, Any] = {}
        self.run()

    def _prepare_trainer(
        self, lease: TrainLease | VetLease, start: Weights, around: dict[int, Tensors]
    ) -> BlockTrainer:
        """The newest version is here: the round before is over, and the next one's tensors follow from it."""
        (version,) = lease.trained
        published = self._block_cache.trained(lease.trained)[version.block]
        if self._round:
            self._led.done(self._round - 1)
            self._led.say({"error": self._error(published)})
        self._before = published
        if self._cell.trains:
            return super()._prepare_trainer(lease, start, around)
        own = step(self._number, self._round, self._cell.shapes)
        begun = as_arrays(start[version.block])
        after = {name: begun[name] + own[name] for name in own}
        return cast("BlockTrainer", Given(self._spec.phases[lease.phase], {version.block: as_tensors(after)}))

    def _error(self, published: Mapping[str, Any]) -> float:
        """Of the step; or of the model, which one worker tells."""
        if not self._cell.trains:
            return error_of_step(self._before, published, self._cell.workers, self._round - 1)
        return held_out_loss(self._spec, self._corpus.valid, as_tensors(published)) if self._number == 0 else 0.0

    def _run_steps(self, trainer: BlockTrainer, lease: TrainLease, started_s: float) -> list[float]:
        self._led.ready(self._round)
        self._round += 1
        if self._cell.trains:
            return super()._run_steps(trainer, lease, self._clock())
        return [5.0] * lease.steps


def work(cell: Cell, number: int, invite: str) -> None:
    with CoordinatorClient(parse_invite(invite), patience_s=PATIENCE_S) as client:
        AveragingWorker(
            client,
            Path(cell.folder) / f"worker-{number}",
            key=Ed25519PrivateKey.generate(),
            name=f"worker-{number}",
            memory_bytes=FREE_MEMORY_BYTES,
        ).averaging(cell, number)


def drive(cell: Cell) -> None:
    spec = swarm_spec(RunSpec.model_validate(cell.spec), cell.codec, cell.workers, cell.trains)
    with running_coordinator(spec, Path(cell.folder) / "coordinator") as coordinator:
        commands = [
            [sys.executable, __file__, "work", str(cell), str(number), str(coordinator.invite)]
            for number in range(cell.workers)
        ]
        with Leader(commands, {"OMP_NUM_THREADS": "1"}) as leader:
            workers = {f"worker {n}": [process.pid] for n, process in enumerate(leader.processes)}
            groups = {"central": [coordinator.pid], **workers}
            with Memory(lambda: groups) as memory:
                measured, errors = leader.run(cell.rounds)
    told = {"averaging", "update", "download", "round_steps", "deadline_floor_s"}
    swarm = spec.swarm.model_dump(mode="json", include=told)
    write_result(cell, measured, errors, memory, {"swarm": swarm, "numpy": np.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    action, cell_text, *rest = sys.argv[1:]
    if action == "work":
        work(Cell.read(cell_text), int(rest[0]), rest[1])
    else:
        drive(Cell.read(cell_text))
