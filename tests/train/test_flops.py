import numpy as np
import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from blocktrain.spec import Denoise, EndToEnd, Stacked, preset
from blocktrain.train.flops import phase_flops, run_flops
from blocktrain.train.reference import equal_work_steps, reference_of
from blocktrain.train.trainer import BlockTrainer

TINY = preset("tiny")
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 60, dtype=np.uint8)
CASES = [
    (EndToEnd(), 0),
    (Stacked(), 0),
    (Stacked(), 2),
    (Stacked(schedule="simultaneous", scaffold=0, lookahead=1), 1),
    (Denoise(), 0),
]
SHAPES = [{}, {"model.vocabulary": 400, "model.table_rank": 16}]


@pytest.mark.parametrize("shape", SHAPES, ids=["bytes", "narrow tables"])
@pytest.mark.parametrize("objective, phase", CASES)
def test_the_count_is_what_torch_counts_less_the_optimiser(objective, phase, shape):
    spec = TINY.with_(objective=objective, **shape)
    published = {k: BlockTrainer(spec, p, TEXT, {}).weights()[k] for p in spec.phases for k in p.blocks}
    trainer = BlockTrainer(spec, spec.phases[phase], TEXT, published)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # torch counts no fused CPU attention
        loss, _ = trainer._loss(*trainer._batch())
        loss.backward()
    assert phase_flops(spec, spec.phases[phase]) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_shared_layers_are_counted_as_often_as_they_are_walked_over():
    deep = TINY.with_(**{"model.layers": 12})
    assert run_flops(deep.with_(**{"model.physical_layers": 1})) == run_flops(deep)


def test_the_reference_at_equal_work_does_as_much_as_the_run():
    spec = TINY.with_(**{"train.steps": 300})
    twin = reference_of(spec, steps=equal_work_steps(spec))
    assert run_flops(twin) == pytest.approx(run_flops(spec), rel=0.01)


def test_the_reference_has_the_longest_phase_s_steps():
    twin = reference_of(TINY.with_(**{"train.steps": [5, 9, 7]}))
    assert twin.train.steps == 9
    assert len(twin.phases) == 1
