"""The rows of depth.py: every way of training a model whose training fits no worker, and the models that do fit one,
each with the work of some end-to-end steps. Next: rows.py, which trains and scores a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from blocktrain.spec import Denoise, RunSpec, Stacked
from blocktrain.train.flops import run_flops
from blocktrain.train.reference import of_equal_work, reference_of, single_block_of
from blocktrain.train.streamed import streamed_run_flops
from training.rows import Row

LAYERS = 8
SWARMS = (4, 16)  # workers that average their models
SWARM_KINDS = ("whole-bare", "one-block", "two-blocks")
CUTS = (2, 4, 8, 16)  # numbers of blocks
CUT_KINDS = ("end-to-end", "whole-bare", "one-block")
CUT_SHAPE = {"model.layers": 16, "model.width": 32}  # narrow: twelve trainings, and as deep as the finest cut needs
Maker = Callable[[RunSpec, int], RunSpec]


def _end_to_end(base: RunSpec, steps: int) -> RunSpec:
    return reference_of(base, steps=steps)


def _blocks(objective: Stacked | Denoise) -> Maker:
    return lambda base, steps: of_equal_work(base.with_(objective=objective), steps)


def _whole(own_weight: float) -> Maker:
    """All blocks through one loss, with the work of a worker that has one block in memory."""

    def make(base: RunSpec, steps: int) -> RunSpec:
        whole = base.with_(objective=Stacked(schedule="whole", own_weight=own_weight))
        one_step = streamed_run_flops(whole.with_(**{"train.steps": 1}))
        return whole.with_(**{"train.steps": max(1, round(run_flops(reference_of(base, steps=steps)) / one_step))})

    return make


def _fits(blocks: int) -> Maker:
    """The layers of some blocks, end to end, with all of the work."""

    def make(base: RunSpec, steps: int) -> RunSpec:
        layers = blocks * base.model.layers_of(0)
        one_step = run_flops(single_block_of(base, num_layers=layers, steps=1))
        work = run_flops(reference_of(base, steps=steps))
        return single_block_of(base, num_layers=layers, steps=max(1, round(work / one_step)))

    return make


KINDS: dict[str, tuple[str, Maker]] = {
    "end-to-end": ("end to end, 8 layers", _end_to_end),
    "whole-bare": ("whole model, one block in memory", _whole(0.0)),
    "whole": ("the same, with read-outs of every block", _whole(0.1)),
    "default": ("stacked, progressive, scaffold", _blocks(Stacked())),
    "one-block": ("end to end, one block's layers", _fits(1)),
    "two-blocks": ("end to end, two blocks' layers", _fits(2)),
    "at-once": ("stacked, all blocks at once", _blocks(Stacked(schedule="simultaneous", scaffold=0))),
    "denoise": ("denoise (the paper)", _blocks(Denoise())),
}


def _cut(make: Maker, blocks: int) -> Maker:
    """The same for a deeper and narrower model in so many blocks."""
    return lambda base, steps: make(base.with_(**CUT_SHAPE, **{"model.blocks": blocks}), steps)


def rows_of(budget: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Row]:
    """NAME-xN is N workers that average their models; NAME-inN is the deeper model in N blocks."""
    rows = []
    for kind in kinds:
        name, _, workers = kind.partition("-x")
        name, _, blocks = name.partition("-in")
        label, make = KINDS[name]
        comparison = "equal wall-clock" if workers else "equal work"
        reference = f"end-to-end-in{blocks}-{budget}" if blocks else f"end-to-end-{budget}"
        maker = _cut(make, int(blocks)) if blocks else make
        rows.append(Row(f"{kind}-{budget}", label, comparison, maker, int(workers or 1), reference=reference))
    return rows


def swarm_kinds(workers: int) -> list[str]:
    return [f"{kind}-x{workers}" for kind in SWARM_KINDS]


def cut_kinds(blocks: int) -> list[str]:
    return [f"{kind}-in{blocks}" for kind in CUT_KINDS]


ALL_KINDS = [
    *KINDS,
    *(kind for workers in SWARMS for kind in swarm_kinds(workers)),
    *(kind for blocks in CUTS for kind in cut_kinds(blocks)),
]
