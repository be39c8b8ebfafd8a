"""How much memory does one worker take? The peak bytes of weights, gradients, optimiser state and activations of each
kind of worker, against the same blocks trained end to end.

    python bench/memory.py --corpus PATH [--preset wikitext] [--threads 1]

Each kind is measured in a process of its own. Nothing here says how fast a worker is (speed.py) or how good its model
(quality.py)."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch

from blocktrain.figures import PALETTE
from blocktrain.spec import preset
from shared.experiment import (
    RESULTS,
    Document,
    Verdict,
    at_most,
    goal_lines,
    machine,
    markdown,
    num_threads,
    portable,
    table,
    with_text,
    write_json,
    write_pictures,
)
from training.memory import SLACK, all_cases, in_own_process, measure_here, measure_memory, memory_part, quick_cases

MB = 2**20
HEAD = ["worker", "blocks", "state", "held", "tensors", "goal", "resident", "tensors, MiB", "resident, MiB"]
Rows = Sequence[Document]


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell when it starts and stops
    if options.measure:
        measure_here(json.loads(options.measure))
        return
    spec = preset("tiny" if options.quick else options.preset).with_(seed=options.seed)
    spec, corpus = with_text(spec, options.corpus)
    cases = quick_cases(spec) if options.quick else all_cases(spec)
    with num_threads(options.threads or (1 if options.quick else torch.get_num_threads())):
        document: dict[str, Any] = {
            "machine": machine(),
            "spec": portable(spec),
            "corpus_sha256": corpus.sha256,
            "slack": SLACK,
            "memory": memory_part(cases, steps=3, measure=measure_memory if options.quick else in_own_process),
        }
    write_json(options.out / "memory.json", document)
    print(table(HEAD, _cells(document["memory"])), goal_lines(verdicts(document)), sep="\n\n")
    write_pictures(figures(document), options.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="wikitext")
    parser.add_argument("--corpus", help="a folder with train.txt, valid.txt and test.txt, a file, or sotu")
    parser.add_argument("--seed", type=int, default=0, help="of the weights: the bytes do not depend on it")
    parser.add_argument("--threads", type=int, help="of torch, for all measurements (default: torch's own choice)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--quick", action="store_true", help="the tiny preset and one worker, all in this process")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser


def verdicts(document: Document) -> list[Verdict]:
    """For each number of blocks, the worst of the workers with one block's state, and the default, which has two."""
    found = []
    for (blocks, compiled), group in groupby(document["memory"], key=lambda row: (row["blocks"], row["compiled"])):
        workers = [row for row in group if row["goal"] is not None]
        alone = [row for row in workers if len(row["trained_blocks"]) == 1 and "look-ahead" not in row["name"]]
        default = [row for row in workers if len(row["trained_blocks"]) > 1]
        what = f"{blocks} blocks{', compiled' if compiled else ''}: peak memory over end to end's"
        one, two = (round(share / blocks + SLACK, 3) for share in (1, 2))
        for kind, key, rows, limit in (
            ("a block alone, state only", "state_ratio", alone, one),
            ("a block alone", "tensor_peak_ratio", alone, one),
            ("with the scaffold (default)", "tensor_peak_ratio", default, one),
            ("with the scaffold, held to two blocks' share", "tensor_peak_ratio", default, two),
        ):
            found += [_worst(f"{what}, {kind}", rows, key, limit)] if rows else []
    return found


def _worst(what: str, rows: Rows, key: str, limit: float) -> Verdict:
    worst = max(rows, key=lambda row: float(row[key]))
    return at_most(what, worst[key], limit, paper="a few GiB", about=f" ({worst['name']})")


def section(document: Document) -> str:
    model, train = document["spec"]["model"], document["spec"]["train"]
    return "\n".join(
        [
            "## Memory of one worker\n",
            f"Each kind of worker runs in its own process, {document['spec']['name']} preset: {model['layers']} "
            f"layers of width {model['width']}, {train['windows']} windows of {model['context']} bytes per step. "
            "*State* is weights, gradients and optimiser state. *Held* adds other blocks' weights and buffers. "
            "*Tensors* is the peak of all tensors alive at once, including activations. *Resident* is the peak of the "
            "process beyond its libraries and the corpus. All columns except the last two are shares of end-to-end "
            "training with the same blocks. The goal is for *tensors*: one block's share plus a tenth.\n",
            markdown(HEAD, _cells(document["memory"])),
            goal_lines(verdicts(document)),
        ]
    )


def _cells(rows: Rows) -> list[list[str]]:
    return [
        [
            row["name"],
            str(row["blocks"]),
            *(f"{row[f'{key}_ratio']:.3f}" for key in ("state", "held", "tensor_peak")),
            "–" if row["goal"] is None else f"≤ {row['goal']:.3f}",
            f"{row['rss_peak_ratio']:.3f}",
            f"{row['bytes']['tensor_peak'] / MB:.0f}",
            f"{row['bytes']['rss_peak'] / MB:.0f}",
        ]
        for row in rows
    ]


def figures(document: Document) -> dict[str, go.Figure]:
    """Bars of every worker, and a dash at its goal."""
    rows = [row for row in document["memory"] if row["goal"] is not None]
    labels = [f"{row['blocks']} blocks:<br>" + row["name"].replace(", ", ",<br>") for row in rows]
    drawn = go.Figure()
    bars = {
        "weights, gradients, optimiser": "state_ratio",
        "with other blocks' weights": "held_ratio",
        "all tensors, peak": "tensor_peak_ratio",
        "resident memory, peak": "rss_peak_ratio",
    }
    for color, (name, key) in zip(PALETTE, bars.items(), strict=False):
        values = [row[key] for row in rows]
        text = {"text": [f"{value:.2f}" for value in values], "textangle": -90, "insidetextanchor": "start"}
        drawn.add_bar(x=labels, y=values, name=name, marker_color=color, **text)
    dash = {"symbol": "line-ew-open", "size": 40, "color": "black", "line_width": 3}
    goals = [row["goal"] for row in rows]
    drawn.add_scatter(x=labels, y=goals, name=f"goal: 1/blocks + {SLACK:.2f}", mode="markers", marker=dash)
    drawn.update_xaxes(tickangle=0)
    drawn.update_yaxes(title="× end to end", rangemode="tozero")
    drawn.update_layout(
        title="Memory of one worker, as a share of end-to-end training's",
        template="plotly_white",
        width=1500,
        height=600,
        font_size=13,
        barmode="group",
        legend={"orientation": "h", "x": 0.0, "y": 1.08},
    )
    return {"memory": drawn}


if __name__ == "__main__":
    main()
