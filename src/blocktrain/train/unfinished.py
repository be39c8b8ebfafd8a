"""An unfinished run as a model: its published blocks, and the last saved progress of phases that have not
ended. Only for looking at it. Next: run.py, which trains it; io/checkpoint.py, which holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktrain.data.corpus import Corpus
from blocktrain.errors import CheckpointError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import build_block
from blocktrain.model.stack import BlockModel
from blocktrain.spec import RunSpec, Stacked
from blocktrain.train.evaluate import answer, evaluate
from blocktrain.train.run import SAVE_EVERY_S, PublishedBlocks
from blocktrain.train.samples import sample_prompts, write_samples
from blocktrain.wire.messages import Sample

LOOK_WINDOWS = 16  # of held-out text
WEIGHTS = "weights:"  # how BlockTrainer.state names the tensors of its blocks


@dataclass(frozen=True)
class SoFar:
    """The blocks that have been trained, in the shape that they are: a stack may have fewer blocks than it will have.
    `where` says how far the training is, for people."""

    spec: RunSpec
    tensors: Mapping[int, Mapping[str, Tensor]]
    where: str

    def model(self) -> BlockModel:
        return BlockModel.from_tensors(self.spec, self.tensors)


@dataclass(frozen=True)
class LookResult:
    """What people see of a run while it is trained."""

    where: str
    nats_per_byte: float  # of a few held-out windows
    samples: tuple[Sample, ...]


def look_at(run: RunDirectory, corpus: Corpus, device: torch.device) -> LookResult:
    so_far = trained_so_far(run)
    model, held_out = so_far.model().to(device), corpus.valid
    loss = answer(evaluate(model, held_out, max_windows=LOOK_WINDOWS)).nats_per_byte
    prompts = sample_prompts(held_out, model.spec.model.context)
    return LookResult(so_far.where, loss, write_samples(model, prompts, tokenizer=corpus.tokenizer))


def trained_so_far(run: RunDirectory) -> SoFar:
    """What the directory holds now. A later save changes nothing about the result."""
    published = PublishedBlocks(run)
    tensors: dict[int, Mapping[str, Tensor]] = {block: published[block] for block in published}
    steps = {phase.index: phase.steps for phase in run.spec.phases if phase.index in run.manifest().finished}
    for phase in run.spec.phases:
        progress = None if phase.index in steps else run.load_progress(phase.index)
        if progress is not None:
            state, facts = progress
            tensors |= {block: _weights(state, block) for block in phase.blocks}
            steps[phase.index] = int(facts.get("step", 0))
    if not tensors:
        raise CheckpointError(
            f"{run.path} holds no step of its training yet: progress is saved every {SAVE_EVERY_S:g} s, wait for it, "
            f"or run blocktrain train with --out {run.path}"
        )
    spec = _as_deep_as(run.spec, set(tensors))
    for block in set(range(spec.model.blocks)) - tensors.keys():  # independent blocks; an initial one has no opinion
        tensors[block] = build_block(spec, block).state_dict()
    exported = any(entry.steps for entry in run.manifest().blocks.values())
    where = _where(run.spec, steps, spec, exported)
    return SoFar(spec, {block: tensors[block] for block in range(spec.model.blocks)}, where)


def _weights(state: Mapping[str, Tensor], block: int) -> dict[str, Tensor]:
    prefix = f"{WEIGHTS}{block}."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _as_deep_as(spec: RunSpec, trained: set[int]) -> RunSpec:
    """A stack ends with its last trained block: the blocks above it do not exist yet."""
    blocks = next(block for block in range(spec.model.blocks + 1) if block not in trained)
    if not isinstance(spec.objective, Stacked) or blocks in (0, spec.model.blocks):
        return spec
    model = spec.model
    shape: dict[str, object] = {"model.blocks": blocks, "model.layers": [model.layers_of(k) for k in range(blocks)]}
    if model.physical_layers is not None:
        shape["model.physical_layers"] = [model.physical_layers_of(k) for k in range(blocks)]
    return spec.with_(**shape, **{"train.steps": 1})


def _where(spec: RunSpec, steps: Mapping[int, int], now: RunSpec, exported: bool) -> str:
    """`exported` blocks were trained elsewhere, by a swarm; those of the model that a run starts from have no steps."""
    if not steps and not exported:
        return "no step is saved yet; the model that it starts from answers"
    depth = f"blocks 0 to {now.model.blocks - 1} of {spec.model.blocks}" if now.model.blocks > 1 else "block 0 alone"
    answers = "" if now.model.blocks == spec.model.blocks else f"; {depth} answer"
    if not steps:
        return f"exported before its first phase ended{answers}"
    newest = max(steps)
    return f"phase {newest + 1} of {len(spec.phases)}, step {steps[newest]} of {spec.phases[newest].steps}{answers}"
