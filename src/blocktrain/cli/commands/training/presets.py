"""blocktrain presets: the named settings, and what each takes. All of it is computed from the shapes; nothing is run.
Next: presets.py, the settings; train/flops.py and train/memory_estimate.py, which count."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.console import quantity, say, show_table
from blocktrain.cli.options import before_its_text
from blocktrain.presets import PRESETS

if TYPE_CHECKING:
    from blocktrain.spec import RunSpec

# Sustained floating-point operations per second that the hours are computed with. They are assumed, not measured:
# small models reach less on a GPU.
RATES = {"2 cores": 4e10, "laptop": 5e12, "gaming": 4e13}
COLUMNS = ["preset", "parameters", "text", "memory", "least", "up", "down", *RATES]


@dataclass(frozen=True)
class Cost:
    """What a preset takes. Memory is that of the largest phase, bytes are upper limits of one worker's round."""

    name: str
    parameters: int
    text_bytes: int
    memory_bytes: int  # without any saving
    least_memory_bytes: int  # with fewer windows at once and layers computed twice, which costs time
    up_bytes_a_round: int
    down_bytes_a_round: int
    flops: int
    hours: dict[str, float]  # by the names of RATES


def presets(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead of a table.")] = False,
) -> None:
    """List the named settings and what each takes.

    All figures are computed from the shapes, not measured."""
    costs = [cost_of(name, spec) for name, spec in PRESETS.items()]
    if as_json:
        print(json.dumps([asdict(cost) for cost in costs], indent=2))
        return
    show_table(COLUMNS, [cells(cost) for cost in costs])
    say(*notes())


def cost_of(name: str, spec: RunSpec) -> Cost:
    from blocktrain.model.block import physical_parameters
    from blocktrain.swarm.worker.capacity import round_bytes
    from blocktrain.train.flops import run_flops
    from blocktrain.train.memory_estimate import least_memory_bytes, training_memory_bytes

    spec = before_its_text(spec)
    rounds = [round_bytes(spec, phase) for phase in spec.phases]
    flops = run_flops(spec)
    return Cost(
        name=name,
        parameters=physical_parameters(spec),
        text_bytes=sum(phase.steps for phase in spec.phases) * spec.step_tokens,
        memory_bytes=max(training_memory_bytes(spec, phase) for phase in spec.phases),
        least_memory_bytes=max(least_memory_bytes(spec, phase) for phase in spec.phases),
        up_bytes_a_round=max(up for _, up in rounds),
        down_bytes_a_round=max(down for down, _ in rounds),
        flops=flops,
        hours={machine: flops / rate / 3600 for machine, rate in RATES.items()},
    )


def cells(cost: Cost) -> list[str]:
    sizes = (
        cost.text_bytes,
        cost.memory_bytes,
        cost.least_memory_bytes,
        cost.up_bytes_a_round,
        cost.down_bytes_a_round,
    )
    times = (_time(hours) for hours in cost.hours.values())
    return [cost.name, _short(cost.parameters, 3), *map(_short, sizes), *times]


def notes() -> list[str]:
    cores, laptop, gaming = (quantity(rate, "FLOP/s") for rate in RATES.values())
    return [
        "text: what training reads, in bytes, or in tokens if there is a tokenizer; memory: of a worker, as it is, and "
        "at least; up, down: per round",
        "all figures are computed from the shapes, not measured",
        f"the times assume one machine that sustains {cores} on 2 cores, {laptop} on a laptop's GPU or {gaming} on a "
        f"gaming GPU; small models reach less on a GPU",
    ]


def _short(amount: float, digits: int = 2) -> str:
    """1234567 -> "1.2M" """
    return quantity(float(f"{amount:.{digits}g}"), "").replace(" ", "")


def _time(hours: float) -> str:
    """In the unit in which it has at most three digits: "45 min", "12 h", "40 d"."""
    if hours < 1 / 60:
        return "<1 min"
    if hours < 1:
        return f"{hours * 60:.0f} min"
    return f"{hours:.2g} h" if hours < 100 else f"{hours / 24:.0f} d"
