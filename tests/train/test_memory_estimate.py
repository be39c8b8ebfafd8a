"""The estimate of the memory that training takes."""

from dataclasses import replace

import pytest

from blocktrain.spec import Denoise, Stacked, preset
from blocktrain.train.memory_estimate import least_memory_bytes, memory_plan, training_memory_bytes

WHOLE = preset("tiny").with_(objective=Stacked(schedule="whole"))


def test_more_blocks_and_more_text_a_step_take_more_memory():
    spec = preset("tiny")
    first, last = spec.phases[0], spec.phases[-1]
    alone = replace(first, blocks=(0,))
    assert training_memory_bytes(spec, alone) < training_memory_bytes(spec, first) < training_memory_bytes(spec, last)
    assert training_memory_bytes(spec, first) < training_memory_bytes(spec.with_(**{"train.windows": 80}), first)


@pytest.mark.parametrize(
    "memory_bytes, streamed, micro_windows",
    [(None, False, 8), (20e6, False, 8), (5e6, False, 2), (3e6, True, 4), (1, True, 1)],
)
def test_a_phase_is_trained_in_the_fastest_way_that_fits(memory_bytes, streamed, micro_windows):
    plan = memory_plan(WHOLE, WHOLE.phases[0], memory_bytes)
    assert (plan.streamed, plan.micro_windows) == (streamed, micro_windows)


def test_a_block_that_is_trained_alone_is_not_streamed():
    alone = preset("tiny").with_(objective=Stacked(scaffold=0))
    assert not memory_plan(alone, alone.phases[0], 1).streamed


def test_denoise_takes_all_windows_at_once():
    denoise = preset("tiny").with_(objective=Denoise())
    assert least_memory_bytes(denoise, denoise.phases[0]) == training_memory_bytes(denoise, denoise.phases[0])


def test_the_paper_s_shape_trains_within_eight_gigabytes_if_it_is_streamed():
    paper = preset("paper").with_(objective=Stacked(schedule="whole"))
    assert least_memory_bytes(paper, paper.phases[0]) < 8e9
