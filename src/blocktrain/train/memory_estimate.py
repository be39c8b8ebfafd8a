"""How much memory training takes, estimated from the shapes, and how a phase is trained with the memory that there is.
The coordinator uses it to grant leases that fit a worker; `blocktrain doctor` shows it before a worker joins.
Next: streamed.py, training with one block in memory; flops.py, the amount of work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

from blocktrain.model.block import build_block
from blocktrain.spec import Denoise, Phase, RunSpec

FLOAT_BYTES = 4
STATE_BYTES = 16  # per trained parameter: weight, gradient and two moments
UPDATE_BYTES = 22  # the same, and what an update computes on its way (measured)
LAYER_VALUES = 24  # numbers kept for the backward pass per position and layer, in multiples of the width


@dataclass(frozen=True)
class MemoryPlan:
    """How a phase is trained: its blocks all in memory or streamed, one at a time; and how many windows of a step go
    through the blocks at once, with their gradients summed up; and whether every layer is computed again in the
    backward pass instead of keeping its results. Fewer windows at once change the rounding of the result; the rest
    changes no bit of it."""

    streamed: bool
    micro_windows: int
    memory_bytes: int
    checkpoint_activations: bool = False
    kept_blocks: int = 0  # streamed: so many blocks before the last keep their activations and do not run again

    def settings(self, spec: RunSpec) -> list[str]:
        """What differs from training without any saving, as settings of a run."""
        named = [f"train.micro_windows = {self.micro_windows}"] if self.micro_windows < spec.train.windows else []
        return named + (["train.checkpoint_activations = true"] if self.checkpoint_activations else [])


@lru_cache(maxsize=64)
def memory_plan(spec: RunSpec, phase: Phase, memory_bytes: int | None) -> MemoryPlan:
    """The fastest plan that fits this much memory (None: any), or the smallest one if none does."""
    plans = list(_plans(spec, phase))
    fitting = [plan for plan in plans if memory_bytes is None or plan.memory_bytes <= memory_bytes]
    return fitting[0] if fitting else min(plans, key=lambda plan: plan.memory_bytes)


@lru_cache(maxsize=64)
def least_memory_bytes(spec: RunSpec, phase: Phase) -> int:
    """What a worker needs at least to train a phase."""
    return min(plan.memory_bytes for plan in _plans(spec, phase))


def can_stream(spec: RunSpec, phase: Phase) -> bool:
    """Whether a phase has several blocks that are trained through one loss."""
    return len(phase.blocks) > 1 and not phase.ahead and not isinstance(spec.objective, Denoise)


def _plans(spec: RunSpec, phase: Phase) -> Iterator[MemoryPlan]:
    """The fastest first: fewer windows at once cost little, streaming and computing again cost a second forward pass.
    The settings of the run may leave no choice."""
    pinned = spec.train.checkpoint_activations
    for again in (False, True) if pinned is None else (pinned,):
        for windows in _window_counts(spec):
            yield MemoryPlan(False, windows, _held_bytes(spec, phase, windows * spec.model.context, again), again)
        if not can_stream(spec, phase):
            continue
        for kept in reversed(range(len(phase.blocks))):
            for windows in _window_counts(spec):
                memory_bytes = _streamed_bytes(spec, phase, windows * spec.model.context, again, kept)
                yield MemoryPlan(True, windows, memory_bytes, again, kept)


def _window_counts(spec: RunSpec) -> Iterator[int]:
    """All windows at once, then halves of that. `denoise` draws its noise for all of them together."""
    windows = spec.train.micro_windows or spec.train.windows
    while True:
        yield windows
        if windows == 1 or spec.train.micro_windows or isinstance(spec.objective, Denoise):
            return
        windows = -(-windows // 2)


def training_memory_bytes(spec: RunSpec, phase: Phase) -> int:
    """What a worker needs to train a phase without any saving, as the sum of three parts. 16 bytes per trained
    parameter (weight, gradient, two moments of the optimiser). 4 bytes per parameter of the largest block that is only
    run and of every block that the gradient passes through. The activations of one step: LAYER_VALUES × width numbers
    per position and layer that the gradient passes through, and the logits of every read-out with their gradients."""
    return _held_bytes(spec, phase, spec.step_tokens)


def _held_bytes(spec: RunSpec, phase: Phase, positions: int, again: bool = False) -> int:
    trained = sum(_parameters(spec, block) for block in phase.blocks)
    run_only = max((_parameters(spec, block) for block in phase.below), default=0)
    passed = sum(_parameters(spec, block) for block in phase.ahead)
    through = (*phase.blocks, *phase.ahead)
    layers = sum(spec.model.layers_of(block) for block in through)
    values_per_position = _layer_values(layers, again) * spec.model.width + 2 * len(through) * spec.model.vocabulary
    return STATE_BYTES * trained + FLOAT_BYTES * (run_only + passed + positions * values_per_position)


def _streamed_bytes(spec: RunSpec, phase: Phase, positions: int, again: bool = False, kept: int = 0) -> int:
    """The same with one trained block in memory. Its moments are there for its update alone, when no activations are.
    Before that: its weights and gradients, the weights of one block below, the activations and logits of one block, and
    for all positions of the step the states between the blocks with one gradient, and the activations of the blocks
    that keep theirs."""
    trained = max(_parameters(spec, block) for block in phase.blocks)
    run_only = max((_parameters(spec, block) for block in phase.below), default=0)
    layers, width = max(spec.model.layers_of(block) for block in phase.blocks), spec.model.width
    values_per_position = _layer_values(layers, again) * width + 2 * spec.model.vocabulary
    own_logits = 2 * spec.model.vocabulary if getattr(spec.objective, "own_weight", 0.0) else 0
    kept_values = kept * ((layers if again else layers * LAYER_VALUES) * width + own_logits)
    states = (len(phase.blocks) + 2) * width
    values = positions * values_per_position + spec.step_tokens * (states + kept_values)
    return max(UPDATE_BYTES * trained, FLOAT_BYTES * (2 * trained + values)) + FLOAT_BYTES * run_only


def _layer_values(layers: int, again: bool) -> int:
    """Numbers kept per position, in multiples of the width. A layer that is computed again keeps what enters it."""
    return layers + LAYER_VALUES if again else layers * LAYER_VALUES


@cache
def _parameters(spec: RunSpec, block: int) -> int:
    return sum(tensor.numel() for tensor in build_block(spec, block).state_dict().values())
