"""The sections of blocktrain report: a page about a run, from a run directory or from a swarm's ledger. Names that
others chose, such as those of readings, are escaped where a figure would read them as markup.
Next: story.py, where the records come from; figures.py, which draws."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path

from blocktrain.cli.console import counted, duration, quantity
from blocktrain.cli.shared.scoring import Measured, error_cell, measure, open_trained, text_of
from blocktrain.cli.shared.story import Record, SwarmStory, history, story_of_export, story_of_ledger, training_curves
from blocktrain.cli.shared.training import parameters_of_blocks, phase_label, shape_of, training_text
from blocktrain.errors import BlockTrainError, CheckpointError
from blocktrain.figures import Line, PageSummary, Section, bar_figure, line_figure
from blocktrain.io.checkpoint import SPEC_FILE, RunDirectory
from blocktrain.io.private import LEDGER_FILE
from blocktrain.logs import visible
from blocktrain.spec import BYTES, RunSpec
from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.coordinator.watching.curves import answer_of
from blocktrain.train.flops import run_flops

MOST_EVENTS = 30
SAMPLES_SHOWN = 5  # moments after the first
MINUTES = "minutes since the first update"
SINCE_START = "minutes since the first evaluation"


@dataclass(frozen=True)
class ReportPage:
    title: str
    summary: PageSummary
    sections: list[Section]


def page_of(folder: Path, ledger: str | None, max_windows: int | None) -> ReportPage:
    """What stands on top comes first: samples and losses. The settings are at the end."""
    if ledger is not None or (folder / LEDGER_FILE).is_file():
        story = story_of_ledger(folder, ledger)
        *sections, events = _swarm_sections(story)
        sections += [_settings(story.spec), events]
        return ReportPage(story.spec.name, _swarm_summary(story), sections)
    if not (folder / SPEC_FILE).is_file():
        raise CheckpointError(
            f"{folder} has neither {SPEC_FILE} nor {LEDGER_FILE}: give the directory of a run, or a coordinator's --dir"
        )
    run = RunDirectory.open(folder)
    exported = story_of_export(folder, run.spec)
    measured = _measured_now(run, max_windows)
    if exported:
        sections, summary = _swarm_sections(exported), _swarm_summary(exported)
    else:
        sections = [*_samples(run.samples()), *_held_out_on_the_way(run), _loss_of_steps(run), _ALONE]
        summary = _summary(run, measured)
    sections += [_held_out_now(measured), _blocks(run), _settings(run.spec)]
    return ReportPage(run.spec.name, summary, sections)


# The top of the page


def _summary(run: RunDirectory, measured: Measured | BlockTrainError) -> PageSummary:
    losses, seconds = history(run.metrics())
    scored = isinstance(measured, Measured)
    loss = f"{measured.answer.nats_per_byte:.3f}" if isinstance(measured, Measured) else "–"
    figures = [
        ("Held-out loss", loss, "nats/byte, valid split" if scored else "not measured"),
        ("Training", duration(seconds), f"{counted(sum(map(len, losses.values())), 'step')}, all phases"),
        ("Text", training_text(run.spec), "to train on, all phases"),
        ("Parameters", f"{sum(parameters_of_blocks(run.spec)):,}", f"in {counted(run.spec.model.blocks, 'block')}"),
    ]
    return PageSummary(figures, newest_sample(run.samples()))


def _swarm_summary(story: SwarmStory) -> PageSummary:
    answer = answer_of(story.evaluations[-1]["scores"]) if story.evaluations else None
    updates = [each["update"] for each in story.contributions]
    span_s = max(x["received_s"] for x in updates) - min(x["received_s"] for x in updates) if updates else 0.0
    figures = [
        ("Held-out loss", f"{answer['nats_per_byte']:.3f}" if answer else "–", "nats/byte, at the last evaluation"),
        ("Training", duration(span_s), f"from the first to the last of {counted(len(updates), 'update')}"),
        ("Text", quantity(sum(x["tokens"] for x in updates), "B"), "trained on by all workers"),
        ("Workers", str(len(_contributors(story))), f"sent {quantity(sum(x['num_bytes'] for x in updates), 'B')}"),
    ]
    return PageSummary(figures, newest_sample(story.samples))


def newest_sample(records: Sequence[Record]) -> tuple[str, str] | None:
    """The first prompt and its continuation at the last evaluation."""
    sample = next((each["samples"][0] for each in reversed(records) if each["samples"]), None)
    return (visible(sample["prompt"]), visible(sample["text"])) if sample else None


# Every run


def _settings(spec: RunSpec) -> Section:
    model, unit = spec.model, "bytes" if spec.corpus.tokenizer_sha256 is None else "tokens"
    rows = [
        ["objective", spec.objective.kind],
        ["shape", shape_of(model)],
        ["tokenizer", spec.corpus.tokenizer or BYTES],
        ["context", f"{model.context} {unit}"],
        ["parameters", f"{sum(parameters_of_blocks(spec)):,}"],
        ["corpus", spec.corpus.name],
        ["text to train on, all phases", training_text(spec)],
        ["work, all phases", quantity(run_flops(spec), "FLOP")],
        ["seed", str(spec.seed)],
        ["digest", spec.digest()],
    ]
    return Section("Settings", columns=["setting", "value"], rows=rows)


# A run directory


def _loss_of_steps(run: RunDirectory) -> Section:
    losses, seconds = history(run.metrics())
    if not losses:
        return Section("Training loss", "No step is recorded here.")
    figure = line_figure(
        training_curves(run.spec, losses),
        title="Training loss",
        x_title="training text seen (bytes)",
        y_title="loss (nats per byte)",
    )
    steps = sum(map(len, losses.values()))
    return Section("Training loss", f"{counted(steps, 'step')} in {duration(seconds)} of training.", figure)


def _held_out_on_the_way(run: RunDirectory) -> list[Section]:
    """Measured on a few windows while it was trained."""
    curve = held_out_curve(run)
    if len(curve.x) < 2:
        return []
    figure = line_figure([curve], title="Held-out loss", x_title=SINCE_START, y_title="nats per byte")
    text = "On a few windows of the valid split, while it was trained."
    return [Section("Held-out loss while training", text, figure.update_traces(mode="lines+markers"))]


def held_out_curve(run: RunDirectory) -> Line:
    records = [each for each in run.samples() if each.get("nats_per_byte") is not None]
    began_s = records[0]["at_s"] if records else 0.0
    return Line(
        "held-out loss",
        [(each["at_s"] - began_s) / 60 for each in records],
        [each["nats_per_byte"] for each in records],
    )


def _measured_now(run: RunDirectory, max_windows: int | None) -> Measured | BlockTrainError:
    """If the blocks or the text are missing, the reason instead."""
    try:
        return measure(open_trained(run.path), text_of(run), "valid", max_windows=max_windows)
    except BlockTrainError as error:
        return error


def _held_out_now(measured: Measured | BlockTrainError) -> Section:
    if not isinstance(measured, Measured):
        return Section("Held-out loss now", f"Not measured: {measured}")
    scores = measured.scores
    names = [f"{score.path}, {score.reading}" for score in scores]
    figure = bar_figure(
        names,
        [score.nats_per_byte for score in scores],
        title="Held-out loss of every reading",
        x_title="path, reading",
        y_title="nats per byte",
        zoom=True,
    )
    rows = [
        [n, f"{s.nats_per_byte:.4f}", error_cell(s), f"{s.bits_per_byte:.4f}", f"{s.nats_per_token:.4f}"]
        for n, s in zip(names, scores, strict=True)
    ]
    text = f"On {measured.answer.num_bytes:,} bytes of the valid split; generate uses {measured.answer.reading}."
    columns = ["reading", "nats/byte", "± s.e.", "bits/byte", "nats/token"]
    return Section("Held-out loss now", text, figure, columns, rows)


def _blocks(run: RunDirectory) -> Section:
    entries, rows = run.manifest().blocks, []
    for block, parameters in enumerate(parameters_of_blocks(run.spec)):
        entry = entries.get(block)
        trained = [str(entry.steps), quantity(_file_bytes(run, block), "B")] if entry else ["not yet", ""]
        rows.append([str(block), str(run.spec.model.layers_of(block)), f"{parameters:,}", *trained])
    return Section("Blocks", columns=["block", "layers", "parameters", "steps", "file"], rows=rows)


def _file_bytes(run: RunDirectory, block: int) -> int:
    return sum(path.stat().st_size for path in run.path.glob(f"block-{block}-*.safetensors"))


_ALONE = Section("Workers and bytes", "Trained on one machine: nobody else took part and nothing was sent.")


def _samples(records: Sequence[Record]) -> list[Section]:
    """The same prompts at several moments of the training, from noise to words."""
    places = {round(n * (len(records) - 1) / SAMPLES_SHOWN) for n in range(SAMPLES_SHOWN + 1)} if records else set()
    shown = [records[at] for at in sorted(places)]
    rows = [
        [_when(each["at_s"]), _nats(each.get("nats_per_byte")), visible(sample["prompt"]), visible(sample["text"])]
        for each in shown
        for sample in each["samples"]
    ]
    text = "The same prompts of held-out text, continued by the model as it was then."
    return (
        [Section("What it wrote", text, None, ["when", "held-out loss", "prompt", "continuation"], rows)]
        if rows
        else []
    )


def _nats(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.3f}"


# A swarm


def _swarm_sections(story: SwarmStory) -> list[Section]:
    if not story.contributions:
        return [Section("Workers", "Nobody has contributed yet."), _events(story.events)]
    started_s = min(each["update"]["received_s"] for each in story.contributions)
    return [
        *_samples(story.samples),
        _held_out_then(story.evaluations, started_s),
        _loss_of_updates(story, started_s),
        _workers(story),
        _bytes(story.contributions, started_s),
        _events(story.events),
    ]


def _held_out_then(evaluations: Sequence[Record], started_s: float) -> Section:
    """The composed model and the single blocks, as the swarm measured them."""
    if not evaluations:
        return Section("Held-out loss", "Not measured yet.")
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in evaluations:
        for score in each["scores"]:
            name = escape(f"{score['path']}, {score['reading']}")
            points[name].append(((each["at_s"] - started_s) / 60, score["nats_per_byte"]))
    lines = [Line(name, [x for x, _ in path], [y for _, y in path]) for name, path in points.items()]
    figure = line_figure(lines, title="Held-out loss over time", x_title=MINUTES, y_title="nats per byte")
    return Section("Held-out loss", f"{len(evaluations)} evaluations.", figure.update_traces(mode="lines+markers"))


def _loss_of_updates(story: SwarmStory, started_s: float) -> Section:
    lines = []
    for phase in story.spec.phases:
        updates = [each["update"] for each in story.contributions if each["update"]["phase"] == phase.index]
        minutes = [(update["received_s"] - started_s) / 60 for update in updates]
        lines.append(Line(phase_label(story.spec, phase), minutes, [update["loss"] for update in updates]))
    figure = line_figure(
        lines,
        title="Training loss of the updates",
        x_title=MINUTES,
        y_title="loss (nats per byte)",
    )
    text = f"{counted(len(story.contributions), 'update')}, each with the loss of its last step."
    return Section("Training loss", text, figure.update_traces(mode="lines+markers"))


def _contributors(story: SwarmStory) -> list[Record]:
    """The workers whose updates were accepted, those first that trained on most text."""
    return sorted((each for each in story.workers if each["updates"]), key=lambda each: -each["tokens"])


def _workers(story: SwarmStory) -> Section:
    """By alias: the page may be passed on, and the names of machines are for admins alone."""
    workers = _contributors(story)
    sent: dict[str, int] = defaultdict(int)
    for each in story.contributions:
        sent[each["update"]["worker"]] += each["update"]["num_bytes"]
    figure = bar_figure(
        [alias_of(each["id"]) for each in workers],
        [each["tokens"] for each in workers],
        title="Text trained by each worker",
        x_title="worker",
        y_title="bytes of text",
    )
    rows = [
        [
            alias_of(each["id"]),
            each["id"][:8],
            each["device"],
            f"{each['steps_per_s']:.3g}",
            str(each["updates"]),
            quantity(each["tokens"], "B"),
            quantity(sent[each["id"]], "B"),
            _when(each["last_seen_s"]),
        ]
        for each in workers
    ]
    columns = ["worker", "key", "device", "steps/s", "updates", "text", "sent", "last seen"]
    return Section("Workers", f"{len(rows)} took part.", figure, columns, rows)


def _bytes(contributions: Sequence[Record], started_s: float) -> Section:
    updates = [each["update"] for each in contributions]
    sent = list(accumulate(update["num_bytes"] for update in updates))
    trained = list(accumulate(update["tokens"] for update in updates))
    minutes = [(update["received_s"] - started_s) / 60 for update in updates]
    figure = line_figure(
        [Line("updates sent", minutes, sent), Line("text trained on", minutes, trained)],
        title="Bytes",
        x_title=MINUTES,
        y_title="bytes, added up",
    )
    text = f"{quantity(sent[-1], 'B')} of updates for {quantity(trained[-1], 'B')} of text."
    return Section("Bytes", text, figure)


def _events(events: Sequence[Record]) -> Section:
    rows = [[_when(each["at_s"]), each["kind"], each["text"]] for each in events[-MOST_EVENTS:]]
    return Section("Events", "The newest." if rows else "None are recorded here.", None, ["when", "what", ""], rows)


def _when(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))
