"""Does a swarm over the open Internet train? Three hosts with addresses of their own, each behind a link of 100 Mbit/s
and 80 ms, from an untrained model on; then the same with one host gone, killed without warning, for a third of the run.
For the default objective, whose blocks all hosts train, and for `denoise`, whose three blocks have a host each.

    python bench/three_hosts.py --corpus PATH [--rows full] [--seeds 0]

Each row is written to the result file when it is done and is not run again: stop it at any time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import torch

from blocktrain.data.corpus import Corpus
from blocktrain.figures import bar_figure
from blocktrain.spec import RunSpec
from shared.experiment import Document, Verdict, goal_lines, markdown, portable
from shared.rows import Record, Row, Table, base_of, chosen, mean_of, parser, records_of, run_rows, seeds_of, show
from swarms.run import APART, Absence, Link, Plan, run_swarm, together, untrained

PAPER_UNTRAINED, PAPER_CE, PAPER_GB = 5.580, 1.811, 15.22
LINK = Link(rate_bits=100e6, rtt_ms=80.0)
STACKED = ("full participation", "one host gone for a third")
DENOISED = ("denoise, full participation", "denoise, one host gone for a third")
ABSENCES: tuple[tuple[Absence, ...], ...] = ((), (Absence(worker=1, gone_at=1 / 3, back_at=2 / 3),))
HOSTS = 3
BUDGET = {"train.steps": 400, "train.windows": 4, "swarm.round_steps": 10}  # windows of one host
QUICK_BUDGET = {"train.steps": 6, "train.windows": 2, "swarm.round_steps": 2}
DENOISE_BUDGET = {"train.steps": 600, "train.windows": 12}


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(argv)
    base, corpus = base_of(options, together(HOSTS) | (QUICK_BUDGET if options.quick else BUDGET))
    a_block_each = {"model.blocks": HOSTS, "model.layers": HOSTS}
    denoise = base.with_(**APART, **a_block_each, **({} if options.quick else DENOISE_BUDGET))
    rows = [
        _row(name, spec.with_(seed=seed), absences, corpus, 20 if options.quick else 400)
        for seed in options.seeds
        for spec, names in ((base, STACKED), (denoise, DENOISED))
        for name, absences in zip(names, ABSENCES, strict=True)
    ]
    document = run_rows(options.out / "three_hosts.json", chosen(rows, options.rows))
    show(_table(document), figures(document), options.out)


def _row(name: str, spec: RunSpec, absences: tuple[Absence, ...], corpus: Corpus, max_windows: int) -> Row:
    plan = Plan(spec, HOSTS, link=LINK, absences=absences, max_windows=max_windows)
    settings = {"spec": portable(spec), "link": vars(LINK), "absences": list(map(vars, absences))}
    return Row(name, spec.seed, {**settings, "max_windows": max_windows}, lambda: run(plan, corpus))


def run(plan: Plan, corpus: Corpus) -> dict[str, Any]:
    return {**run_swarm(plan, corpus), "untrained": untrained(plan.spec, corpus, plan.max_windows)}


def _lines(document: Document) -> list[tuple[str, Sequence[Record]]]:
    return [(name, records) for name in (*STACKED, *DENOISED) if (records := records_of(document, name))]


def _table(document: Document) -> Table:
    head = ["hosts", "untrained", "valid", "test", "updates merged", "up, MB", "down, MB", "joining, MB", "seconds"]
    return head, [
        [
            name,
            f"{mean_of(records, 'untrained'):.3f}",
            f"{mean_of(records, 'valid'):.3f}",
            f"{mean_of(records, 'test'):.3f}",
            f"{mean_of(records, 'updates'):.0f} in {mean_of(records, 'rounds'):.0f} rounds",
            f"{mean_of(records, 'up_bytes') / 1e6:.1f}",
            f"{mean_of(records, 'down_bytes') / 1e6:.1f}",
            "–" if records[0]["joining_bytes"] is None else f"{mean_of(records, 'joining_bytes') / 1e6:.1f}",
            f"{mean_of(records, 'seconds'):.0f}",
        ]
        for name, records in _lines(document)
    ]


def section(document: Document) -> str:
    return f"## Three hosts\n\n{_intro(document)}{markdown(*_table(document))}\n{goal_lines(verdicts(document))}"


def _intro(document: Document) -> str:
    if not (lines := _lines(document)):
        return ""
    first = lines[0][1][0]
    spec, link = first["settings"]["spec"], first["settings"]["link"]
    denoised = [records[0]["settings"]["spec"] for name, records in lines if name in DENOISED]
    return (
        f"Three hosts, each behind a link of {link['rate_bits'] / 1e6:.0f} Mbit/s and {link['rtt_ms']:.0f} ms round "
        f"trip, train a model from scratch: {_budget(spec)} in the first phase, rounds of "
        f"{spec['swarm']['round_steps']}; nats/byte on held-out text, {seeds_of(document)}. "
        + "".join(f"`denoise` trains {one['model']['blocks']} blocks, {_budget(one)}. " for one in denoised[:1])
        + f"Bytes are counted on the {first['counted']}{', headers included' if first['counted'] == 'cables' else ''}; "
        "joining is counted separately: it is the corpus, which every host downloads once. All processes share two "
        "cores, which determines the seconds.\n\n"
    )


def _budget(spec: Mapping[str, Any]) -> str:
    train, context = spec["train"], spec["model"]["context"]
    return f"{train['steps']} steps of {train['windows']} windows of {context} bytes per host"


def verdicts(document: Document) -> list[Verdict]:
    return [
        Verdict(
            f"{name}: at most {PAPER_CE} nats/byte, and fewer than {PAPER_GB} GB",
            f"{mean_of(records, 'untrained'):.3f} → {mean_of(records, 'valid'):.3f} with {_gigabytes(records):.3f} GB",
            "",
            mean_of(records, "valid") <= PAPER_CE and _gigabytes(records) < PAPER_GB,
            paper=f"{PAPER_UNTRAINED:.3f} → {PAPER_CE} with {PAPER_GB} GB, a larger model",
        )
        for name, records in _lines(document)
    ]


def _gigabytes(records: Sequence[Record]) -> float:
    """All that went over the links, joining included."""
    joining = mean_of(records, "joining_bytes") if records[0]["joining_bytes"] is not None else 0.0
    return (mean_of(records, "up_bytes") + mean_of(records, "down_bytes") + joining) / 1e9


def figures(document: Document) -> dict[str, go.Figure]:
    lines = _lines(document)
    figure = bar_figure(
        [name for name, _ in lines],
        [mean_of(records, "valid") for _, records in lines],
        title="Three hosts behind 100 Mbit/s and 80 ms",
        x_title="",
        y_title="nats/byte on held-out text",
    )
    figure.add_hline(y=PAPER_CE, line_dash="dot", annotation_text=f"the paper: {PAPER_CE}")
    return {"three_hosts": figure}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
