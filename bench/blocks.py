"""What does cutting cost? The same layers in 1, 2, 4 and 8 blocks: how far a model trained in blocks stays from the
same blocks trained end to end as they grow in number, at equal total work, and the memory of one worker beside it.

    python bench/blocks.py --corpus PATH [--seeds 0,1,2] [--steps 200]

Each row and seed is written to the result file as soon as it is done and is not run again: stop it at any time."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from blocktrain.figures import PALETTE
from blocktrain.spec import Denoise, RunSpec, Stacked, preset
from blocktrain.train.reference import of_equal_work, reference_of
from shared.experiment import (
    RESULTS,
    Document,
    Verdict,
    at_most,
    goal_lines,
    markdown,
    num_threads,
    read_json,
    table,
    with_text,
    write_json,
    write_pictures,
)
from training.memory import Case, Memory, in_own_process, measure_memory
from training.rows import Row, Way, run_rows, signed, summarise, todo

BLOCKS = (1, 2, 4, 8)
LAYERS, STEPS, WINDOWS = 8, 200, 1000
END_TO_END, STACKED, DENOISE = "end to end", "stacked (default)", "denoise"
KINDS = {"reference": END_TO_END, "stacked": STACKED, "denoise": DENOISE}
HEAD = [
    "blocks",
    "trained",
    "seeds",
    "params",
    "valid",
    "gap",
    "test",
    "gap",
    "memory of one worker, × one block end to end",
]
MAX_GAP = 0.02
Lines = Sequence[Mapping[str, Any]]


def row_of(kind: str, blocks: int) -> Row:
    return Row(f"{kind}-{blocks}", KINDS[kind], "equal work", _maker(kind, blocks), reference=f"reference-{blocks}")


def _maker(kind: str, blocks: int) -> Callable[[RunSpec, int], RunSpec]:
    def make(base: RunSpec, steps: int) -> RunSpec:
        cut = base.with_(**{"model.blocks": blocks})
        if kind == "reference":
            return reference_of(cut, steps=steps)
        return of_equal_work(cut.with_(objective=Stacked() if kind == "stacked" else Denoise()), steps)

    return make


ROWS = tuple(row_of(kind, blocks) for blocks in BLOCKS for kind in KINDS)


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    base = preset("tiny" if options.quick else "small").with_(**{"model.layers": LAYERS})
    base, _ = with_text(base, options.corpus)
    steps = options.steps or (3 if options.quick else STEPS)
    path = options.out / "blocks.json"
    rows = [row for row in ROWS if row.name in options.rows]
    done = read_json(path)
    wanted = todo(rows, base, steps, options.seeds, done.get("results", {}))
    way = Way(options.work, 4 if options.quick else options.max_windows, threads=options.threads)
    run_rows(wanted, path, way, reference_steps=steps)
    add_memory(rows, base, path, measure_memory if options.quick else in_own_process)
    document = read_json(path)
    print(table(HEAD, _cells(document)), goal_lines(verdicts(document)), sep="\n\n")
    write_pictures(figures(document), options.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", help="a folder with train.txt, valid.txt and test.txt, a file, or sotu")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=[row.name for row in ROWS])
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help=f"steps of the reference (default {STEPS})")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in training")
    parser.add_argument("--max-windows", type=int, default=WINDOWS, help="score only the first windows of each split")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--work", type=Path, default=RESULTS.parent / "runs", help="where runs are kept to be resumed")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, seconds")
    return parser


def add_memory(rows: Sequence[Row], base: RunSpec, path: Path, measure: Callable[[Case, int], Memory]) -> None:
    """The peak bytes of all tensors of a worker in the middle of the run, one thread, each in its own process."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    for row in rows:
        document = read_json(path)
        if row.name in document.get("memory", {}):
            continue
        spec = row.make(base, 1000)
        with num_threads(1):
            memory = measure(Case(row.name, spec, len(spec.phases) // 2), 3)
        measured = {"tensor_peak": memory.tensor_peak, "state": memory.state}
        write_json(path, {**document, "memory": {**document.get("memory", {}), row.name: measured}})


def verdicts(document: Document) -> list[Verdict]:
    """Of the default; at one block it is the reference itself."""
    return [
        at_most(
            f"{_blocks(line)} blocks: gap to end to end at equal work, test, nats/byte",
            line["test_gap"],
            MAX_GAP,
            "+.4f",
            about=f" ({len(line['seeds'])} seed{'s' if len(line['seeds']) > 1 else ''})",
        )
        for line in summarise(ROWS, document["results"])
        if line["label"] == STACKED and _blocks(line) > 1 and line["test_gap"] is not None
    ]


def section(document: Document) -> str:
    first = next(iter(document["results"].values()))
    model, train = first["spec"]["model"], first["spec"]["train"]
    windows = first["max_windows"]
    return "\n".join(
        [
            "## Number of blocks\n",
            f"The same {model['layers']} layers of width {model['width']} are cut into more and more blocks: bytes of "
            f"{first['spec']['corpus']['source']}, context {model['context']}, {train['windows']} windows per step. "
            f"Every row has the work of {document['reference_steps']} end-to-end steps of the same blocks and is "
            f"scored on the first {windows} windows of each split. A gap compares with the same blocks trained end to "
            "end with the same seed. Memory is the measured peak of all tensors of one worker in the middle of the "
            "run.\n",
            markdown(HEAD, _cells(document)),
            goal_lines(verdicts(document)),
        ]
    )


def _cells(document: Document) -> list[list[str]]:
    return [
        [
            str(_blocks(line)),
            line["label"],
            str(len(line["seeds"])),
            f"{line['parameters'] / 1e6:.3f}M",
            f"{line['valid']:.4f}",
            signed(line["valid_gap"]),
            f"{line['test']:.4f}",
            signed(line["test_gap"]),
            "–" if (share := memory_share(document, line["row"])) is None else f"{share:.3f}",
        ]
        for line in summarise(ROWS, document["results"])
    ]


def _blocks(line: Mapping[str, Any]) -> int:
    return int(line["row"].rpartition("-")[2])


def memory_share(document: Document, row: str) -> float | None:
    """Against the model in one piece, so that what more read-outs cost is seen too."""
    memory = document.get("memory", {})
    if row not in memory or "reference-1" not in memory:
        return None
    return float(memory[row]["tensor_peak"] / memory["reference-1"]["tensor_peak"])


def figures(document: Document) -> dict[str, go.Figure]:
    """The gap to the left, memory to the right, over the number of blocks."""
    titles = ["Gap to end to end on test text, nats/byte", "Peak memory of one worker, × one block end to end"]
    drawn = make_subplots(rows=1, cols=2, subplot_titles=titles)
    lines = summarise(ROWS, document["results"])
    for color, kind in zip(("black", *PALETTE), KINDS.values(), strict=False):
        own = [line for line in lines if line["label"] == kind]
        shares = [memory_share(document, line["row"]) for line in own]
        _draw(drawn, 1, kind, color, own, [line["test_gap"] for line in own])
        _draw(drawn, 2, kind, color, own, shares)
    drawn.update_xaxes(title="blocks", type="log", tickvals=list(BLOCKS))
    drawn.update_yaxes(rangemode="tozero", col=2)
    drawn.update_layout(template="plotly_white", width=1200, height=480, font_size=14)
    return {"blocks": drawn}


def _draw(drawn: go.Figure, col: int, kind: str, color: str, lines: Lines, values: Sequence[float | None]) -> None:
    blocks = [_blocks(line) for line in lines]
    style = {"marker_color": color, "mode": "lines+markers", "legendgroup": kind, "showlegend": col == 1}
    drawn.add_scatter(x=blocks, y=list(values), name=kind, **style, row=1, col=col)


if __name__ == "__main__":
    main()
