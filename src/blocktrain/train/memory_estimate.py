"""How much memory training takes, estimated from the shapes, and how a phase is trained with the memory that there is.
The coordinator uses it to grant leases that fit a worker; `blocktrain doctor` shows it before a worker joins.
Next: streamed.py, training with one block in memory; flops.py, the amount of work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from blocktrain.model.block import build_block
from blocktrain.spec import Denoise, Phase, RunSpec

FLOAT_BYTES = 4
STATE_BYTES = 16  # per trained parameter: weight, gradient and two moments
LAYER_VALUES = 24  # numbers kept for the backward pass per position and layer, in multiples of the width


@dataclass(frozen=True)
class MemoryPlan:
    """How a phase is trained: its blocks all in memory or streamed, one at a time; and how many windows of a step go
    through the blocks at once, with their gradients summed up. Streaming changes no bit of the result; fewer windows at
    once change its rounding."""

    streamed: bool
    micro_windows: int
    memory_bytes: int


def memory_plan(spec: RunSpec, phase: Phase, memory_bytes: int | None) -> MemoryPlan:
    """The fastest plan that fits this much memory (None: any), or the smallest one if none does."""
    plans = list(_plans(spec, phase))
    fitting = [plan for plan in plans if memory_bytes is None or plan.memory_bytes <= memory_bytes]
    return fitting[0] if fitting else min(plans, key=lambda plan: plan.memory_bytes)


def least_memory_bytes(spec: RunSpec, phase: Phase) -> int:
    """What a worker needs at least to train a phase."""
    return min(plan.memory_bytes for plan in _plans(spec, phase))


def can_stream(spec: RunSpec, phase: Phase) -> bool:
    """Whether a phase has several blocks that are trained through one loss."""
    return len(phase.blocks) > 1 and not phase.ahead and not isinstance(spec.objective, Denoise)


def _plans(spec: RunSpec, phase: Phase) -> Iterator[MemoryPlan]:
    """The fastest first: fewer windows at once cost little, streaming costs a second forward pass."""
    for streamed in (False, True) if can_stream(spec, phase) else (False,):
        for windows in _window_counts(spec):
            memory_bytes = _streamed_bytes if streamed else _held_bytes
            yield MemoryPlan(streamed, windows, memory_bytes(spec, phase, windows * spec.model.context))


def _window_counts(spec: RunSpec) -> Iterator[int]:
    """All windows at once, then halves of that. `denoise` draws its noise for all of them together."""
    windows = spec.train.windows
    while True:
        yield windows
        if windows == 1 or isinstance(spec.objective, Denoise):
            return
        windows = -(-windows // 2)


def training_memory_bytes(spec: RunSpec, phase: Phase) -> int:
    """What a worker needs to train a phase without any saving, as the sum of three parts. 16 bytes per trained
    parameter (weight, gradient, two moments of the optimiser). 4 bytes per parameter of the largest block that is only
    run and of every block that the gradient passes through. The activations of one step: LAYER_VALUES × width numbers
    per position and layer that the gradient passes through, and the logits of every read-out with their gradients."""
    return _held_bytes(spec, phase, spec.step_bytes)


def _held_bytes(spec: RunSpec, phase: Phase, positions: int) -> int:
    trained = sum(_parameters(spec, block) for block in phase.blocks)
    run_only = max((_parameters(spec, block) for block in phase.below), default=0)
    passed = sum(_parameters(spec, block) for block in phase.ahead)
    through = (*phase.blocks, *phase.ahead)
    layers = sum(spec.model.layers_of(block) for block in through)
    values_per_position = layers * LAYER_VALUES * spec.model.width + 2 * len(through) * spec.model.vocabulary
    return STATE_BYTES * trained + FLOAT_BYTES * (run_only + passed + positions * values_per_position)


def _streamed_bytes(spec: RunSpec, phase: Phase, positions: int) -> int:
    """The same with one trained block in memory: its state, the weights of one block below, the activations and logits
    of one block, and for all positions of the step the states between the blocks with one gradient."""
    trained = max(_parameters(spec, block) for block in phase.blocks)
    run_only = max((_parameters(spec, block) for block in phase.below), default=0)
    layers = max(spec.model.layers_of(block) for block in phase.blocks)
    values_per_position = layers * LAYER_VALUES * spec.model.width + 2 * spec.model.vocabulary
    states = spec.step_bytes * (len(phase.blocks) + 2) * spec.model.width
    return STATE_BYTES * trained + FLOAT_BYTES * (run_only + states + positions * values_per_position)


@cache
def _parameters(spec: RunSpec, block: int) -> int:
    return sum(tensor.numel() for tensor in build_block(spec, block).state_dict().values())
