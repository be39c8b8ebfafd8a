"""What do late and lost updates cost? 0, 10, 25 and 50 % of all updates, by a seeded plan, come late or never; the
held-out cross entropy of three manners of merging, at equal rounds and at equal time:

    waiting   a round waits for everybody: nothing is left out, and time grows
    dropping  a round closes at its learned deadline, and what comes later is thrown away
    ours      the same deadlines; what comes later is merged, and weighs less the staler it is

Virtual time, the coordinator's and the workers' own code (swarms/virtual.py).

    python bench/late.py --corpus PATH [--rows stacked] [--seeds 0]

Each row is written to the result file when it is done and is not run again: stop it at any time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import plotly.graph_objects as go
import torch

from blocktrain.data.corpus import Corpus
from blocktrain.figures import Line, line_figure
from blocktrain.model.stack import BlockModel
from blocktrain.spec import Denoise, RunSpec
from blocktrain.train.evaluate import answer, evaluate, fit_combination
from shared.experiment import Document, Verdict, goal_lines, markdown, portable
from shared.rows import Record, Row, Table, base_of, chosen, mean_of, parser, records_of, run_rows, seeds_of, show
from swarms.run import ONLY_THE_LAST, scores_of
from swarms.virtual import STEP_S, Faults, Published, train_virtually

SHARES = (0.0, 0.1, 0.25, 0.5)
FOR_EVER_S = 1e7
ROUND_STEPS = 4
DEADLINES = {"swarm.deadline_floor_s": 1.0, "swarm.deadline_ceiling_s": 5 * ROUND_STEPS * STEP_S}
MANNERS: dict[str, dict[str, Any]] = {
    "ours": DEADLINES,
    "dropping": {**DEADLINES, "swarm.max_lag": 0},
    "waiting": {"swarm.deadline_floor_s": FOR_EVER_S, "swarm.deadline_ceiling_s": FOR_EVER_S},
}
OBJECTIVES: dict[str, tuple[dict[str, Any], int]] = {  # with the number of workers
    "stacked": ({"train.steps": 64}, 4),
    "denoise": ({"objective": Denoise(), "train.steps": 48}, 8),
}
BUDGET = {"train.windows": 4, "swarm.round_steps": ROUND_STEPS, "swarm.evaluate_every": ONLY_THE_LAST}
DELAY_ROUNDS = (1.5, 4.0)
CURVE_WINDOWS = 64
NOWHERE = float("nan")


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(argv)
    base, corpus = base_of(options, BUDGET)
    rows = [row for seed in options.seeds for row in _rows(base.with_(seed=seed), corpus, options.quick)]
    document = run_rows(options.out / "late.json", chosen(rows, options.rows))
    show(_table(document), figures(document), options.out)


def _rows(base: RunSpec, corpus: Corpus, quick: bool) -> list[Row]:
    """Without a fault all manners are one: that row is ours."""
    plan = [
        (objective, manner, share)
        for objective in OBJECTIVES
        for share in SHARES
        for manner in MANNERS
        if share or manner == "ours"
    ]
    if quick:
        plan = [("stacked", manner, 0.5) for manner in ("ours", "waiting")]
    return [_row(base, corpus, *each, quick) for each in plan]


def _row(base: RunSpec, corpus: Corpus, objective: str, manner: str, share: float, quick: bool) -> Row:
    changes, workers = OBJECTIVES[objective]
    spec = base.with_(**changes, **MANNERS[manner])
    if quick:
        spec, workers = spec.with_(**{"train.steps": 16, "train.windows": 2}), 2
    faults = Faults(share, spec.seed, _delays_s())
    settings = {"spec": portable(spec), "workers": workers, "faults": {**vars(faults), "delay_s": list(_delays_s())}}
    return Row(_name(objective, manner, share), spec.seed, settings, lambda: run(spec, corpus, workers, faults, quick))


def _name(objective: str, manner: str, share: float) -> str:
    return f"{objective}, {manner if share else 'ours'}, {100 * share:.0f} %"


def _delays_s() -> tuple[float, float]:
    shortest, longest = DELAY_ROUNDS
    return shortest * ROUND_STEPS * STEP_S, longest * ROUND_STEPS * STEP_S


def run(spec: RunSpec, corpus: Corpus, workers: int, faults: Faults, quick: bool) -> dict[str, Any]:
    started_s = time.monotonic()
    with TemporaryDirectory() as folder:
        published, account = train_virtually(spec, corpus, workers, faults, Path(folder))
    model = BlockModel.from_tensors(spec, published[-1].blocks)
    model.combine = dict(fit_combination(model, corpus.valid))
    return {
        **scores_of(model, corpus, 20 if quick else 400),
        **account,
        "virtual_s": published[-1].at_s,
        "curve": [[each.at_s, _loss(spec, corpus, each, 4 if quick else CURVE_WINDOWS)] for each in published],
        "seconds": time.monotonic() - started_s,
    }


def _loss(spec: RunSpec, corpus: Corpus, published: Published, max_windows: int) -> float:
    """Of the model as it was then. Blocks without a version are left out."""
    missing = set(range(spec.model.blocks)) - published.blocks.keys()
    model = BlockModel.from_tensors(spec, published.blocks)
    return answer(evaluate(model, corpus.valid, max_windows=max_windows, missing=missing)).nats_per_byte


def at_time(record: Record, seconds: float) -> float:
    """Nats a byte of the newest model that there was at that time, on the curve's windows."""
    return next((loss for at_s, loss in reversed(record["curve"]) if at_s <= seconds), NOWHERE)


