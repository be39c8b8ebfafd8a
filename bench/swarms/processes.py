"""What the questions of swarm.py share: a real coordinator process and its readings, members that send updates without
training, a stopwatch for calls. Linux only where it reads /proc. Next: swarm.py, which asks the questions."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.io.arrays import as_arrays
from blocktrain.model.block import block_shapes, build_block
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.initial_files import initial_blocks_folder
from blocktrain.swarm.initial_blocks import make_initial_blocks
from blocktrain.swarm.signatures import sign
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.codecs.table import update_codec
from blocktrain.wire.invite import Invite, parse_invite
from blocktrain.wire.messages import PROTOCOL_VERSION, Blob, LeaseRequest, TrainLease, UpdateNotice
from blocktrain.wire.safetensors import Tensors, flat
from blocktrain.wire.updates import encode_update
from shared.experiment import cpu_s, proc_status

POLL_S = 0.1
STEP_SIZE = 1e-3  # by which the weights of an update that nobody trained differ
FREE_MEMORY_BYTES = 2**40  # what members say they have: every lease fits


@dataclass(frozen=True)
class CoordinatorProcess:
    pid: int
    invite: Invite

    def cpu_s(self) -> float:
        return cpu_s(self.pid)

    def reset_peak(self) -> int:
        """The resident bytes now, from which `peak_bytes` counts anew."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return proc_status("VmRSS", self.pid)

    def peak_bytes(self) -> int:
        return proc_status("VmHWM", self.pid)


@contextmanager
def running_coordinator(
    spec: RunSpec, folder: Path, *, options: Sequence[str] = (), within: Sequence[str] = ()
) -> Iterator[CoordinatorProcess]:
    """`blocktrain coordinator` with its state in the folder, ended when the block is left: on loopback, or where its
    options say and what starts a command `within` another namespace. It finds its initial blocks and starts sooner."""
    folder.mkdir(parents=True, exist_ok=True)
    make_initial_blocks(spec, initial_blocks_folder(folder / "state", spec.digest()))  # torch is loaded here
    toml, said = folder / "spec.toml", folder / "said.txt"
    toml.write_text(tomli_w.dumps(spec.model_dump(mode="json", exclude_none=True)))
    program = [*within, sys.executable, "-m", "blocktrain"]
    command = [*program, "coordinator", str(toml), "--dir", str(folder / "state"), *options]
    with said.open("w") as stderr, started(command, stderr=stderr) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "'" not in line:
            raise RuntimeError(f"the coordinator did not start: {said.read_text()[-2000:]}")
        invite = parse_invite(line.split("'")[1])
        _await_work(invite)
        yield CoordinatorProcess(process.pid, invite)


def run_id(invite: Invite) -> str:
    with CoordinatorClient(invite) as client:
        return client.run_info().run


def _await_work(invite: Invite) -> None:
    """Until the first phase is open: who asks before is told to wait."""
    with CoordinatorClient(invite) as client:
        while not client.status()["phases"]:
            time.sleep(POLL_S)


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process of one thread a pool, that does not outlive the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **options)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@dataclass(frozen=True)
class Member:
    """A worker's side of the protocol: it asks and signs, and does not train."""

    spec: RunSpec
    run: str  # the run's id
    name: str = "member"
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    _nonces: Iterator[int] = field(default_factory=count)

    @cached_property
    def id(self) -> str:
        return self.key.public_key().public_bytes_raw().hex()

    def request(self) -> LeaseRequest:
        unsigned = LeaseRequest(
            protocol=PROTOCOL_VERSION,
            nonce=next(self._nonces),
            worker=self.id,
            name=self.name,
            device="cpu",
            memory_bytes=FREE_MEMORY_BYTES,
            steps_per_s=0.0,
        )
        return sign(unsigned, self.key, self.run)

    def notice(self, lease: TrainLease, payload: Blob) -> UpdateNotice:
        unsigned = UpdateNotice(
            lease=lease.lease,
            worker=self.id,
            tensors=update_shapes(self.spec, lease.phase),
            payload=payload,
            steps=lease.steps,
            tokens=lease.steps * self.spec.step_tokens,
            loss=5.0,
        )
        return sign(unsigned, self.key, self.run)


def phase_tensors(spec: RunSpec, phase: int = 0) -> Tensors:
    """The initial tensors of what a phase trains, under the names of an update."""
    return as_arrays(flat({block: build_block(spec, block).state_dict() for block in spec.phases[phase].blocks}))


@cache
def update_shapes(spec: RunSpec, phase: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{block}.{name}": shape
        for block in spec.phases[phase].blocks
        for name, shape in block_shapes(spec, block).items()
    }


def num_parameters(tensors: Tensors) -> int:
    return sum(tensor.size for tensor in tensors.values())


def random_update(before: Tensors, spec: RunSpec, seed: int) -> bytes:
    """A small step in a random direction, as its bytes in the run's codec, of a size that any round takes."""
    generator = np.random.default_rng(seed)
    after = {
        name: tensor - STEP_SIZE * generator.standard_normal(tensor.shape, np.float32)
        for name, tensor in before.items()
    }
    return encode_update(before, after, update_codec(spec.swarm, spec.phases[0].steps, 1))


class Stopwatch:
    """Seconds spent in the calls it watches, each without the watched calls inside it. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._clock, self._inside_s = clock, [0.0]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started_s = self._clock()
            self._inside_s.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                took_s = self._clock() - started_s
                self.seconds[label] += took_s - self._inside_s.pop()
                self._inside_s[-1] += took_s

        return call


@contextmanager
def watched(watch: Stopwatch, *calls: tuple[Any, str, str]) -> Iterator[None]:
    """(owner, name, label): while the block lasts, the watch times these calls."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in calls]
    try:
        for owner, name, label in calls:
            setattr(owner, name, watch.timed(getattr(owner, name), label))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
