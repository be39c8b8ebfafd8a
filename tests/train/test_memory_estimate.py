"""The estimate of the memory that training takes."""

from dataclasses import replace

from blocktrain.spec import preset
from blocktrain.train.memory_estimate import training_memory_bytes


def test_more_blocks_and_more_text_a_step_take_more_memory():
    spec = preset("tiny")
    first, last = spec.phases[0], spec.phases[-1]
    alone = replace(first, blocks=(0,))
    assert training_memory_bytes(spec, alone) < training_memory_bytes(spec, first) < training_memory_bytes(spec, last)
    assert training_memory_bytes(spec, first) < training_memory_bytes(spec.with_(**{"train.windows": 80}), first)