def _lines(document: Document) -> list[dict[str, Any]]:
    """A line an objective, share and manner: means over seeds. Equal time is the time that ours took to its end with
    the same faults."""
    lines = []
    for objective in OBJECTIVES:
        for share in SHARES:
            ours = {record["seed"]: record for record in records_of(document, _name(objective, "ours", share))}
            for manner in MANNERS:
                records = [x for x in records_of(document, _name(objective, manner, share)) if x["seed"] in ours]
                if not records:
                    continue
                timed = [at_time(record, ours[record["seed"]]["virtual_s"]) for record in records]
                lines.append(
                    {
                        "objective": objective,
                        "share": share,
                        "manner": manner,
                        "valid": mean_of(records, "valid"),
                        "test": mean_of(records, "test"),
                        "timed": statistics.mean(timed),
                        "timed_by_seed": {record["seed"]: x for record, x in zip(records, timed, strict=True)},
                        "virtual_s": mean_of(records, "virtual_s"),
                        "merged": mean_of(records, "updates"),
                    }
                )
    return lines


def _table(document: Document) -> Table:
    head = [
        "objective",
        "late or lost",
        "merging",
        "valid, all rounds",
        "test",
        "valid, equal time",
        "virtual s",
        "merged",
        "seeds",
    ]
    return head, [
        [
            line["objective"],
            f"{100 * line['share']:.0f} %",
            line["manner"],
            f"{line['valid']:.4f}",
            f"{line['test']:.4f}",
            f"{line['timed']:.4f}",
            f"{line['virtual_s']:.0f}",
            f"{line['merged']:.0f}",
            str(len(line["timed_by_seed"])),
        ]
        for line in _lines(document)
    ]


def section(document: Document) -> str:
    lines = _lines(document)
    intro = "## Late and lost updates\n\n"
    if lines:
        spec = next(iter(document["results"].values()))["settings"]["spec"]
        intro += (
            f"{spec['model']['layers']} layers of width {spec['model']['width']} in {spec['model']['blocks']} blocks; "
            f"{_sizes()}; rounds of {ROUND_STEPS} steps, one step per second of virtual time. The seed chooses a "
            f"share of the updates: half of them are late by {DELAY_ROUNDS[0]:g} to {DELAY_ROUNDS[1]:g} rounds, half "
            f"are lost and their workers are away for as long; {seeds_of(document)}. Nats/byte on held-out text, at "
            f"the end of all rounds and at the time when ours ends (from curves on the first {CURVE_WINDOWS} windows, "
            f"without fitted weights of the composition).\n\n"
        )
    return f"{intro}{markdown(*_table(document))}\n{goal_lines(verdicts(document))}"


def _sizes() -> str:
    return ", ".join(
        f"{name}: {workers} workers, {x['train.steps']} steps" for name, (x, workers) in OBJECTIVES.items()
    )


def verdicts(document: Document) -> list[Verdict]:
    """Ours against the better of the others, where all three are."""
    lines, found = _lines(document), []
    for objective in OBJECTIVES:
        for share in SHARES[1:]:
            here = {x["manner"]: x for x in lines if (x["objective"], x["share"]) == (objective, share)}
            if here.keys() != MANNERS.keys():
                continue
            best = min(here["waiting"]["timed"], here["dropping"]["timed"])
            found.append(
                Verdict(
                    f"{objective}, {100 * share:.0f} %: at equal time no worse than waiting and dropping",
                    f"{here['ours']['timed']:.4f}, waiting {here['waiting']['timed']:.4f}, "
                    f"dropping {here['dropping']['timed']:.4f}{_apart(here['ours'], here['dropping'])}; "
                    f"at equal rounds {here['ours']['valid']:.4f}, {here['waiting']['valid']:.4f}, "
                    f"{here['dropping']['valid']:.4f}",
                    "",
                    here["ours"]["timed"] <= best,
                )
            )
    return found


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """How far from each other they are, seed by seed, with the standard error where there are several."""
    seeds = one["timed_by_seed"].keys() & other["timed_by_seed"].keys()
    gaps = [one["timed_by_seed"][seed] - other["timed_by_seed"][seed] for seed in seeds]
    if len(gaps) < 2:
        return ""
    return f" ({statistics.mean(gaps):+.4f} ± {statistics.stdev(gaps) / math.sqrt(len(gaps)):.4f} apart)"


def figures(document: Document) -> dict[str, go.Figure]:
    lines = _lines(document)

    def curve(objective: str, manner: str) -> Line:
        points = [x for x in lines if x["objective"] == objective and (x["manner"] == manner or not x["share"])]
        return Line(f"{objective}, {manner}", [100 * x["share"] for x in points], [x["timed"] for x in points])

    present = {line["objective"] for line in lines}
    figure = line_figure(
        [curve(objective, manner) for objective in OBJECTIVES if objective in present for manner in MANNERS],
        title="Late and lost updates, at the time when ours is at its end",
        x_title="% of the updates late or lost",
        y_title="nats/byte on held-out text",
    )
    return {"late": figure}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
