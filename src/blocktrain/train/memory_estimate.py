"""How much memory training takes, estimated from the shapes. The coordinator uses it to grant leases that fit a worker;
`blocktrain doctor` shows it before a worker joins. Next: flops.py, the amount of work."""

from __future__ import annotations

from functools import cache

from blocktrain.model.block import build_block
from blocktrain.spec import NUM_SYMBOLS, Phase, RunSpec

FLOAT_BYTES = 4
STATE_BYTES = 16  # per trained parameter: weight, gradient and two moments
LAYER_VALUES = 24  # numbers kept for the backward pass per position and layer, in multiples of the width


def training_memory_bytes(spec: RunSpec, phase: Phase) -> int:
    """What a worker needs to train a phase, as the sum of three parts. 16 bytes per trained parameter (weight,
    gradient, two moments of the optimiser). 4 bytes per parameter of the largest block that is only run and of every
    block that the gradient passes through. The activations of one step: LAYER_VALUES × width numbers per position and
    layer that the gradient passes through, and the logits of every read-out with their gradients."""
    trained = sum(_parameters(spec, block) for block in phase.blocks)
    run_only = max((_parameters(spec, block) for block in phase.below), default=0)
    passed = sum(_parameters(spec, block) for block in phase.ahead)
    through = (*phase.blocks, *phase.ahead)
    layers = sum(spec.model.layers_of(block) for block in through)
    values_per_position = layers * LAYER_VALUES * spec.model.width + 2 * len(through) * NUM_SYMBOLS
    return STATE_BYTES * trained + FLOAT_BYTES * (run_only + passed + spec.step_bytes * values_per_position)


@cache
def _parameters(spec: RunSpec, block: int) -> int:
    return sum(tensor.numel() for tensor in build_block(spec, block).state_dict().values())
