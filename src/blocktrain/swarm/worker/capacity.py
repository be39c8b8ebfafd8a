"""Capacity: what a machine could do for a run: which phases fit its memory, how many steps it would do before a
deadline, how much traffic that would cost. Measures a few steps of a real block; the rest is arithmetic.
Next: cli/commands/swarm/doctor.py, which prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from blocktrain.data.windows import Bytes
from blocktrain.model.block import block_shapes, initial_block_tensors, matrix_shapes
from blocktrain.spec import Phase, RunSpec
from blocktrain.swarm.policy.leases import FILL_SHARE
from blocktrain.train.flops import phase_flops
from blocktrain.train.memory_estimate import least_memory_bytes, memory_plan
from blocktrain.train.optim import NEWTON_SCHULZ_STEPS
from blocktrain.train.trainer import BlockTrainer
from blocktrain.wire.codecs.table import make_codec, update_codec
from blocktrain.wire.updates import max_update_bytes

DAY_S = 86_400.0
MEASURED_STEPS = 3  # after one that warms up
PROBE_FLOPS = 2e10  # per step: about a second on one core, even if the run's own steps take minutes
ENOUGH_S = 5.0  # of measuring: the optimiser of a large block takes as long with one window as with many


@dataclass(frozen=True)
class TransferRates:
    """The speed of a connection. None if it was not measured: transfers then count as taking no time."""

    down_bytes_per_s: float | None = None
    up_bytes_per_s: float | None = None

    def seconds(self, down_bytes: float, up_bytes: float) -> float:
        legs = ((down_bytes, self.down_bytes_per_s), (up_bytes, self.up_bytes_per_s))
        return sum(num_bytes / rate for num_bytes, rate in legs if rate)


@dataclass(frozen=True)
class PhasePlan:
    """What a machine would do in one phase of a run. Bytes are upper bounds for the run's codecs."""

    phase: int
    blocks: tuple[int, ...]
    memory_bytes: int
    fits: bool
    streamed: bool  # one block in memory at a time, because the phase does not fit otherwise
    micro_windows: int  # windows that go through the blocks at once
    steps_per_s: float
    limit_s: float  # that a round may take
    steps_per_lease: int  # as a coordinator would lease them
    rounds_a_day: float
    down_bytes_a_day: float
    up_bytes_a_day: float


def plan(
    spec: RunSpec, memory_bytes: int, speeds: Mapping[int, float], rates: TransferRates, limits_s: Mapping[int, float]
) -> list[PhasePlan]:
    """One entry per phase. `speeds` holds the steps per second of each phase, `limits_s` how long its rounds may take
    (the ceiling if it is not known). Assumes a machine that works all day, alone on the phase."""
    return [
        _planned(spec, phase, memory_bytes, speeds.get(phase.index, 0.0), rates, limits_s.get(phase.index))
        for phase in spec.phases
    ]


def _planned(
    spec: RunSpec, phase: Phase, memory_bytes: int, speed: float, rates: TransferRates, known_limit_s: float | None
) -> PhasePlan:
    limit_s = known_limit_s or spec.swarm.deadline_ceiling_s
    down, up = round_bytes(spec, phase)
    steps = min(spec.swarm.round_steps, phase.steps, int(FILL_SHARE * limit_s * speed)) if speed else 0
    round_s = max(steps / speed + rates.seconds(down, up), 1e-9) if steps else 0.0
    rounds = DAY_S / round_s if steps else 0.0
    chosen = memory_plan(spec, phase, memory_bytes)
    return PhasePlan(
        phase=phase.index,
        blocks=phase.blocks,
        memory_bytes=chosen.memory_bytes,
        fits=chosen.memory_bytes <= memory_bytes,
        streamed=chosen.streamed,
        micro_windows=chosen.micro_windows,
        steps_per_s=speed,
        limit_s=limit_s,
        steps_per_lease=steps,
        rounds_a_day=rounds,
        down_bytes_a_day=rounds * down,
        up_bytes_a_day=rounds * up,
    )


def round_bytes(spec: RunSpec, phase: Phase) -> tuple[int, int]:
    """Upper bounds (down, up) for one round of a phase: the next version of its blocks, and the update."""
    shapes = {f"{k}.{name}": shape for k in phase.blocks for name, shape in block_shapes(spec, k).items()}
    up = update_codec(spec.swarm, phase.steps, phase.steps)
    return max_update_bytes(make_codec(spec.swarm.download), shapes), max_update_bytes(up, shapes)


def measure_speeds(spec: RunSpec, memory_bytes: int, text: bytes, device: torch.device) -> dict[int, float]:
    """Steps per second of every phase that fits. The first phase is measured; the others follow from their FLOPs."""
    fitting = [phase for phase in spec.phases if least_memory_bytes(spec, phase) <= memory_bytes]
    if not fitting:
        return {}
    flops_per_s = measure_flops_per_s(spec, fitting[0], _enough(text, spec), device)
    return {phase.index: flops_per_s / _step_flops(spec, phase) for phase in fitting}


def measure_flops_per_s(spec: RunSpec, phase: Phase, text: Bytes, device: torch.device) -> float:
    """Measured on steps of an initial block, with fewer windows if a whole step would take long. Not compiled: a worker
    of a run that is large enough to be compiled will be faster."""
    windows = max(1, min(spec.train.windows, int(spec.train.windows * PROBE_FLOPS / phase_flops(spec, phase))))
    spec = spec.with_(**{"train.windows": windows})
    initial = initial_block_tensors(spec)
    published = {block: initial(block) for block in (*phase.below, *phase.blocks, *phase.ahead)}
    trainer = BlockTrainer(spec, phase, text, published, device=device, compile=False)
    seconds = [trainer.step().seconds]  # the first warms up, and counts only if it is long
    while len(seconds) <= MEASURED_STEPS and sum(seconds) < ENOUGH_S:
        seconds.append(trainer.step().seconds)
    measured = seconds[1:] or seconds
    return len(measured) * _step_flops(spec, phase) / max(sum(measured), 1e-9)


def _step_flops(spec: RunSpec, phase: Phase) -> int:
    return phase_flops(spec, phase) + muon_flops(spec, phase)


def muon_flops(spec: RunSpec, phase: Phase) -> int:
    """Of one step of Muon: per iteration a matrix times its transpose, the square of that, and their product."""
    total = 0
    for shape in (shape for block in phase.blocks for shape in matrix_shapes(spec, block)):
        short, long = sorted(shape)
        total += NEWTON_SCHULZ_STEPS * 2 * (2 * short * short * long + short**3)
    return total


def _enough(text: bytes, spec: RunSpec) -> Bytes:
    """The text, repeated if it is too short for a window: the speed does not depend on its content."""
    least = spec.model.context + 1
    text = text or b"\n"
    return np.frombuffer(text * -(-least // len(text)), dtype=np.uint8)
