"""What does it cost to train with six machines instead of one? One real swarm of six worker processes over HTTP, their
replicas averaged, against one worker at equal training bytes: as many steps, each replica with its share of a step's
windows. For the default objective, whose six replicas train the same blocks, and for `denoise`, whose three blocks have
two replicas each. The single worker is run with the preset's learning rates and with higher ones; the better counts.

    python bench/six_workers.py --corpus PATH [--rows stacked,denoise] [--seeds 0]

Each row is written to the result file when it is done and is not run again: stop it at any time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch

from blocktrain.data.corpus import Corpus
from blocktrain.figures import bar_figure
from blocktrain.spec import Denoise, OptimSpec, RunSpec
from shared.experiment import Document, Verdict, goal_lines, markdown, portable
from shared.rows import Record, Row, Table, base_of, chosen, mean_of, parser, records_of, run_rows, seeds_of, show
from swarms.run import Plan, run_single, run_swarm

PAPER_LOST, PAPER_CE, LOST_GOAL = 0.026, 1.385, 0.01
TRIED = "ten settings of the stacked swarm and six of denoise's, seven and two of the single worker's"
SINGLE, FASTER, SWARM = "single", "single at higher rates", "swarm"


@dataclass(frozen=True)
class Case:
    """`changes` make the single worker's run of the preset."""

    objective: str
    workers: int
    replicas: int  # of a block
    changes: Mapping[str, Any]
    higher: tuple[float, float]  # learning rates that a single worker also tries, times the preset's of AdamW and Muon
    raised: tuple[float, float]  # those of the swarm

    def single(self, base: RunSpec) -> RunSpec:
        return base.with_(**self.changes)

    def single_at_higher_rates(self, base: RunSpec) -> RunSpec:
        return self.single(base).with_(**rates(base.optim, *self.higher))

    def replica(self, base: RunSpec) -> RunSpec:
        """What each worker of the swarm trains: as many steps of fewer windows, all replicas in every round."""
        single = self.single(base)
        shared = {"train.windows": single.train.windows // self.replicas, "swarm.min_updates": self.replicas}
        return single.with_(**shared, **rates(base.optim, *self.raised))


def rates(optim: OptimSpec, adam: float, muon: float) -> dict[str, float]:
    """So many times the rates. Replicas that share a step's windows need higher ones: both optimisers make every update
    equally long, however noisy, and the mean of R noisy ones is shorter than the one update of all windows: by up to √R
    where nearly all is noise, as in the tables that AdamW trains, by less in the matrices, where Muon's momentum has
    averaged before."""
    return {"optim.adam_lr": optim.adam_lr * adam, "optim.muon_lr": optim.muon_lr * muon}


CASES = (
    Case(
        "stacked",
        6,
        6,
        {"train.steps": 600, "train.windows": 36, "swarm.round_steps": 1},
        higher=(9.0, 1.5),
        raised=(14.0, 2.2),
    ),
    Case(
        "denoise",
        6,
        2,
        {
            "objective": Denoise(),
            "model.blocks": 3,
            "model.layers": 3,
            "train.steps": 600,
            "train.windows": 12,
            "swarm.round_steps": 1,
        },
        higher=(2**0.5, 2 ** (1 / 3)),
        raised=(2.0, 1.6),
    ),
)
QUICK = (Case("stacked", 2, 2, {"train.steps": 6, "train.windows": 2, "swarm.round_steps": 3}, (1.4, 1.3), (2.0, 1.4)),)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(argv)
    base, corpus = base_of(options, {})
    max_windows = 20 if options.quick else 2000
    rows = [
        row
        for seed in options.seeds
        for case in (QUICK if options.quick else CASES)
        for row in _rows(case, base.with_(seed=seed), corpus, max_windows)
    ]
    document = run_rows(options.out / "six_workers.json", chosen(rows, options.rows))
    show(_table(document), figures(document), options.out)


def _rows(case: Case, base: RunSpec, corpus: Corpus, max_windows: int) -> list[Row]:
    single, faster, replica = case.single(base), case.single_at_higher_rates(base), case.replica(base)
    plan = Plan(replica, case.workers, max_windows=max_windows)

    def row(name: str, spec: dict[str, Any], workers: int, run: Callable[[], dict[str, Any]]) -> Row:
        settings = {"spec": spec, "workers": workers, "max_windows": max_windows}
        return Row(f"{case.objective} {name}", base.seed, settings, run)

    return [
        row(SINGLE, _alone(single), 1, lambda: run_single(single, corpus, max_windows)),
        row(SWARM, portable(replica), case.workers, lambda: run_swarm(plan, corpus)),
        row(FASTER, _alone(faster), 1, lambda: run_single(faster, corpus, max_windows)),
    ]


def _alone(spec: RunSpec) -> dict[str, Any]:
    """The settings that a run without a swarm depends on."""
    return {name: table for name, table in portable(spec).items() if name != "swarm"}


def _compared(document: Document) -> list[dict[str, Any]]:
    """A line for each objective that has both runs: means over the seeds that both have, the single worker's with the
    rates that were better for it on valid."""
    lines = []
    for objective in ("stacked", "denoise"):
        swarms = records_of(document, f"{objective} {SWARM}")
        singles = _better(document, objective)
        pairs = [(singles[x["seed"]], x) for x in swarms if x["seed"] in singles]
        if not pairs:
            continue
        before, after = ([pair[side] for pair in pairs] for side in (0, 1))
        lines.append(
            {
                "objective": objective,
                "spec": before[0]["settings"]["spec"],
                "round_steps": after[0]["settings"]["spec"]["swarm"]["round_steps"],
                "workers": after[0]["workers"],
                "single": mean_of(before, "valid"),
                "swarm": mean_of(after, "valid"),
                "lost": mean_of(after, "valid") - mean_of(before, "valid"),
                "test_lost": mean_of(after, "test") - mean_of(before, "test"),
                "test": mean_of(after, "test"),
                "bytes_share": mean_of(after, "tokens") / mean_of(before, "tokens"),
                "single_bytes": mean_of(before, "tokens"),
                "moved_MB": mean_of(after, "up_bytes") / 1e6 + mean_of(after, "down_bytes") / 1e6,
            }
        )
    return lines


def _better(document: Document, objective: str) -> dict[int, Record]:
    """By seed, the single worker's run at the better rates."""
    usual, faster = (
        {record["seed"]: record for record in records_of(document, f"{objective} {name}")} for name in (SINGLE, FASTER)
    )
    return {
        seed: min((record, faster.get(seed, record)), key=lambda each: float(each["valid"]))
        for seed, record in usual.items()
    }


def _table(document: Document) -> Table:
    head = ["objective", "one worker", "swarm", "lost", "swarm, test", "lost, test", "bytes trained on", "MB moved"]
    return head, [
        [
            line["objective"],
            f"{line['single']:.4f}",
            f"{line['swarm']:.4f}",
            f"{line['lost']:+.4f}",
            f"{line['test']:.4f}",
            f"{line['test_lost']:+.4f}",
            f"{100 * line['bytes_share']:.0f} %",
            f"{line['moved_MB']:.0f}",
        ]
        for line in _compared(document)
    ]


def section(document: Document) -> str:
    lines = _compared(document)
    sizes = "; ".join(f"{line['objective']}: {_size(line)}" for line in lines)
    workers = lines[0]["workers"] if lines else 0
    intro = (
        f"## Six workers\n\n{workers} worker processes train over HTTP; their replicas are averaged every round with "
        f"the default codecs. They are compared with one worker at the same number of steps. A replica takes its share "
        f"of a step's windows, so the bytes trained on are the same, except when a worker joins a round late or joins "
        f"one that already has its replicas; the column shows the share of the single worker's bytes. Nats/byte of the "
        f"composed answer on held-out text, {seeds_of(document)}. {sizes}. "
        f"Learning rates and the length of the swarm's rounds were chosen by hand on valid, and only the best setting "
        f"is kept: {TRIED}. A replica has noisier updates and needs higher rates.\n\n"
    )
    return f"{intro}{markdown(*_table(document))}\n{goal_lines(verdicts(document))}"


def verdicts(document: Document) -> list[Verdict]:
    return [
        Verdict(
            f"{line['objective']}: at most +{LOST_GOAL} nats/byte over the single worker",
            f"{line['lost']:+.4f} on valid, {line['test_lost']:+.4f} on test",
            "",
            line["lost"] <= LOST_GOAL,
            paper=f"+{PAPER_LOST}, to {PAPER_CE}",
        )
        for line in _compared(document)
    ]


def _size(line: Mapping[str, Any]) -> str:
    model, train = line["spec"]["model"], line["spec"]["train"]
    return (
        f"{model['blocks']} blocks, {model['layers']} layers of width {model['width']}, {train['steps']} steps of "
        f"{train['windows']} windows of {model['context']} bytes, rounds of {line['round_steps']} steps"
    )


def figures(document: Document) -> dict[str, go.Figure]:
    lines = _compared(document)
    figure = bar_figure(
        [*(line["objective"] for line in lines), "the paper"],
        [*(line["lost"] for line in lines), PAPER_LOST],
        title="Six workers against one at equal training bytes",
        x_title="",
        y_title="nats/byte lost on held-out text",
    )
    figure.add_hline(y=LOST_GOAL, line_dash="dot", annotation_text=f"goal: at most {LOST_GOAL}")
    return {"six_workers": figure}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
