"""What the page of results says of depth.py: gaps, recovered depth, swarms of equal wall-clock, memory, goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from blocktrain.figures import PALETTE
from blocktrain.spec import RunSpec
from blocktrain.train.flops import run_flops
from blocktrain.train.streamed import streamed_run_flops
from shared.experiment import Document, Verdict, at_least, at_most, goal_lines, markdown
from training.depth_rows import CUT_SHAPE, CUTS, KINDS, LAYERS, SWARMS, cut_kinds, rows_of, swarm_kinds
from training.rows import AVERAGE_EVERY_STEPS, signed, summarise

HEAD = ["row", "budget", "seeds", "steps", "PFLOP", "valid", "gap", "test", "gap", "recovered depth"]
MEMORY_HEAD = ["worker", "blocks", "MB at width 64, 32 windows", "share", "MB at width 512, 2 windows", "share"]
SWARM_HEAD = ["workers", "row", "budget", "seeds", "steps", "valid", "test", "against the best that fits, valid"]
CUT_HEAD = ["blocks", "budget", "seeds", "end to end", "whole model, one block in memory", "gap", "one block's layers"]
CUT_HEAD += ["recovered depth", "memory share at width 512"]
SHAPE_NAMES = ("narrow", "wide")
HOUR_CORPUS = "wikitext-2"  # as result files name it: without the path


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


FITTING = {  # in the memory of one worker: the layers of one block, or of the default's two
    **dict.fromkeys(("whole", "whole-bare", "at-once", "denoise"), ("one-block",)),
    "default": ("one-block", "two-blocks"),
}


def _recovered(lines: Mapping[str, Mapping[str, Any]], kind: str) -> float | None:
    """R = (L_fit - L) / (L_fit - L_end-to-end), where L_fit is the best model that fits the memory of one worker. None
    if that model is no worse than end to end: then there is no depth to recover at this budget."""
    if kind not in FITTING or not {*FITTING[kind], "end-to-end"} <= set(lines):
        return None
    fit, end_to_end = min(lines[name]["valid"] for name in FITTING[kind]), lines["end-to-end"]["valid"]
    return None if fit <= end_to_end else float((fit - lines[kind]["valid"]) / (fit - end_to_end))


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
    verdicts += _hour(document)
    for line in _cut_lines(document):
        if line["blocks"] == max(CUTS) and line["recovered"] is not None:
            about = f" ({line['budget']} end-to-end steps, {_seeds(line)})"
            what = f"whole model in {line['blocks']} blocks, one in memory: recovered depth at equal work"
            verdicts.append(at_least(what, line["recovered"], 0.6, ".2f", about=about))
    for cut in CUTS:
        share = memory_share(document, "wide", f"whole, one block in memory/{cut}")
        if share is not None:
            verdicts.append(
                at_most(f"memory of one worker at {cut} blocks, width 512, × end to end", share, 1 / cut * 1.1)
            )
    if (share := memory_share(document, "wide", "the same, all activations kept/4")) is not None:
        what = "the same at 4 blocks with all activations kept, which is end-to-end training at equal work, bit for bit"
        verdicts.append(at_most(what, share, 1 / 4 * 1.1))
    return verdicts


def _hour(document: Document) -> list[Verdict]:
    """The best of what was trained in blocks within an hour of two cores. The goal is for WikiText-2."""
    if any(record["spec"]["corpus"]["source"] != HOUR_CORPUS for record in document["results"].values()):
        return []
    rows = [
        line for line in _lines(document, ("whole-bare", "whole", "default")) if _cpu_seconds(document, line) < 7200
    ]
    if not rows:
        return []
    best = min(rows, key=lambda line: float(line["test"]))
    about = f" ({best['budget']} end-to-end steps, {_cpu_seconds(document, best) / 60:.0f} minutes of one core)"
    what = "composed from blocks in an hour of two cores: nats/byte on test"
    return [at_most(what, best["test"], 1.2, ".4f", about=about)]


def _cpu_seconds(document: Document, line: Mapping[str, Any]) -> float:
    return max(float(each["cpu_seconds"]) for each in document["results"].values() if each["row"] == line["row"])


def _seeds(line: Mapping[str, Any]) -> str:
    return f"{len(line['seeds'])} seed{'s' if len(line['seeds']) > 1 else ''}"


def _swarm_lines(document: Document) -> list[dict[str, Any]]:
    """One line per row of several workers, with its distance to the best of the models that fit one of them."""
    lines = []
    for workers in SWARMS:
        own = _lines(document, swarm_kinds(workers))
        for line in own:
            fits = [x["valid"] for x in own if x["budget"] == line["budget"] and not x["kind"].startswith("whole")]
            against = line["valid"] - min(fits) if fits else None
            lines.append({**line, "workers": workers, "against": against})
    return lines


def swarm_cells(document: Document) -> list[list[str]]:
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


def _cut_lines(document: Document) -> list[dict[str, Any]]:
    """The whole model with one of N blocks in memory, beside end to end and what fits: one line per N and budget."""
    found = []
    for blocks in CUTS:
        own = {(line["budget"], line["kind"].partition("-in")[0]): line for line in _lines(document, cut_kinds(blocks))}
        for (budget, kind), line in own.items():
            if kind == "whole-bare":
                others = {other: own.get((budget, other)) for other in ("end-to-end", "one-block")}
                there = {other: each for other, each in {**others, kind: line}.items() if each is not None}
                found.append({**line, "blocks": blocks, **others, "recovered": _recovered(there, kind)})
    return found


def cut_cells(document: Document) -> list[list[str]]:
    def valid(line: Mapping[str, Any] | None) -> str:
        return "–" if line is None else f"{line['valid']:.4f}"

    def share(blocks: int) -> str:
        measured = memory_share(document, "wide", f"whole, one block in memory/{blocks}")
        return "–" if measured is None else f"{measured:.3f}"

    return [
        [
            str(line["blocks"]),
            str(line["budget"]),
            str(len(line["seeds"])),
            valid(line["end-to-end"]),
            valid(line),
            signed(line["valid_gap"]),
            valid(line["one-block"]),
            "–" if line["recovered"] is None else f"{line['recovered']:.2f}",
            share(line["blocks"]),
        ]
        for line in _cut_lines(document)
    ]


def memory_share(document: Document, shape: str, name: str) -> float | None:
    measured = document.get("memory", {}).get(shape, {})
    return measured[name] / measured["end to end/1"] if name in measured and "end to end/1" in measured else None


def section(document: Document) -> str:
    first = next(iter(document["results"].values()))
    corpus, model, train = (first["spec"][part] for part in ("corpus", "model", "train"))
    return "\n".join(
        [
            f"## Depth that does not fit a worker: {corpus['source']}, width {model['width']}\n",
            f"Bytes of {corpus['source']}, {LAYERS} layers of width {model['width']} in 4 blocks, "
            f"context {model['context']}, {train['windows']} windows per step. A budget is a number of end-to-end "
            "steps. Every row does the same work, which includes the second forward pass of a worker that holds one "
            f"block. Rows are scored on the first {first['max_windows']} windows of each split. Recovered depth is 1 "
            "at the loss of end-to-end training and 0 at that of the best model that fits the memory of one worker, "
            "with all of the work: one block's layers, or two blocks' for the default. Where such a model is better "
            "than end to end, depth does not pay yet at that budget, and there is nothing to recover.\n",
            markdown(HEAD, cells(document)),
            *_swarm_section(document),
            *_cut_section(document),
            *_memory_section(document),
            *_step_section(document),
            goal_lines(verdicts(document)),
        ]
    )


def _memory_section(document: Document) -> list[str]:
    if not (cells := memory_cells(document)):
        return []
    return [
        "The measured peak of all tensors of one worker, for 16 layers, context 128. A worker that keeps the "
        "activations of all blocks does the work of end-to-end training and computes the same bits: its loss is "
        "that of end to end, 8 layers.\n",
        markdown(MEMORY_HEAD, cells),
    ]


def _cut_section(document: Document) -> list[str]:
    if not (cells := cut_cells(document)):
        return []
    return [
        f"The same question for {CUT_SHAPE['model.layers']} layers of width {CUT_SHAPE['model.width']} in 2 to 16 "
        "blocks, nats/byte on valid; the memory is that of the table below:\n",
        markdown(CUT_HEAD, cells),
    ]


def _step_section(document: Document) -> list[str]:
    """Processor time of a step of the whole model, as a multiple of that with all blocks in memory."""
    measured = document.get("step_seconds")
    if not measured:
        return []
    rows = [
        [name, *(f"{measured[shape][name] / measured[shape]['all blocks in memory']:.2f}" for shape in SHAPE_NAMES)]
        for name in measured["narrow"]
    ]
    head = [
        "a step of the whole model, 16 layers in 4 blocks",
        "time at width 64, 32 windows",
        "at width 512, 2 windows",
    ]
    return [
        "Processor time of one step, as a multiple of the first line's; all in turn, in one run:\n",
        markdown(head, rows),
    ]


def _swarm_section(document: Document) -> list[str]:
    if not (cells := swarm_cells(document)):
        return []
    return [
        f"Several workers that average their models every {AVERAGE_EVERY_STEPS} steps. Each does the work of the "
        "budget, so all rows of a budget take the same time:\n",
        markdown(SWARM_HEAD, cells),
    ]


def cells(document: Document) -> list[list[str]]:
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


def memory_cells(document: Document) -> list[list[str]]:
    memory = document.get("memory", {})
    return [
        [*name.split("/"), *(cell for shape in SHAPE_NAMES for cell in _memory_pair(document, shape, name))]
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
