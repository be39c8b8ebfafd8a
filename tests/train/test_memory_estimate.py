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


@pytest.mark.parametrize("share, kept_blocks", [(0.5, 3), (0.3, 1), (0.24, 0)])
def test_a_streamed_phase_keeps_the_activations_that_fit(share, kept_blocks):
    wide = WHOLE.with_(
        **{"model.width": 512, "model.layers": 16, "train.windows": 8, "model.context": 64, "train.micro_windows": 8}
    )
    phase = wide.phases[0]
    plan = memory_plan(wide, phase, int(share * training_memory_bytes(wide, phase)))
    assert (plan.streamed, plan.kept_blocks) == (True, kept_blocks)


def test_a_block_that_is_trained_alone_is_not_streamed():
    alone = preset("tiny").with_(objective=Stacked(scaffold=0))
    assert not memory_plan(alone, alone.phases[0], 1).streamed


def test_denoise_takes_all_windows_at_once_and_can_only_compute_layers_again():
    denoise = preset("tiny").with_(objective=Denoise(), **{"model.layers": 16})
    plan = memory_plan(denoise, denoise.phases[0], 1)
    assert (plan.streamed, plan.micro_windows, plan.checkpoint_activations) == (False, 8, True)
    assert plan.memory_bytes < training_memory_bytes(denoise, denoise.phases[0])


@pytest.mark.parametrize(
    "pinned, memory_bytes, chosen",
    [
        ({"train.micro_windows": 3}, None, (3, False)),
        ({"train.micro_windows": 3}, 1, (3, True)),
        ({"train.checkpoint_activations": True}, None, (8, True)),
        ({"train.checkpoint_activations": False}, 1, (1, False)),
        ({"train.micro_windows": 2, "train.checkpoint_activations": False}, 1, (2, False)),
    ],
)
def test_settings_pin_what_is_otherwise_chosen(pinned, memory_bytes, chosen):
    spec = preset("tiny").with_(**{"model.layers": 16, **pinned})
    plan = memory_plan(spec, spec.phases[0], memory_bytes)
    assert (plan.micro_windows, plan.checkpoint_activations) == chosen


def test_a_plan_names_the_settings_that_make_it_fit():
    paper = preset("paper").with_(objective=Stacked())
    plan = memory_plan(paper, paper.phases[-1], 8_000_000_000)
    assert (plan.settings(paper), plan.streamed) == (["train.micro_windows = 8"], False)
    least = memory_plan(paper, paper.phases[0], 1)
    assert least.settings(paper) == ["train.micro_windows = 1", "train.checkpoint_activations = true"]


def test_the_paper_s_shape_trains_within_eight_gigabytes_if_it_is_streamed():
    paper = preset("paper")
    assert memory_plan(paper, paper.phases[0], 2 * 10**9).streamed
    assert least_memory_bytes(paper, paper.phases[0]) < 8e9
