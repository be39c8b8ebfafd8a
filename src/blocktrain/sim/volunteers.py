"""Volunteers: the real worker loop, its client, block cache and error feedback, with a trainer that computes nothing.
Its steps take virtual time and move the weights by small numbers that depend on the lease alone. Some volunteers lie.
Next: ../swarm/worker/worker.py, the loop; world.py, which starts and kills them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.io.arrays import as_arrays
from blocktrain.model.block import build_block
from blocktrain.sim.network import SimNetwork, SimTransport
from blocktrain.sim.tasks import Scheduler
from blocktrain.spec import Denoise, Phase, RunSpec
from blocktrain.swarm.signatures import sign
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import Worker
from blocktrain.train.trainer import Weights
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import EvaluateLease, EvaluationNotice, TrainLease, UpdateReceipt, VetLease, VetNotice
from blocktrain.wire.safetensors import Tensors

PATIENCE_S = 10 * 86_400.0
MEMORY_BYTES = 2**40
STEP_SIZE = 1e-4
HUGE = 1e4
NATS = 3.0


def key_of(name: str, seed: int) -> Ed25519PrivateKey:
    """The same key whenever the seed is run."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest())


@dataclass(frozen=True)
class SimStep:
    loss: float


class SimTrainer:
    """What the worker loop needs of a BlockTrainer. `take_time` waits for the time of one step."""

    def __init__(self, phase: Phase, take_time: Callable[[], None], size: float) -> None:
        self.phase, self._take_time, self._size = phase, take_time, size
        self.shard = self.step_done = 0
        self._weights: dict[int, dict[str, torch.Tensor]] = {}

    def begin(self, start: Weights, origin: str) -> None:
        self._weights = {block: dict(start[block]) for block in self.phase.blocks}
        self._draw = np.random.default_rng(int.from_bytes(hashlib.sha256(origin.encode()).digest()[:8], "big"))

    def step(self) -> SimStep:
        self._take_time()
        self.step_done += 1
        for tensors in self._weights.values():
            for name, tensor in tensors.items():
                noise = self._draw.standard_normal(tensor.shape, dtype=np.float32)
                tensors[name] = tensor + self._size * torch.from_numpy(noise)
        return SimStep(5.0)

    def current(self) -> dict[int, dict[str, torch.Tensor]]:
        return self._weights


class SimWorker(Worker):
    """The real worker. `lie` names what it does instead of its work."""

    def __init__(self, *args: Any, take_time: Callable[[], None], lie: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._take_time, self._lie = take_time, lie

    def _initial_block(self, block: int) -> Tensors:
        return dict(_initial_block(self._spec.model_dump_json(), block))

    def _prepare_trainer(self, lease: Any, start: Weights, around: Mapping[int, Tensors]) -> Any:
        phase = self._spec.phases[lease.phase]
        trainer: Any = self._trainer
        if trainer is None or trainer.phase != phase:
            trainer = SimTrainer(phase, self._take_time, HUGE * STEP_SIZE if self._lie == "huge" else STEP_SIZE)
        trainer.begin(start, f"{self._public_key} {lease.lease}")
        self._trainer = trainer
        return trainer

    def _train(self, lease: TrainLease) -> None:
        if self._lie == "silent":
            self._sleep(min(3.0, lease.time_left_s))  # and asks again: its lease is renewed
            return
        super()._train(lease)

    def _submit(self, lease: TrainLease, payload: bytes, steps: int, loss: float) -> UpdateReceipt:
        if self._lie == "garbage":
            payload = random.Random(lease.lease).randbytes(len(payload))
        return super()._submit(lease, payload, 10 * steps if self._lie == "greedy" else steps, loss)

    def _evaluate(self, lease: EvaluateLease) -> None:
        """Scores without computing any."""
        self._take_time()
        path = "mean" if isinstance(self._spec.objective, Denoise) else "stack"
        nats = 1e9 if self._lie else NATS
        unsigned = EvaluationNotice.model_construct(
            lease=lease.lease,
            worker=self._public_key,
            scores=({"path": path, "reading": "last", "nats_per_byte": nats},),
            combine={},
            samples=(),
        )
        self._client.submit_evaluation(sign(unsigned, self._key, self._info.run))

    def _vet(self, lease: VetLease) -> None:
        """Scores that say which updates are bad without computing any: those whose hash begins with 0."""
        self._take_time()
        bad = [update.payload.sha256.startswith("0") != bool(self._lie) for update in lease.updates]
        unsigned = VetNotice(
            lease=lease.lease,
            worker=self._public_key,
            base=NATS,
            together=NATS - 0.1,
            alone=tuple(NATS + (0.1 if each else -0.1) for each in bad),
            without=tuple(NATS - 0.1 + (-0.02 if each else 0.02) for each in bad),
        )
        self._client.submit_vetting(sign(unsigned, self._key, self._info.run))


@lru_cache(64)
def _initial_block(spec: str, block: int) -> Tensors:
    """Made once for all workers of all simulations."""
    return as_arrays(build_block(RunSpec.model_validate_json(spec), block).state_dict())


def make_worker(
    name: str,
    lie: str,
    steps_per_s: float,
    home: Path,
    network: SimNetwork,
    scheduler: Scheduler,
    wall: Callable[[], float],
) -> SimWorker:
    client = CoordinatorClient(
        Invite("coordinator.test", 80, "an-access-token-of-the-simulator"),
        patience_s=PATIENCE_S,
        transport=SimTransport(network, name),
        clock=lambda: scheduler.now_s,
        sleep=scheduler.sleep,
    )
    return SimWorker(
        client,
        home,
        key=key_of(name, network.seed),
        name=name,
        memory_bytes=MEMORY_BYTES,
        device=torch.device("cpu"),
        clock=lambda: scheduler.now_s,
        sleep=scheduler.sleep,
        wall_clock=wall,
        take_time=lambda: scheduler.sleep(1.0 / steps_per_s),
        lie=lie,
    )
