"""How much work survives when machines fail? Workers and the coordinator die at random and come back. The simulator
runs the real coordinator, ledger, merging and worker loop in virtual time (src/blocktrain/sim/world.py); steps take
time and compute nothing. Beside it, a synchronous run on the same machines with the same failures, which restarts from
its last checkpoint whenever one of them dies, with the best interval between checkpoints.

    python bench/goodput.py [--seeds 0,1,2,3] [--quick]

Goodput is given in two ways, each a mean over the seeds, which draw the failures: of the steps that were computed,
those that became part of the model; and of the steps that the machines could have computed while they were up."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from blocktrain.figures import Line, line_figure
from blocktrain.sim.schedule import Schedule, SimFault, Volunteering, spec_of_variant
from blocktrain.sim.seeds import scratch
from blocktrain.sim.world import World, found_template, world_of
from blocktrain.spec import RunSpec
from shared.experiment import (
    RESULTS,
    Document,
    Verdict,
    at_least,
    goal_lines,
    machine,
    markdown,
    write_json,
    write_pictures,
)

COORDINATOR = "coordinator-1"
AWAY_S = (5.0, 15.0)  # until a machine that died is back
STEP_S = 1.0
CHECKPOINT_S = 2.0  # two steps: the synchronous run waits while it writes one
RESTART_S = 10.0  # to start all processes of a synchronous run, load the checkpoint and reach the same point again
INTERVALS = (2, 5, 10, 20, 50, 100, 200, 400)  # steps between two checkpoints: the best one counts
LONGEST_S = 20_000.0
ENOUGH, HALF = 0.88, 0.5


@dataclass(frozen=True)
class Shape:
    workers: int
    steps: int
    round_steps: int
    mtbf_s: tuple[float, ...]  # mean time between two failures of one machine


FULL = Shape(workers=8, steps=120, round_steps=10, mtbf_s=(3000.0, 1000.0, 500.0, 300.0, 200.0, 100.0, 50.0))
QUICK = Shape(workers=3, steps=12, round_steps=4, mtbf_s=(60.0,))


def main(argv: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="three workers and one rate of failures")
    options.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2, 3])
    options.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    args = options.parse_args(argv)
    shape = QUICK if args.quick else FULL
    spec = spec_of(shape)
    points = []
    with scratch() as folder:
        for mtbf_s in shape.mtbf_s:
            seeds = [point(shape, spec, mtbf_s, seed, folder) for seed in args.seeds]
            points.append({"mtbf_s": mtbf_s, "seeds": seeds, **means(seeds)})
            print(markdown(HEAD, [_row(points[-1])]), flush=True)
    document = {
        "machine": machine(),
        "seeds": args.seeds,
        "shape": vars(shape),
        "away_s": AWAY_S,
        "checkpoint_s": CHECKPOINT_S,
        "restart_s": RESTART_S,
        "points": points,
    }
    write_json(args.out / "goodput.json", document)
    write_pictures(figures(document), args.out)


def spec_of(shape: Shape) -> RunSpec:
    """Two blocks in one phase; as many rounds as the steps need."""
    return spec_of_variant(0).with_(
        **{
            "model.blocks": 2,
            "model.layers": 2,
            "train.steps": shape.steps,
            "swarm.round_steps": shape.round_steps,
            "swarm.update": "int8",
            "swarm.averaging": "mean",
            "swarm.max_lag": 4,
            "swarm.keep_versions": 8,
            "swarm.evaluate_every": 1000,
            "swarm.deadline_ceiling_s": 10.0 * shape.round_steps,
        }
    )


def failures(name: str, mtbf_s: float, seed: int) -> Iterator[tuple[float, float]]:
    """(when the machine dies, how long it is away), without end. The same for whoever is compared."""
    draw, now_s = random.Random(f"{seed} {name} {mtbf_s}"), 0.0
    while now_s < LONGEST_S:
        now_s += draw.expovariate(1 / mtbf_s)
        away_s = draw.uniform(*AWAY_S)
        yield now_s, away_s
        now_s += away_s


def point(shape: Shape, spec: RunSpec, mtbf_s: float, seed: int, scratch: Path) -> dict[str, Any]:
    names = [f"worker-{number}" for number in range(shape.workers)]
    plan = {name: list(failures(name, mtbf_s, seed)) for name in (*names, COORDINATOR)}
    faults = [
        SimFault(at_s, "coordinator killed" if name == COORDINATOR else "worker killed", name, for_s)
        for name, times in plan.items()
        for at_s, for_s in times
    ]
    schedule = Schedule(
        seed=seed,
        variant=0,
        machines=(COORDINATOR,),
        volunteers=tuple(Volunteering(name, 1 / STEP_S) for name in names),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        gaps=0.0,
    )
    with world_of(schedule, scratch, found_template(spec, scratch / f"template-{mtbf_s:g}-{seed}")) as world:
        ours = _swarm(world, plan)
    restarted = max((synchronous(plan, shape.steps, interval) for interval in INTERVALS), key=lambda x: x["of_time"])
    return {"seed": seed, "swarm": ours, "restarted": restarted}


def means(seeds: Sequence[Document]) -> Document:
    """Of both shares, the rest added up; `least` is the share of the computed steps in the worst seed."""
    found: dict[str, Any] = {}
    for side in ("swarm", "restarted"):
        runs = [each[side] for each in seeds]
        shares = {key: statistics.mean(run[key] for run in runs) for key in ("of_steps", "of_time")}
        found[side] = shares | {"least": min(run["of_steps"] for run in runs)}
    for key in ("worker_failures", "coordinator_failures"):
        found["swarm"][key] = sum(each["swarm"][key] for each in seeds)
    restarted = [each["restarted"] for each in seeds]
    found["restarted"]["restarts"] = sum(run["restarts"] for run in restarted)
    found["restarted"]["intervals"] = sorted({run["interval"] for run in restarted})
    found["restarted"]["finished"] = all(run["finished"] for run in restarted)
    return found


def _swarm(world: World, plan: dict[str, list[tuple[float, float]]]) -> dict[str, Any]:
    world.begin()
    while not world.checker.is_finished and world.scheduler.now_s < LONGEST_S:
        assert world.scheduler.step(), "nothing is left to happen"
        world.checker.look(False, False, world.machines.values())
    took_s = world.scheduler.now_s
    ledger = next(machine.ledger for machine in world.machines.values() if machine.ledger)
    updates = [x.update for x in ledger.contributions() if x.update.refused is None]
    while page := ledger.contributions(updates[-1].number):
        updates += [x.update for x in page if x.update.refused is None]
    merged = [x for x in updates if x.merged_round is not None]
    a = world.spec.swarm.staleness_exponent
    kept = sum(x.steps * (1 + x.lag) ** -a for x in merged)
    return {
        "of_steps": kept / world.steps_taken,
        "of_time": kept * STEP_S / up_s(plan, took_s),
        "took_s": took_s,
        "updates": len(merged),
        "late": sum(x.lag > 0 for x in merged),
        "computed_steps": world.steps_taken,
        "worker_failures": sum(at_s < took_s for name, x in plan.items() if name != COORDINATOR for at_s, _ in x),
        "coordinator_failures": sum(at_s < took_s for at_s, _ in plan[COORDINATOR]),
    }


def up_s(plan: dict[str, list[tuple[float, float]]], until_s: float) -> float:
    """The time that all workers together were up."""
    workers = [times for name, times in plan.items() if name != COORDINATOR]
    away_s = sum(min(for_s, until_s - at_s) for times in workers for at_s, for_s in times if at_s < until_s)
    return len(workers) * until_s - away_s


def synchronous(plan: dict[str, list[tuple[float, float]]], steps: int, interval: int) -> dict[str, Any]:
    """All workers compute each step together. When one dies, or the machine that leads them, all go back to the last
    checkpoint, as soon as everybody is up and the processes have been started again."""
    down = sorted((at_s, at_s + for_s) for times in plan.values() for at_s, for_s in times)
    now_s, done, saved, computed, num = 0.0, 0, 0, 0, 0

    def next_failure(at_s: float) -> float:
        return next((begin for begin, _ in down if begin >= at_s), float("inf"))

    while done < steps and now_s < LONGEST_S:
        fails_s = next_failure(now_s)
        writes = (done + 1) % interval == 0
        if now_s + STEP_S + CHECKPOINT_S * writes <= fails_s:
            now_s += STEP_S + CHECKPOINT_S * writes
            done, computed = done + 1, computed + 1
            saved = done if writes else saved
            continue
        computed += int((fails_s - now_s) / STEP_S >= 1)
        now_s, done, num = fails_s, saved, num + 1
        while True:  # until all have been up for as long as a restart takes
            now_s = max([now_s, *(end for begin, end in down if begin <= now_s < end)])
            if next_failure(now_s) >= now_s + RESTART_S:
                now_s += RESTART_S
                break
            now_s = next_failure(now_s) + 1e-9
            if now_s > LONGEST_S:
                break
    return {
        "of_steps": done / computed if computed else 0.0,
        "of_time": done * STEP_S * (len(plan) - 1) / up_s(plan, now_s),
        "took_s": now_s,
        "restarts": num,
        "interval": interval,
        "finished": done >= steps,
    }


HEAD = [
    "one machine fails every",
    "failures of workers / coordinator",
    "swarm: of computed steps (worst seed)",
    "of the time",
    "restarting: of computed steps",
    "of the time",
    "restarts, steps between checkpoints",
]


def _row(x: dict[str, Any]) -> list[str]:
    ours, theirs = x["swarm"], x["restarted"]
    return [
        f"{x['mtbf_s']:g} s",
        f"{ours['worker_failures']} / {ours['coordinator_failures']}",
        f"{100 * ours['of_steps']:.1f} % ({100 * ours['least']:.1f} %)",
        f"{100 * ours['of_time']:.1f} %",
        f"{100 * theirs['of_steps']:.1f} %",
        f"{100 * theirs['of_time']:.1f} %" + ("" if theirs["finished"] else ", did not finish"),
        f"{theirs['restarts']}, {' or '.join(map(str, theirs['intervals']))}",
    ]


def section(document: Document) -> str:
    intro = "## Goodput\n\n"
    if document.get("points"):
        shape = document["shape"]
        intro += (
            f"{shape['workers']} workers and one coordinator in virtual time, with the real coordinator, ledger, "
            f"merging and worker loop; {shape['steps']} steps in rounds of {shape['round_steps']}, one per second; "
            f"means and sums over the seeds {', '.join(map(str, document['seeds']))}. Each machine dies at random and "
            f"is back after {document['away_s'][0]:g} to "
            f"{document['away_s'][1]:g} s. Of the computed steps: those that became part of the model, late ones by "
            f"their weight. Of the time: of the steps that workers could have computed while they were up. The "
            f"synchronous run meets the same failures; it writes a checkpoint in {document['checkpoint_s']:g} s, with "
            f"the interval that is best for it, and needs {document['restart_s']:g} s to start again after a failure "
            f"of any machine. Simulated: no weights are trained here.\n\n"
        )
    rows = [_row(x) for x in document.get("points", ())]
    return f"{intro}{markdown(HEAD, rows)}\n{goal_lines(verdicts(document))}"


def verdicts(document: Document) -> list[Verdict]:
    worse = [x for x in document.get("points", ()) if x["restarted"]["of_time"] < HALF]
    if not worse:
        return []
    about = f" (where restarting uses {100 * max(x['restarted']['of_time'] for x in worse):.0f} % of the time or less)"
    least = min(x["swarm"]["of_steps"] for x in worse)
    first = max(worse, key=lambda x: x["mtbf_s"])
    return [
        at_least("useful share of the computed steps, where restarting uses less than half of the time", least, ENOUGH),
        at_least(
            "useful share of the time, where restarting first falls below half",
            first["swarm"]["of_time"],
            ENOUGH,
            about=about,
        ),
    ]


def figures(document: Document) -> dict[str, go.Figure]:
    points = document.get("points", ())
    mtbf_s = [x["mtbf_s"] for x in points]
    lines = [
        Line("swarm: of the computed steps", mtbf_s, [x["swarm"]["of_steps"] for x in points]),
        Line("swarm: of the time", mtbf_s, [x["swarm"]["of_time"] for x in points]),
        Line("restarting: of the computed steps", mtbf_s, [x["restarted"]["of_steps"] for x in points]),
        Line("restarting: of the time", mtbf_s, [x["restarted"]["of_time"] for x in points]),
    ]
    figure = line_figure(
        lines,
        title="Useful work when machines fail",
        x_title="mean time between two failures of one machine, seconds",
        y_title="useful share",
    )
    figure.update_xaxes(type="log")
    return {"goodput": figure}


if __name__ == "__main__":
    main()
