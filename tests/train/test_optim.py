import pytest
import torch
from torch import nn

from blocktrain.model.block import build_block
from blocktrain.spec import OptimSpec, preset
from blocktrain.train.optim import AdamW, BlockOptimizer, Muon, lr_factor, orthogonalise

TINY = preset("tiny")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "step, factor", [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (50, 1.0), (75, 0.5), (99, 0.02), (100, 0.0)]
)
def test_the_learning_rate_warms_up_holds_and_falls_to_zero(step, factor):
    optim = OptimSpec(warmup_steps=10, decay_share=0.5)
    assert lr_factor(step * 64, 100 * 64, 64, optim) == pytest.approx(factor)


def test_without_warm_up_or_decay_the_learning_rate_is_constant():
    optim = OptimSpec(warmup_steps=0, decay_share=0.0)
    assert {lr_factor(step, 10, 1, optim) for step in range(10)} == {1.0}


@pytest.mark.parametrize("shape", [(16, 16), (64, 16), (16, 64)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape):
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, *shape, generator=seeded())))
    assert 0.6 < values.min() <= values.max() < 1.3


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # which torch says of its own switch for oneDNN
def test_our_muon_takes_the_steps_of_torchs():
    start = torch.randn(48, 16, generator=seeded())
    gradients = [torch.randn(48, 16, generator=seeded(seed)) for seed in range(1, 5)]
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    pair = (
        (ours, Muon([ours], lr=0.02, momentum=0.95)),
        (theirs, torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0, momentum=0.95, adjust_lr_fn="original")),
    )
    for parameter, optimizer in pair:
        for gradient in gradients:
            parameter.grad = gradient.clone()
            with torch.backends.mkldnn.flags(enabled=False):  # some virtual machines announce bf16 units they lack
                optimizer.step()
    moved, expected = (ours - start).detach().flatten(), (theirs - start).detach().flatten()
    assert torch.cosine_similarity(moved, expected, dim=0) > 0.99  # torch iterates in bf16
    assert moved.norm().item() == pytest.approx(expected.norm().item(), rel=0.02)


def test_our_adamw_takes_exactly_the_steps_of_torchs():
    start = torch.randn(48, 16, generator=seeded())
    gradients = [torch.randn(48, 16, generator=seeded(seed)) for seed in range(1, 5)]
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    pair = (
        (ours, AdamW([ours], lr=0.004, betas=(0.9, 0.95))),
        (theirs, torch.optim.AdamW([theirs], lr=0.004, betas=(0.9, 0.95), weight_decay=0.0, fused=True)),
    )
    for parameter, optimizer in pair:
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
    assert not torch.equal(ours, start)
    assert torch.equal(ours, theirs)


def test_a_table_without_a_gradient_stays_as_it_is():
    read, unread = (nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = AdamW([read, unread], lr=0.1, betas=(0.9, 0.95))
    read.grad = torch.ones(4)
    optimizer.step()
    assert not torch.equal(read, torch.ones(4))
    assert torch.equal(unread, torch.ones(4))


def test_a_restored_optimiser_takes_the_same_next_step():
    def moved_blocks(restore_after: int) -> torch.Tensor:
        block = build_block(TINY, 0)
        optimizer = BlockOptimizer([block], TINY.optim)
        for step in range(4):
            if step == restore_after:
                state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
                optimizer = BlockOptimizer([block], TINY.optim)
                optimizer.load(state)
            for parameter in block.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=seeded(step))
            optimizer.step(factor=0.5)
        return torch.cat([parameter.detach().flatten() for parameter in block.parameters()])

    assert torch.equal(moved_blocks(restore_after=-1), moved_blocks(restore_after=2))


def test_all_gradients_are_clipped_together():
    block = build_block(TINY, 0)
    optimizer = BlockOptimizer([block], TINY.optim.model_copy(update={"adam_lr": 1.0}))
    for parameter in block.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    count = sum(parameter.numel() for parameter in block.parameters())
    assert optimizer.step(factor=1.0) == pytest.approx(100 * count**0.5, rel=1e-3)
    assert all(parameter.grad is None for parameter in block.parameters())
