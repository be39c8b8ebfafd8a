"""The rows of quality.py: all objectives, schedules and read-outs beside the reference. Next: rows.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blocktrain.spec import Denoise, RunSpec, Stacked
from blocktrain.train.reference import of_equal_work, reference_of, single_block_of
from training.rows import Row

SIMULTANEOUS = Stacked(schedule="simultaneous", scaffold=0)
GREEDY = Stacked(scaffold=0, later_share=1.0)
FASTER = 4  # times the preset's rate of AdamW: does the comparison hang on it?


def _reference(base: RunSpec, steps: int) -> RunSpec:
    return reference_of(base, steps=steps)


def _scaffold(base: RunSpec, steps: int) -> RunSpec:
    return of_equal_work(base.with_(objective=Stacked()), steps)


def _faster(make: Callable[[RunSpec, int], RunSpec]) -> Callable[[RunSpec, int], RunSpec]:
    return lambda base, steps: make(base.with_(**{"optim.adam_lr": FASTER * base.optim.adam_lr}), steps)


def _plain(objective: Any, **changes: Any) -> Callable[[RunSpec, int], RunSpec]:
    return lambda base, steps: base.with_(objective=objective, **{"train.steps": steps, **changes})


def _eight(base: RunSpec, steps: int) -> RunSpec:
    return _scaffold(base.with_(**{"model.blocks": 2 * base.model.blocks}), steps)


def _one_block(blocks: int, bytes_factor: int = 1) -> Callable[[RunSpec, int], RunSpec]:
    def make(base: RunSpec, steps: int) -> RunSpec:
        layers = blocks * base.model.layers_of(0)
        return single_block_of(base, num_layers=layers, steps=steps * bytes_factor)

    return make


ROWS = (
    Row("reference", "end to end, the reference", "reference", _reference),
    Row("scaffold", "stacked, progressive, scaffold (default)", "equal work", _scaffold,
        without_hosts=True),
    Row("scaffold-tenth", "the default, later phases a tenth of the first", "equal work",
        lambda base, steps: of_equal_work(base.with_(objective=Stacked(later_share=0.1)), steps)),
    Row("scaffold-8", "the same in twice as many blocks", "equal work", _eight),
    Row("scaffold-steps", "stacked, progressive, scaffold", "equal steps", _plain(Stacked(later_share=1.0))),
    Row("scaffold-workers", "the default, four averaged workers", "equal wall-clock", _scaffold, replicas=4),
    Row("progressive", "stacked, progressive, no scaffold", "equal steps", _plain(GREEDY)),
    Row("simultaneous", "stacked, all at once", "equal steps", _plain(SIMULTANEOUS)),
    Row(
        "lookahead", "stacked, all at once, look-ahead 1", "equal steps",
        _plain(SIMULTANEOUS.model_copy(update={"lookahead": 1})),
    ),
    Row(
        "lookahead-stale", "the same, snapshots refreshed every 50 steps", "equal steps",
        _plain(SIMULTANEOUS.model_copy(update={"lookahead": 1, "refresh_steps": 50})),
    ),
    Row("dropout", "the default with state dropout 0.1", "equal work",
        lambda base, steps: _scaffold(base, steps).with_(**{"objective.state_dropout": 0.1}), without_hosts=True),
    Row("denoise", "denoise, lognormal ranges (the paper)", "equal steps", _plain(Denoise())),
    Row("one-block", "end to end, one block's layers", "equal memory", _one_block(1)),
    Row("two-blocks", "end to end, two blocks' layers", "equal memory", _one_block(2)),
    Row("one-block-swarm", "one block's layers, four averaged workers", "equal memory", _one_block(1), replicas=4),
    Row("one-block-long", "one block's layers, four times the steps", "equal memory", _one_block(1, 4)),
    Row("two-blocks-long", "two blocks' layers, twice the steps", "equal memory", _one_block(2, 2)),
    Row("reference-rate", "the reference at four times AdamW's rate", "reference", _faster(_reference),
        reference="reference-rate"),
    Row("scaffold-rate", "the default at four times AdamW's rate", "equal work", _faster(_scaffold),
        reference="reference-rate"),
)  # fmt: skip
