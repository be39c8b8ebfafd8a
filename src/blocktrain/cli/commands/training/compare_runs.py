"""compare of runs that exist: what they reached, how they got there and in which settings they differ, as a table and a
page. Next: cli/shared/sections.py, the page about one run; figures.py, which draws."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from blocktrain.cli.console import quantity, say, show_table
from blocktrain.cli.shared.scoring import half_trained, measure, text_of
from blocktrain.cli.shared.sections import held_out_curve, newest_sample
from blocktrain.cli.shared.story import SwarmStory, history, story_of_export, story_of_ledger, training_curves
from blocktrain.cli.shared.training import parameters_of_blocks, training_tokens
from blocktrain.errors import CheckpointError
from blocktrain.figures import Line, PageSummary, Section, bar_figure, line_figure, write_page
from blocktrain.io.checkpoint import SPEC_FILE, RunDirectory
from blocktrain.io.files import write_whole
from blocktrain.io.private import LEDGER_FILE
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.watching.curves import answer_of
from blocktrain.train.flops import phase_flops, run_flops

MINUTES = "minutes of training"


@dataclass(frozen=True)
class Contender:
    """One of the runs that are compared."""

    name: str
    spec: RunSpec
    text: int  # tokens that it was trained on
    flops: int
    loss: float | None  # held-out, nats per byte
    error: float | None  # its standard error
    corpus_sha256: str | None  # of the text that it was measured on; None if unknown
    held_out: Line  # over minutes
    training: Line  # over bytes of text
    sample: tuple[str, str] | None


def open_contender(folder: Path, max_windows: int | None, corpus: str | None) -> Contender:
    """From a run directory, measured now, on other text than its own if the user names it; or from a coordinator's
    directory, as its workers measured it."""
    if (folder / LEDGER_FILE).is_file():
        story = story_of_ledger(folder)
        text, flops = work_of(story)
        return Contender(
            str(folder), story.spec, text, flops, _last_loss(story), None, None, *_curves(story, str(folder))
        )
    if not (folder / SPEC_FILE).is_file():
        raise CheckpointError(
            f"{folder} has neither {SPEC_FILE} nor {LEDGER_FILE}: give directories of runs, or of coordinators"
        )
    run, name = RunDirectory.open(folder), str(folder)
    measured = measure(run, text_of(run, corpus), "valid", max_windows=max_windows, so_far=half_trained(folder))
    answer = measured.answer
    error = None if math.isnan(answer.standard_error) else answer.standard_error
    exported = story_of_export(folder, run.spec)
    text, flops = training_tokens(run.spec), run_flops(run.spec)
    if exported is not None:
        text, flops = work_of(exported)
        curves = _curves(exported, name)
    else:
        losses, _ = history(run.metrics())
        points = [point for line in training_curves(run.spec, losses) for point in zip(line.x, line.y, strict=True)]
        held_out, (xs, ys) = held_out_curve(run), _split(sorted(points))
        curves = Line(escape(name), held_out.x, held_out.y), Line(escape(name), xs, ys), newest_sample(run.samples())
    return Contender(name, run.spec, text, flops, answer.nats_per_byte, error, measured.text_sha256, *curves)


def work_of(story: SwarmStory) -> tuple[int, int]:
    """The text and the work of all updates: workers that are averaged each do the steps of a round."""
    updates, phases = [each["update"] for each in story.contributions], story.spec.phases
    flops = sum(each["steps"] * phase_flops(story.spec, phases[each["phase"]]) for each in updates)
    return sum(each["tokens"] for each in updates), flops


def _curves(story: SwarmStory, name: str) -> tuple[Line, Line, tuple[str, str] | None]:
    updates = [each["update"] for each in story.contributions]
    began_s = min((update["received_s"] for update in updates), default=0.0)
    scored = [(each["at_s"], answer_of(each["scores"])) for each in story.evaluations]
    held_out = [((at_s - began_s) / 60, answer["nats_per_byte"]) for at_s, answer in scored if answer]
    read = list(accumulate(update["tokens"] for update in updates))
    training = Line(escape(name), read, [update["loss"] for update in updates])
    return Line(escape(name), *_split(held_out)), training, newest_sample(story.samples)


def _split(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _last_loss(story: SwarmStory) -> float | None:
    answer = answer_of(story.evaluations[-1]["scores"]) if story.evaluations else None
    return float(answer["nats_per_byte"]) if answer else None


# What is shown


def differing_settings(specs: Sequence[RunSpec]) -> list[tuple[str, list[str]]]:
    """Every setting that is not the same in all runs, with its value in each."""
    flat = [_flat(spec.model_dump(mode="json")) for spec in specs]
    keys = dict.fromkeys(key for each in flat for key in each)
    values = [(key, [json.dumps(each[key]) if key in each else "–" for each in flat]) for key in keys]
    return [(key, row) for key, row in values if len(set(row)) > 1]


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def compare_runs(folders: Sequence[Path], out: Path, max_windows: int | None, corpus: str | None = None) -> list[Path]:
    """Prints a table of the runs, best first, and writes a page and a JSON document. Returns their paths."""
    runs = [open_contender(folder, max_windows, corpus) for folder in folders]
    ranked = sorted(runs, key=lambda run: math.inf if run.loss is None else run.loss)
    rows = [_row(run, ranked[0]) for run in ranked]
    show_table(COLUMNS, rows)
    hashes = {run.corpus_sha256 for run in runs if run.corpus_sha256 is not None}
    names = {run.spec.corpus.name for run in runs if corpus is None or run.corpus_sha256 is None}
    texts = max(len(hashes), len(names)) > 1
    if texts:
        remedy = ": measure them on one with --corpus PATH" if corpus is None else ""
        say(f"warning: the runs were measured on different texts, so their losses cannot be compared{remedy}")
    by_workers = [run.name for run in runs if run.corpus_sha256 is None]
    if 0 < len(by_workers) < len(runs):
        say(
            f"note: {', '.join(by_workers)}: the loss is the last evaluation by its workers, on other windows than the "
            f"runs that were measured now; blocktrain export its model to measure it like them"
        )
    page, document = out / "compare.html", out / "compare.json"
    out.mkdir(parents=True, exist_ok=True)
    write_page(page, "Comparison", sections_of(ranked, rows, texts), _summary(ranked))
    records = [{"run": x.name, "nats_per_byte": x.loss, "settings": x.spec.model_dump(mode="json")} for x in runs]
    write_whole(document, json.dumps({"runs": records}, indent=2).encode())
    return [page, document]


COLUMNS = ["run", "held-out nats/byte", "± s.e.", "behind the best", "parameters", "training text", "work"]


def _row(run: Contender, best: Contender) -> list[str]:
    behind = "–" if run.loss is None or best.loss is None else f"{run.loss - best.loss:+.4f}"
    return [
        run.name,
        "–" if run.loss is None else f"{run.loss:.4f}",
        "–" if run.error is None else f"{run.error:.4f}",
        behind,
        f"{sum(parameters_of_blocks(run.spec)):,}",
        quantity(run.text, "B" if run.spec.corpus.tokenizer_sha256 is None else "tokens"),
        quantity(run.flops, "FLOP"),
    ]


def _summary(ranked: Sequence[Contender]) -> PageSummary:
    figures = [
        (run.name, "–" if run.loss is None else f"{run.loss:.3f}", "nats/byte on held-out text") for run in ranked[:4]
    ]
    return PageSummary(figures, ranked[0].sample)


def sections_of(ranked: Sequence[Contender], rows: list[list[str]], other_texts: bool) -> list[Section]:
    scored = [(run.name, run.loss) for run in ranked if run.loss is not None]
    text = "The runs were measured on different texts: their losses cannot be compared." if other_texts else ""
    bars = bar_figure(
        [escape(name) for name, _ in scored],
        [loss for _, loss in scored],
        title="Held-out loss",
        x_title="run",
        y_title="nats per byte",
        zoom=True,
    )
    sections = [Section("Held-out loss", text, bars, COLUMNS, rows)]
    for heading, lines, x_title in (
        ("Held-out loss while training", [run.held_out for run in ranked], MINUTES),
        ("Training loss", [run.training for run in ranked], "training text seen (bytes)"),
    ):
        if any(line.x for line in lines):
            figure = line_figure(
                [line for line in lines if line.x], title=heading, x_title=x_title, y_title="nats per byte"
            )
            sections.append(Section(heading, "", figure.update_traces(mode="lines")))
    written = [[run.name, *run.sample] for run in ranked if run.sample]
    if written:
        sections.append(Section("What they wrote", "", None, ["run", "prompt", "continuation"], written))
    differ = [[key, *values] for key, values in differing_settings([run.spec for run in ranked])]
    names = ["setting", *(run.name for run in ranked)]
    same = "" if differ else "None: only the training differs."
    sections.append(Section("Settings that differ", same, None, names, differ))
    return sections
