"""The end-to-end reference: the same blocks and the same bytes, trained with one backward pass through all of them.
Everything else is the same as in block training, so a difference in quality comes from the training. Next: evaluate.py.
"""

from __future__ import annotations

from blocktrain.spec import EndToEnd, RunSpec
from blocktrain.train.flops import phase_flops, run_flops


def reference_of(spec: RunSpec, *, steps: int | None = None) -> RunSpec:
    """The end-to-end run with the same shape, data order, batch and optimiser, and the steps of the longest phase."""
    longest = max(phase.steps for phase in spec.phases)
    changes = {
        "objective": EndToEnd(),
        "train.steps": longest if steps is None else steps,
        "name": f"{spec.name}-reference",
    }
    return spec.with_(**changes)


def equal_work_steps(spec: RunSpec) -> int:
    """The number of end-to-end steps that take as much work as the whole run."""
    twin = reference_of(spec, steps=1)
    return max(1, round(run_flops(spec) / phase_flops(twin, twin.phases[0])))


def of_equal_work(spec: RunSpec, reference_steps: int) -> RunSpec:
    """The run with its steps scaled: all phases together do as much work as `reference_steps` end-to-end steps."""
    many = spec.with_(**{"train.steps": 100_000})  # large, so that rounding does not matter
    per_step = run_flops(many) / 100_000
    work = run_flops(reference_of(spec, steps=reference_steps))
    return spec.with_(**{"train.steps": max(1, round(work / per_step))})


def single_block_of(spec: RunSpec, *, num_layers: int, steps: int) -> RunSpec:
    """The end-to-end model that a small machine could train instead: one block of `num_layers` real layers."""
    return spec.with_(
        **{
            "objective": EndToEnd(),
            "model.blocks": 1,
            "model.layers": num_layers,
            "model.physical_layers": None,
            "train.steps": steps,
            "name": f"{spec.name}-{num_layers}-layers",
        }
    )
