"""Schedules: what a seed stands for. The machines, the volunteers, and the faults that happen to them, each with its
moment. Pure: a seed always gives the same schedule, and a fault can be left out without changing the others.
Next: world.py, which makes the faults happen; seeds.py, which looks for the shortest schedule that fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blocktrain.spec import Denoise, RunSpec, Stacked, preset

CHAOS_S = 20.0  # in which faults begin; then everything is repaired and the run must finish
MOST_FAULTS = 10
LIES = ("silent", "huge", "garbage", "greedy")
COURSE_LIES = ("silent", "garbage", "greedy")  # a huge first update makes all later ones huge where codecs follow it

_SMALL = {
    "model.width": 8,
    "model.heads": 1,
    "model.context": 8,
    "train.windows": 2,
    "train.steps": 6,
    "swarm.round_steps": 2,
    "swarm.averaging": "mean",
    "swarm.deadline_floor_s": 2.0,
    "swarm.deadline_ceiling_s": 8.0,
}
_STACKED: dict[str, Any] = {"objective": Stacked(), "model.blocks": 3, "model.layers": 3}
_DENOISE: dict[str, Any] = {"objective": Denoise(), "model.blocks": 2, "model.layers": 2}
VARIANTS: tuple[dict[str, Any], ...] = (
    {**_STACKED, "swarm.update": "fp32", "swarm.download": "int6", "swarm.max_lag": 1, "swarm.keep_versions": 3},
    {**_DENOISE, "swarm.update": "int8", "swarm.download": "int8", "swarm.max_lag": 2, "swarm.keep_versions": 4},
    {**_STACKED, "swarm.update": "int8", "swarm.download": "fp32", "swarm.outer": "nesterov", "swarm.max_lag": 4},
    {**_DENOISE, "swarm.update": "vector", "swarm.update_ratio": 20.0, "swarm.max_lag": 1, "swarm.min_updates": 2},
    {**_DENOISE, "swarm.update": "int8", "swarm.download": "int6", "swarm.vetting": True, "swarm.min_updates": 3},
)
COMMON = (0, 0, 0, 1, 1, 1, 2, 2, 3)  # how often each variant is drawn: the last one's codec takes long
VETTED_VARIANT, VETTED_SHARE = 4, 0.15  # drawn apart: older seeds keep their schedules


def spec_of_variant(variant: int) -> RunSpec:
    changes = {**_SMALL, **VARIANTS[variant]}
    objective = changes.pop("objective")
    return preset("tiny").with_(objective=objective, **changes)


@dataclass(frozen=True)
class Volunteering:
    """A volunteer that is there from the beginning. `lie` is empty for honest ones."""

    name: str
    steps_per_s: float
    lie: str = ""


@dataclass(frozen=True)
class SimFault:
    at_s: float
    kind: str
    who: str = ""  # a volunteer or a machine
    for_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        more = [self.who, f"for {self.for_s:.1f} s" if self.for_s else "", f"{self.amount:.3g}" if self.amount else ""]
        return f"at {self.at_s:6.2f} s  {self.kind}  {' '.join(filter(None, more))}".rstrip()


@dataclass(frozen=True)
class Schedule:
    seed: int
    variant: int
    machines: tuple[str, ...]
    volunteers: tuple[Volunteering, ...]
    faults: tuple[SimFault, ...]
    gaps: float  # share of the moments between two transactions in which others may run

    def only(self, numbers: Sequence[int]) -> Schedule:
        """The same with these faults alone."""
        return replace(self, faults=tuple(self.faults[number] for number in numbers))


def schedule_of(seed: int) -> Schedule:
    draw = random.Random(f"schedule {seed}")
    machines = ("coordinator-1", "coordinator-2")[: draw.choice([1, 1, 2])]
    honest = [Volunteering(f"worker-{n}", draw.uniform(1.0, 4.0)) for n in range(draw.choice([2, 2, 3, 3, 4]))]
    if draw.random() < 0.3:
        honest.append(Volunteering("worker-slow", draw.uniform(0.2, 0.5)))
    variant = draw.choice(COMMON)
    if random.Random(f"vetted {seed}").random() < VETTED_SHARE:
        variant = VETTED_VARIANT
    lies = COURSE_LIES if VARIANTS[variant]["swarm.update"] == "vector" else LIES
    liars = [Volunteering(f"liar-{n}", 4.0, draw.choice(lies)) for n in range(draw.choice([0, 0, 0, 1, 1, 2]))]
    names = [each.name for each in honest]
    faults = [_fault(draw, machines, names, lies) for _ in range(draw.randint(0, MOST_FAULTS))]
    return Schedule(
        seed=seed,
        variant=variant,
        machines=machines,
        volunteers=(*honest, *liars),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        gaps=draw.choice([0.0, 0.3, 1.0]),
    )


def _fault(draw: random.Random, machines: Sequence[str], names: Sequence[str], lies: Sequence[str]) -> SimFault:
    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "worker killed": lambda: {"who": draw.choice(names), "for_s": draw.uniform(0.1, 15)},
        "worker sleeps": lambda: {"who": draw.choice(names), "for_s": draw.uniform(1, 15)},
        "worker leaves for good": lambda: {"who": draw.choice(names)},
        "worker joins": lambda: {"who": draw.choice(["", "", *lies]), "amount": draw.uniform(1, 6)},
        "worker's cache damaged": lambda: {"who": draw.choice(names)},
        "worker's clock set": lambda: {"who": draw.choice(names), "amount": draw.choice([-1, 1]) * 7200.0},
        "partition": lambda: {"who": draw.choice(names), "for_s": draw.uniform(1, 20)},
        "coordinator killed": lambda: {"who": draw.choice(machines), "for_s": draw.uniform(0.1, 8)},
        "coordinator's clock set": lambda: {
            "who": draw.choice(machines),
            "amount": draw.choice([-1, 1]) * draw.choice([30.0, 1200.0]),  # files are kept for an hour,
        },
        "power cut": lambda: {"for_s": draw.uniform(0.5, 6)},
        "fsync lies until power cut": lambda: {"for_s": draw.uniform(0.5, 8)},
        "disk full": lambda: {"for_s": draw.uniform(1, 10)},
        "ledger's disk full": lambda: {"for_s": draw.uniform(0.5, 5)},
        "misdirected write": lambda: {"amount": draw.random()},
        "messages lost": lambda: {"for_s": draw.uniform(2, 20), "amount": draw.uniform(0.05, 0.5)},
        "messages twice": lambda: {"for_s": draw.uniform(2, 15), "amount": draw.uniform(0.1, 0.9)},
        "messages overtake": lambda: {"for_s": draw.uniform(2, 30), "amount": draw.uniform(0.2, 3)},
        "connections break": lambda: {"for_s": draw.uniform(2, 20), "amount": draw.uniform(0.1, 0.5)},
        "run paused": lambda: {"for_s": draw.uniform(0.5, 5)},
    }
    kind = draw.choice(list(kinds))
    return SimFault(at_s=draw.uniform(0.0, CHAOS_S) * draw.random(), kind=kind, **kinds[kind]())
