"""How much work a training step is: floating-point operations, counted from the shapes, to compare runs at equal work.
A multiplication counts one, an addition counts one. Norms, softmax and the optimiser are left out. Next: trainer.py."""

from __future__ import annotations

from blocktrain.spec import Denoise, Objective, Phase, RunSpec, Stacked
from blocktrain.tables import narrow_rank, reads_tokens

FORWARD, FROZEN, TRAINED = 1, 2, 3  # passes: forward; also back to the input; also back to the weights


def layers_flops(spec: RunSpec, block: int, passes: int) -> int:
    """All layers that a block runs, real or shared, for the tokens of one step. Attention is counted over the whole
    context, as it is computed. It has no weights, and its backward pass to its three inputs costs two forward passes
    whether or not the layers are trained."""
    width, context = spec.model.width, spec.model.context
    attention_passes = FORWARD if passes == FORWARD else TRAINED
    per_token = passes * 2 * 12 * width**2 + attention_passes * 2 * 2 * context * width
    return spec.step_tokens * spec.model.layers_of(block) * per_token


def embedding_flops(spec: RunSpec, passes: int) -> int:
    """The small matrix behind a narrow table. Nothing before the embedding needs a gradient."""
    rank, width = narrow_rank(spec.model) or 0, spec.model.width
    return (TRAINED if passes == TRAINED else FORWARD) * spec.step_tokens * 2 * rank * width


def readout_flops(spec: RunSpec) -> int:
    """The forward pass of one read-out for the tokens of one step."""
    model, rank = spec.model, narrow_rank(spec.model)
    if rank is None:
        return spec.step_tokens * 2 * model.vocabulary * model.width
    return spec.step_tokens * 2 * rank * (model.vocabulary + model.width)


def phase_flops(spec: RunSpec, phase: Phase) -> int:
    """One training step of a phase: all passes of its layers, and the read-outs that have a loss."""
    passes = ((phase.below, FORWARD), (phase.blocks, TRAINED), (phase.ahead, FROZEN))
    layers = sum(layers_flops(spec, block, times) for blocks, times in passes for block in blocks)
    embeddings = sum(
        embedding_flops(spec, times) for blocks, times in passes for block in blocks if reads_tokens(spec, block)
    )
    return layers - _spared_flops(spec, phase) + embeddings + _end_flops(spec, phase)


def _spared_flops(spec: RunSpec, phase: Phase) -> int:
    """A trained block that reads only the state of frozen ones needs no gradient of what enters its first layer: back
    through query, key and value."""
    return 0 if reads_tokens(spec, phase.block) else spec.step_tokens * 2 * 3 * spec.model.width**2


def _end_flops(spec: RunSpec, phase: Phase) -> int:
    """The work outside the layers: the read-outs, and for `denoise` the projections of z."""
    if isinstance(spec.objective, Denoise):
        z_meets_the_codes = spec.step_tokens * 2 * spec.model.vocabulary * spec.model.code_width
        z_enters = FROZEN * readout_flops(spec)  # forward, and back to the weights alone
        return z_meets_the_codes + z_enters + TRAINED * readout_flops(spec)
    own = isinstance(spec.objective, Stacked) and spec.objective.own_weight > 0
    chain_end = FROZEN if phase.ahead else TRAINED
    before_the_end = len(phase.blocks) - (0 if phase.ahead else 1)
    own_passes = FROZEN if own_losses_detached(spec.objective) else TRAINED
    return readout_flops(spec) * (chain_end + own_passes * before_the_end * own)


def own_losses_detached(objective: Objective) -> bool:
    """Whether the blocks' own losses train their read-outs alone: where the whole model's loss trains the blocks, a
    gradient from each read-out would only pull them away from it."""
    return isinstance(objective, Stacked) and objective.schedule == "whole"


def run_flops(spec: RunSpec) -> int:
    """The total work of all phases."""
    return sum(phase.steps * phase_flops(spec, phase) for phase in spec.phases)
