"""Streaming must change nothing but the memory: every test compares with the trainer that holds all blocks."""

import numpy as np
import pytest
import torch

from blocktrain.errors import StorageError
from blocktrain.io import shelf
from blocktrain.model.block import StackedBlock
from blocktrain.spec import EndToEnd, Stacked, preset
from blocktrain.train.streamed import StreamedTrainer
from blocktrain.train.trainer import BlockTrainer

TINY = preset("tiny").with_(**{"train.steps": 6})
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 60, dtype=np.uint8)
WHOLE = Stacked(schedule="whole")
OBJECTIVES = {
    "whole": WHOLE,
    "whole without own losses": Stacked(schedule="whole", own_weight=0.0),
    "with dropped states": Stacked(schedule="whole", state_dropout=0.3),
    "end to end": EndToEnd(),
    "a pair": Stacked(),
}


def both(spec, tmp_path, phase=0, published=None):
    arguments = spec, spec.phases[phase], TEXT, published or {}
    return BlockTrainer(*arguments, compile=False), StreamedTrainer(*arguments, scratch=tmp_path, compile=False)


def assert_equal(plain, streamed):
    expected, found = plain.weights(), streamed.weights()
    assert sorted(expected) == sorted(found)
    for block, tensors in expected.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found[block][name]), f"{block}.{name}"


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_streamed_weights_are_bit_identical(objective, tmp_path):
    plain, streamed = both(TINY.with_(objective=objective), tmp_path)
    for _ in range(3):
        expected, found = plain.step(), streamed.step()
        assert (found.loss, found.grad_norm) == (expected.loss, expected.grad_norm)
    assert_equal(plain, streamed)


@pytest.mark.parametrize("kept_blocks", [1, 3])
@pytest.mark.parametrize("micro_windows", [None, 3], ids=["all windows at once", "some at once"])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_kept_activations_change_no_bit(objective, micro_windows, kept_blocks, tmp_path):
    spec = TINY.with_(objective=objective)
    again, kept = (
        StreamedTrainer(
            spec,
            spec.phases[0],
            TEXT,
            {},
            scratch=tmp_path,
            compile=False,
            micro_windows=micro_windows,
            kept_blocks=kept,
        )
        for kept in (0, kept_blocks)
    )
    for _ in range(2):
        again.step(), kept.step()
    assert_equal(again, kept)


def test_a_block_whose_activations_are_kept_runs_once_a_step(tmp_path, monkeypatch):
    ran = []
    advance = StackedBlock.advance
    monkeypatch.setattr(StackedBlock, "advance", lambda block, *a: ran.append(block.index) or advance(block, *a))
    spec = TINY.with_(objective=WHOLE)
    StreamedTrainer(spec, spec.phases[0], TEXT, {}, scratch=tmp_path, compile=False, kept_blocks=2).step()
    assert ran == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_held_out_loss_is_the_same_and_changes_no_later_step(objective, tmp_path):
    spec = TINY.with_(objective=objective)
    plain, streamed = both(spec, tmp_path)
    untouched = BlockTrainer(spec, spec.phases[0], TEXT, {}, compile=False)
    assert plain.held_out_loss(TEXT[::-1].copy(), 5, 2) == streamed.held_out_loss(TEXT[::-1].copy(), 5, 2)
    assert plain.step().loss == streamed.step().loss == untouched.step().loss


@pytest.mark.parametrize("shape", [{"model.layers": (1, 2, 1, 3)}, {"model.table_rank": 8}], ids=["depths", "tables"])
def test_blocks_that_are_not_alike_are_streamed_too(shape, tmp_path):
    """Of blocks with narrow tables only the first one has an embedding."""
    spec = TINY.with_(objective=WHOLE, **shape)
    plain, streamed = both(spec, tmp_path)
    for _ in range(2):
        plain.step(), streamed.step()
    assert_equal(plain, streamed)


@pytest.mark.parametrize("table_rank", [None, 8])
def test_a_pair_is_streamed_on_top_of_published_blocks(tmp_path, table_rank):
    spec = TINY.with_(objective=Stacked(), **{"model.table_rank": table_rank})
    first = BlockTrainer(spec, spec.phases[0], TEXT, {}, compile=False)
    first.step()
    plain, streamed = both(spec, tmp_path, phase=1, published=first.weights())
    for _ in range(2):
        plain.step(), streamed.step()
    assert_equal(plain, streamed)


def test_either_trainer_continues_what_the_other_saved(tmp_path):
    spec = TINY.with_(objective=WHOLE)
    plain, streamed = both(spec, tmp_path / "one")
    other_plain, other_streamed = both(spec, tmp_path / "two")
    for _ in range(2):
        plain.step(), streamed.step()
    other_streamed.restore(plain.state(), 2)
    other_plain.restore(streamed.state(), 2)
    plain.step(), other_streamed.step(), other_plain.step()
    assert_equal(plain, other_streamed)
    assert_equal(plain, other_plain)


def test_adopted_weights_are_what_the_next_step_starts_from(tmp_path):
    plain, streamed = both(TINY.with_(objective=WHOLE), tmp_path)
    plain.step(), streamed.step()
    mean = {block: {name: 0.5 * t for name, t in tensors.items()} for block, tensors in plain.weights().items()}
    plain.adopt(mean), streamed.adopt(mean)
    plain.step(), streamed.step()
    assert_equal(plain, streamed)


@pytest.mark.parametrize("streamed", [False, True], ids=["held", "streamed"])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_fewer_windows_at_once_change_only_the_rounding(objective, streamed, tmp_path):
    spec = TINY.with_(objective=objective)
    whole, parts = (
        StreamedTrainer(spec, spec.phases[0], TEXT, {}, scratch=tmp_path, compile=False, micro_windows=windows)
        if streamed
        else BlockTrainer(spec, spec.phases[0], TEXT, {}, compile=False, micro_windows=windows)
        for windows in (None, 3)
    )
    for _ in range(2):
        expected, found = whole.step(), parts.step()
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    for block, tensors in whole.weights().items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(parts.weights()[block][name], tensor, atol=2e-4, rtol=0)


def test_a_full_disk_is_a_clear_error_before_any_step(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shelf.os, "posix_fallocate", full)
    spec = TINY.with_(objective=WHOLE)
    with pytest.raises(StorageError, match=r"No space left on device.*free at least"):
        StreamedTrainer(spec, spec.phases[0], TEXT, {}, scratch=tmp_path)


def test_nothing_is_left_in_the_scratch_folder(tmp_path):
    _, streamed = both(TINY.with_(objective=WHOLE), tmp_path)
    streamed.step()
    assert list(tmp_path.iterdir()) == []


def test_the_own_losses_of_a_whole_model_train_the_read_outs_alone():
    def gradients(own_weight):
        spec = TINY.with_(objective=Stacked(schedule="whole", own_weight=own_weight))
        trainer = BlockTrainer(spec, spec.phases[0], TEXT, {}, compile=False)
        for block in trainer.trained:
            torch.nn.init.normal_(block.readout, generator=torch.Generator().manual_seed(block.index))
        trainer._loss(*trainer._batch())[0].backward()
        return {f"{x.index}.{name}": each.grad for x in trainer.trained for name, each in x.named_parameters()}

    bare, with_own = gradients(0.0), gradients(0.1)
    changed = {name for name in bare if bare[name] is None or not torch.equal(bare[name], with_own[name])}
    assert changed == {"0.readout", "1.readout", "2.readout"}
