"""The end-to-end reference: the same blocks, the same bytes, one backward pass through all of them.
All else is shared with block training, so a difference in quality is a difference in training. Next: evaluate.py."""

from __future__ import annotations

from blocktrain.spec import EndToEnd, RunSpec
from blocktrain.train.flops import phase_flops, run_flops


def reference_of(spec: RunSpec, *, steps: int | None = None) -> RunSpec:
    """The end-to-end twin of a run: same shape, data order, batch and optimiser; as many steps as the longest phase."""
    longest = max(phase.steps for phase in spec.phases)
    changes = {
        "objective": EndToEnd(),
        "train.steps": longest if steps is None else steps,
        "name": f"{spec.name}-reference",
    }
    return spec.with_(**changes)


def equal_work_steps(spec: RunSpec) -> int:
    """How many end-to-end steps take as much work as the whole run."""
    twin = reference_of(spec, steps=1)
    return max(1, round(run_flops(spec) / phase_flops(twin, twin.phases[0])))


def of_equal_work(spec: RunSpec, reference_steps: int) -> RunSpec:
    """The run with its steps scaled so that all phases together do the work of so many end-to-end steps."""
    many = spec.with_(**{"train.steps": 100_000})  # large, so that rounding does not matter
    per_step = run_flops(many) / 100_000
    work = run_flops(reference_of(spec, steps=reference_steps))
    return spec.with_(**{"train.steps": max(1, round(work / per_step))})


def single_block_of(spec: RunSpec, *, num_layers: int, steps: int) -> RunSpec:
    """The end-to-end model a small machine would train instead: `num_layers` real ones in one block, all else equal."""
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
