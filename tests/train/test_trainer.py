import numpy as np
import pytest
import torch

from blocktrain.spec import Denoise, EndToEnd, Stacked, preset
from blocktrain.train.trainer import BlockTrainer

TINY = preset("tiny").with_(**{"train.steps": 6})
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 60, dtype=np.uint8)
OBJECTIVES = {
    "stacked": Stacked(state_dropout=0.2),
    "denoise": Denoise(span_share=0.25),
    "end_to_end": EndToEnd(),
}


def trainer(objective, phase=0, published=None, **options):
    spec = TINY.with_(objective=objective)
    return BlockTrainer(spec, spec.phases[phase], TEXT, published or {}, **options)


def all_weights(trained: BlockTrainer) -> torch.Tensor:
    return torch.cat([t.flatten() for block in trained.weights().values() for t in block.values()])


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_restored_trainer_goes_on_as_if_never_stopped(objective):
    straight, first = trainer(objective), trainer(objective)
    for _ in range(4):
        straight.step()
    for _ in range(2):
        first.step()
    second = trainer(objective)
    second.restore(first.state(), first.step_done)
    for _ in range(2):
        second.step()
    assert torch.equal(all_weights(straight), all_weights(second))


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_training_lowers_the_loss(objective):
    trained = trainer(objective)
    losses = [trained.step().loss for _ in range(6)]
    assert losses[-1] < losses[0]


def test_a_report_counts_the_step_it_tells_of():
    report = trainer(Stacked()).step()
    assert (report.step, report.steps, report.step_bytes) == (1, 6, 8 * 64)
    assert report.lr_factor == pytest.approx(1 / 5)


def test_a_block_with_narrow_tables_starts_where_the_one_before_it_ended():
    spec = preset("tiny").with_(**{"model.table_rank": 8, "train.steps": 2})
    first = BlockTrainer(spec, spec.phases[0], TEXT, {}, compile=False)
    first.step()
    second = BlockTrainer(spec, spec.phases[1], TEXT, first.weights(), compile=False)
    for name in ("readout", "readout_down"):
        assert torch.equal(second.weights()[2][name], first.weights()[1][name])


def test_other_shards_see_other_windows():
    here, there = trainer(Stacked(), shard=0), trainer(Stacked(), shard=1)
    assert here.step().loss == there.step().loss == pytest.approx(np.log(256), rel=1e-4)
    assert not torch.equal(all_weights(here), all_weights(there))


def test_a_phase_trains_its_block_and_scaffold_and_nothing_below():
    below = trainer(Stacked())
    below.step()
    above = trainer(Stacked(), phase=1, published=below.weights())
    before = {name: tensor.clone() for name, tensor in below.weights()[0].items()}
    above.step()
    assert sorted(above.weights()) == [1, 2]
    assert all(torch.equal(before[name], tensor) for name, tensor in below.weights()[0].items())


def test_the_state_below_is_what_the_published_blocks_make_of_the_bytes():
    first = trainer(Stacked())
    for _ in range(3):
        first.step()
    second = trainer(Stacked(), phase=1, published=first.weights())
    second.step()
    third = trainer(Stacked(), phase=2, published=first.weights() | second.weights())
    inputs = torch.from_numpy(TEXT[:128].astype(np.int64)).view(2, 64)
    with torch.no_grad():
        expected = second.trained[0].advance(inputs, first.trained[0].advance(inputs, None))
        assert torch.equal(third._state_below(inputs), expected)


def test_refreshed_snapshots_change_what_a_block_trains_on():
    spec = Stacked(schedule="simultaneous", scaffold=0, lookahead=1)
    moved = trainer(spec, phase=0)
    for _ in range(3):
        moved.step()
    stale, fresh = (trainer(spec, phase=1, published=trainer(spec, phase=0).weights()) for _ in range(2))
    fresh.refresh(moved.weights())
    stale.step(), fresh.step()
    assert not torch.equal(all_weights(stale), all_weights(fresh))


def test_a_new_block_starts_from_the_read_out_below_it():
    first = trainer(Stacked())
    for _ in range(3):
        first.step()
    second = trainer(Stacked(), phase=1, published=first.weights())
    assert torch.equal(second.weights()[2]["readout"], first.weights()[1]["readout"])


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own, at the import of its compiler
def test_compiled_training_equals_eager_training():
    alone = Stacked(scaffold=0)  # less to compile
    eager, compiled = trainer(alone, compile=False), trainer(alone, compile=True)
    for _ in range(2):
        eager.step(), compiled.step()
    torch.testing.assert_close(all_weights(eager), all_weights(compiled), atol=2e-3, rtol=0)


def saved_bytes(objective, **options) -> int:
    """Of all tensors that one step keeps for its backward pass."""
    spec, sizes = TINY.with_(objective=objective, **{"model.layers": 16}), []
    one = BlockTrainer(spec, spec.phases[0], TEXT, {}, **options)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.nbytes) or x, lambda x: x):
        one._loss(*one._batch())
    return sum(sizes)


@pytest.mark.parametrize("objective", [Stacked(), Denoise()], ids=lambda each: each.kind)
def test_layers_that_are_computed_again_keep_little_for_the_backward_pass(objective):
    assert saved_bytes(objective, checkpoint_activations=True) < 0.5 * saved_bytes(objective)
