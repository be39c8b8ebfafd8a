"""Distilling: a drafter for the first stage of a served model. It is a copy of the block after that stage's blocks,
trained to answer as the whole model does. It changes how fast a model is served, and no exact text. Next:
serve/segment/segment.py, which drafts with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from blocktrain.data.corpus import Corpus
from blocktrain.data.windows import windows
from blocktrain.errors import ConfigError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import StackedBlock, build_block
from blocktrain.model.stack import BlockModel
from blocktrain.train.optim import BlockOptimizer
from blocktrain.train.run import load_model

DEFAULT_STEPS = 100
LARGEST_FACTOR = 0.5  # of the run's learning rates: the copy is trained already
MEASURED_WINDOWS = 8


@dataclass(frozen=True)
class Distilled:
    """How often draft and whole model agree: 1 - total variation of their distributions, a mean over held-out text."""

    before: float  # by the read-out of the first stage's last block
    after: float


def distil(run: RunDirectory, corpus: Corpus, last: int, steps: int = DEFAULT_STEPS) -> Distilled:
    """Trains a drafter behind block `last`, the last one of the first stage, and saves it in the run directory."""
    _require_stack(run, last)
    spec, model = run.spec, load_model(run).requires_grad_(False)
    drafter = build_block(spec, last + 1)
    assert isinstance(drafter, StackedBlock)
    drafter.load_state_dict(model.blocks[last + 1].state_dict())
    optimizer, seed = BlockOptimizer([drafter], spec.optim), spec.seed
    settings = {"count": spec.train.windows, "length": spec.model.context, "seed": seed, "block": last, "shard": 0}
    for step in range(steps):
        batch = torch.from_numpy(windows(corpus.train, step=step, **settings)).long()
        state, _, answer = states_and_answer(model, batch, last)
        _, drafted = drafter(batch, state)
        loss = F.cross_entropy(drafted.flatten(0, 1), answer.softmax(-1).flatten(0, 1))
        torch.autograd.backward(loss)
        optimizer.step(LARGEST_FACTOR * math.cos(math.pi / 2 * step / steps))
    found = _measured(model, drafter.eval(), corpus, last)
    run.save_drafter(last, drafter.state_dict(), steps)
    return found


def _require_stack(run: RunDirectory, last: int) -> None:
    blocks = run.spec.model.blocks
    if run.spec.objective.kind == "denoise":
        raise ConfigError("the blocks of a denoise model draft together without a drafter: distil a stacked model")
    if not 0 <= last < blocks - 1:
        raise ConfigError(
            f"a drafter behind block {last} has no block after it to start from: {run.path} has blocks 0 to "
            f"{blocks - 1}, and the first stage must leave at least one to the others"
        )


@torch.no_grad()
def states_and_answer(model: BlockModel, batch: Tensor, last: int) -> tuple[Tensor, Tensor, Tensor]:
    """The state and the logits after block `last`, and the whole model's logits."""
    state, states, readings = None, [], []
    for block in model.blocks:
        state, logits = block(batch, state)
        states.append(state)
        readings.append(logits)
    return states[last], readings[last], model.combined(readings, "stack")


@torch.no_grad()
def _measured(model: BlockModel, drafter: StackedBlock, corpus: Corpus, last: int) -> Distilled:
    context, seed = model.spec.model.context, model.spec.seed
    held_out = windows(corpus.valid, count=MEASURED_WINDOWS, length=context, seed=seed, block=last, shard=0, step=0)
    batch = torch.from_numpy(held_out).long()
    state, before, answer = states_and_answer(model, batch, last)
    return Distilled(agreement(before, answer), agreement(drafter(batch, state)[1], answer))


def agreement(ours: Tensor, theirs: Tensor) -> float:
    """1 - total variation of the distributions of these logits, a mean."""
    return float(1 - (ours.softmax(-1) - theirs.softmax(-1)).abs().sum(-1).mean() / 2)
