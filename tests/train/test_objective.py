import pytest
import torch

from blocktrain.model.block import DenoiseBlock, StackedBlock, build_block
from blocktrain.spec import Denoise, preset
from blocktrain.train.losses import denoise_loss, stacked_loss

TINY = preset("tiny")


def stacked_blocks(count: int) -> list[StackedBlock]:
    """Blocks with filled read-outs, so that gradients flow from the first step."""
    blocks = [StackedBlock(TINY, index) for index in range(count)]
    for block in blocks:
        block.readout.data.normal_(generator=torch.Generator().manual_seed(block.index))
        block.gain.data.fill_(0.5)
    return blocks


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    window = torch.randint(0, 256, (3, TINY.model.context + 1), generator=torch.Generator().manual_seed(5))
    return window[:, :-1], window[:, 1:]


def test_an_untrained_block_knows_nothing():
    loss, entropies = stacked_loss([StackedBlock(TINY, 0)], [], *batch(), None, own_weight=0.1)
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), rel=1e-4)
    assert entropies[-1].item() == loss.item()


def test_the_loss_is_the_end_of_the_chain_plus_a_share_of_each_read_out_before_it():
    blocks = stacked_blocks(3)
    inputs, targets = batch()
    state, entropies = None, []
    for block in blocks:
        state, logits = block(inputs, state)
        entropies.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item())
    loss, reported = stacked_loss(blocks[:2], blocks[2:], inputs, targets, None, own_weight=0.1)
    assert loss.item() == pytest.approx(0.1 * entropies[0] + 0.1 * entropies[1] + entropies[2], rel=1e-5)
    assert reported[-1].item() == pytest.approx(entropies[2], rel=1e-5)


def test_look_ahead_reaches_the_trained_block_through_frozen_ones():
    trained, frozen = stacked_blocks(2)
    frozen.requires_grad_(False)
    loss, _ = stacked_loss([trained], [frozen], *batch(), None, own_weight=0.0)
    loss.backward()
    assert trained.layers[0].attention_out.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in frozen.parameters())


def test_a_window_that_lost_its_state_is_read_without_it():
    (block,) = stacked_blocks(1)
    inputs, targets = batch()
    state = torch.randn(3, TINY.model.context, TINY.model.width)
    nothing_kept, _ = stacked_loss([block], [], inputs, targets, state, 0.1, keep_KB=torch.zeros(1, 3))
    without_state, _ = stacked_loss([block], [], inputs, targets, None, 0.1)
    assert nothing_kept.item() == pytest.approx(without_state.item(), rel=1e-5)


def test_denoising_is_weighted_by_the_noise_level_of_each_window():
    spec = TINY.with_(objective=Denoise())
    block = build_block(spec, 0)
    assert isinstance(block, DenoiseBlock)
    inputs, targets = batch()
    sigma = torch.tensor([1.0, 2.0, 10.0])
    noise = torch.randn(*inputs.shape, 256, generator=torch.Generator().manual_seed(0))
    loss, (entropy,) = denoise_loss(block, inputs, targets, sigma, noise, None)
    single = [
        denoise_loss(block, inputs[i : i + 1], targets[i : i + 1], sigma[i : i + 1], noise[i : i + 1], None)
        for i in range(3)
    ]
    weights = [5.0, 4.25, 4.01]  # (σ² + ¼) / (σ/2)²
    expected = sum(weight * plain.item() for weight, (_, (plain,)) in zip(weights, single, strict=True)) / 3
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert entropy.item() == pytest.approx(sum(plain.item() for _, (plain,) in single) / 3, rel=1e-4)
