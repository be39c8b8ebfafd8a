"""What `blocktrain simulate` shows of a plan: one summary, the goodput at several failure rates, and what each setting
of deadlines does. Computes and formats; prints nothing.
Next: plan.py, the plan itself; ../cli/commands/swarm/simulate.py, which prints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from blocktrain.figures import Line, Section, line_figure
from blocktrain.model.block import block_shapes
from blocktrain.sim.plan import HOUR_S, Conditions, PlanResult, Sizes, plan
from blocktrain.spec import RunSpec
from blocktrain.wire.codecs.table import make_codec, update_codec

SWEEP_WORKERS, SWEEP_ROUNDS = 300, 10  # of the tables: each row is a plan of its own
CHURN_FACTORS = (0.0, 0.5, 1.0, 2.0, 4.0)
DEFAULT_CHURN = 0.2  # of the table, if none is given
GB = 1e9


@dataclass(frozen=True)
class Prices:
    """In any currency."""

    node_hour: float = 0.0
    gigabyte: float = 0.0


@dataclass(frozen=True)
class PlanReport:
    main: PlanResult
    by_churn: list[tuple[str, PlanResult]]
    by_setting: list[tuple[str, PlanResult]]
    prices: Prices

    def summary(self) -> list[tuple[str, str]]:
        r, is_ = self.main, self.main.conditions
        round_s = sorted(r.round_s)
        rows = [
            ("workers", f"{is_.workers:,}, {is_.churn:.3g} of them leave per hour, {is_.liars:.3g} lie"),
            ("rounds per hour", f"{r.rounds_per_hour:.1f} of all phases together"),
            ("time of a round", f"{round_s[len(round_s) // 2]:.0f} s in the middle, {round_s[-1]:.0f} s at most"),
            ("goodput", f"{r.goodput:.1%} of the steps of honest workers were merged"),
            ("busy", f"{r.busy:.1%} of honest workers' time was spent on steps"),
            ("updates", f"{r.merged_updates:,} merged, {r.late_updates:,} of them late"),
            ("each node receives", f"{r.per_node_hour(r.down_bytes) / 1e6:.3g} MB per hour"),
            ("each node sends", f"{r.per_node_hour(r.up_bytes) / 1e6:.3g} MB per hour"),
            ("the coordinator sends", f"{8 * r.down_bytes / r.virtual_s / 1e6:.3g} Mbit/s on average"),
        ]
        if self.prices != Prices():
            rows.append(("each node costs", f"{self.cost_per_node_hour():.4g} per hour"))
            rows.append(("all nodes cost", f"{self.cost_per_node_hour() * is_.workers:.4g} per hour"))
        return rows

    def cost_per_node_hour(self) -> float:
        r = self.main
        return self.prices.node_hour + self.prices.gigabyte * r.per_node_hour(r.down_bytes + r.up_bytes) / GB

    def as_json(self) -> dict[str, Any]:
        return {
            "plan": _numbers(self.main),
            "cost_per_node_hour": self.cost_per_node_hour(),
            "by_churn": [{"churn": x.conditions.churn, **_numbers(x)} for _, x in self.by_churn],
            "by_setting": [{"setting": name, **_numbers(x)} for name, x in self.by_setting],
        }

    def sections(self) -> list[Section]:
        churn = [x.conditions.churn for _, x in self.by_churn]
        lines = [
            Line("goodput", churn, [x.goodput for _, x in self.by_churn]),
            Line("busy", churn, [x.busy for _, x in self.by_churn]),
        ]
        title = f"Goodput against churn, {self.by_churn[0][1].conditions.workers} workers"
        axes = {"x_title": "share of the workers that leave per hour", "y_title": "share"}
        times = self.main.round_s
        took = Line("time of a round", list(range(1, len(times) + 1)), times)
        return [
            Section("Goodput and failures", figure=line_figure(lines, title=title, **axes)),
            Section(
                "Rounds",
                figure=line_figure([took], title="Time of each round", x_title="round", y_title="seconds"),
            ),
        ]


def _numbers(r: PlanResult) -> dict[str, Any]:
    numbers = {key: value for key, value in asdict(r).items() if key != "round_s"}
    return {**numbers, "rounds_per_hour": r.rounds_per_hour, "goodput": r.goodput, "busy": r.busy}


def report_of(spec: RunSpec, conditions: Conditions, prices: Prices, tell: Callable[[str], None]) -> PlanReport:
    sizes = {phase.index: sizes_of(spec, phase.index) for phase in spec.phases}
    tell(f"planning {conditions.workers:,} workers")
    main = plan(spec, conditions, sizes.__getitem__)
    few = replace(
        conditions, workers=min(conditions.workers, SWEEP_WORKERS), rounds=min(conditions.rounds, SWEEP_ROUNDS)
    )
    churn = conditions.churn or DEFAULT_CHURN
    tell("planning other failure rates and deadlines")
    rates = [replace(few, churn=factor * churn) for factor in CHURN_FACTORS]
    by_churn = [(f"{x.churn:.3g}", plan(spec, x, sizes.__getitem__)) for x in rates]
    by_setting = [(name, plan(changed, few, sizes.__getitem__)) for name, changed in _settings(spec)]
    return PlanReport(main, by_churn, by_setting, prices)


def _settings(spec: RunSpec) -> list[tuple[str, RunSpec]]:
    """As they are, and each of them smaller and larger."""
    swarm = spec.swarm
    changes: list[tuple[str, float]] = [
        ("deadline_floor_s", swarm.deadline_floor_s / 4),
        ("deadline_floor_s", min(4 * swarm.deadline_floor_s, swarm.deadline_ceiling_s)),
        ("deadline_ceiling_s", max(swarm.deadline_ceiling_s / 4, swarm.deadline_floor_s)),
        ("deadline_ceiling_s", 4 * swarm.deadline_ceiling_s),
        ("deadline_spreads", swarm.deadline_spreads / 2),
        ("deadline_spreads", 2 * swarm.deadline_spreads),
        ("round_steps", max(1, swarm.round_steps // 2)),
        ("round_steps", 2 * swarm.round_steps),
    ]
    rows = [(f"{name} = {value:g}", spec.with_(**{f"swarm.{name}": value})) for name, value in changes]
    return [("as it is", spec), *rows]


def sizes_of(spec: RunSpec, phase: int) -> Sizes:
    of_phase = spec.phases[phase]

    def values(blocks: tuple[int, ...]) -> int:
        return sum(math.prod(shape) for block in blocks for shape in block_shapes(spec, block).values())

    trained = values(of_phase.blocks)
    codec = update_codec(spec.swarm, of_phase.steps, spec.swarm.round_steps)
    return Sizes(
        update=codec.num_bytes(trained),
        difference=make_codec(spec.swarm.download).num_bytes(trained),
        trained=4 * trained,
        around=4 * values((*of_phase.below, *of_phase.ahead)),
    )


def rows_of(plans: list[tuple[str, PlanResult]]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            f"{x.rounds_per_hour:.1f}",
            f"{x.goodput:.1%}",
            f"{x.busy:.1%}",
            f"{HOUR_S * x.merged_steps / x.virtual_s:,.0f}",
        )
        for name, x in plans
    ]
