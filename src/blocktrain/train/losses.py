"""The losses of the objectives, as pure functions. Next: trainer.py, which minimises them; model/noise.py, the formulas
of denoise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from blocktrain.model import noise
from blocktrain.model.block import Block, DenoiseBlock, StackedBlock


def byte_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean nats per byte."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def stacked_loss(
    trained: Sequence[StackedBlock],
    ahead: Sequence[StackedBlock],
    bytes_BT: Tensor,
    targets_BT: Tensor,
    state_BTD: Tensor | None,
    own_weight: float,
    keep_KB: Tensor | None = None,
    own_detached: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """The loss at the end of the chain trained + ahead, plus own_weight times the loss of each trained block before it.
    With all blocks trained and own_weight = 0 this is end-to-end training. `keep_KB` is 0 where a window loses the
    state that enters block K of the chain. With `own_detached` a block's own loss trains its read-out alone. Also
    returns the unweighted cross entropies, the end of the chain last."""
    chain = [*trained, *ahead]
    weights = [own_weight] * len(trained) + [0.0] * len(ahead)
    weights[-1] = 1.0
    loss, entropies = targets_BT.new_zeros((), dtype=torch.float32), []
    for position, (block, weight) in enumerate(zip(chain, weights, strict=True)):
        if state_BTD is not None and keep_KB is not None:
            state_BTD = state_BTD * keep_KB[position, :, None, None]
        state_BTD = block.advance(bytes_BT, state_BTD)
        if weight:
            detached = own_detached and position < len(chain) - 1
            entropy = byte_cross_entropy(block.read_out(state_BTD.detach() if detached else state_BTD), targets_BT)
            loss = loss + weight * entropy
            entropies.append(entropy.detach())
    return loss, entropies


def denoise_loss(
    block: DenoiseBlock,
    bytes_BT: Tensor,
    targets_BT: Tensor,
    sigma_B: Tensor,
    noise_BTV: Tensor,
    span_start: int | None,
) -> tuple[Tensor, list[Tensor]]:
    """Cross entropy of the byte behind z = e_x + σ·noise, weighted by λ(σ). Also returns the unweighted one."""
    z_BTV = torch.addcmul(F.embedding(targets_BT, block.code_table), sigma_B[:, None, None], noise_BTV)
    scores_BTV = z_BTV @ block.code_table.T
    del z_BTV, noise_BTV  # the largest tensors here: free them before the backward pass
    logits = block.denoise(bytes_BT, scores_BTV, sigma_B, span_start)
    entropy_BT = F.cross_entropy(logits.flatten(0, 1).float(), targets_BT.flatten(), reduction="none").view_as(
        targets_BT
    )
    weight_B1 = noise.loss_weight(sigma_B, block.objective.sigma_data)[:, None]
    return (weight_B1 * entropy_BT).mean(), [entropy_BT.detach().mean()]


def run_below(block: StackedBlock, inputs: Tensor, state: Tensor | None) -> Tensor:
    with torch.no_grad():
        return block.advance(inputs, state)


def stacked_only(blocks: Sequence[Block]) -> list[StackedBlock]:
    return [block for block in blocks if isinstance(block, StackedBlock)]
