"""The report of compare: the facts of each side, the table, the curves and the JSON document.
Next: story.py, the curves of one run; figures.py, which draws."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch

from blocktrain.cli.console import duration, quantity, say, show_table
from blocktrain.cli.options import Budget
from blocktrain.cli.shared.scoring import Measured, error_cell, measure, score_record
from blocktrain.cli.shared.sections import newest_sample
from blocktrain.cli.shared.story import history, training_curves
from blocktrain.cli.shared.training import parameters_of_blocks, training_text, training_tokens
from blocktrain.data.corpus import Corpus
from blocktrain.figures import PageSummary, Section, line_figure, write_page, write_png
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.io.files import write_whole
from blocktrain.train.flops import run_flops
from blocktrain.train.trainer import pick_device

HELD_OUT = ("valid", "test")
COLUMNS = ["", "parameters", "training text", "work", "time"]
COLUMNS += [name for split in HELD_OUT for name in (f"{split} nats/byte", "± s.e.")]


@dataclass(frozen=True)
class Side:
    """One of the two runs and its measurements."""

    run: RunDirectory
    parameters: list[int]  # of each block
    losses: dict[int, list[float]]  # by phase, step after step
    seconds: float  # of training, the sum over all phases
    held_out: dict[str, Measured]  # by split

    @classmethod
    def of(cls, run: RunDirectory, text: Corpus, max_windows: int | None = None) -> Self:
        held_out = {split: measure(run, text, split, max_windows=max_windows) for split in HELD_OUT}
        losses, seconds = history(run.metrics())
        return cls(run, parameters_of_blocks(run.spec), losses, seconds, held_out)

    def record(self) -> dict[str, Any]:
        spec = self.run.spec
        return {
            "settings": spec.model_dump(mode="json"),
            "spec_digest": spec.digest(),
            "corpus_sha256": self.run.manifest().corpus_sha256,
            "parameters": sum(self.parameters),
            "parameters_of_blocks": self.parameters,
            "training_bytes": training_tokens(spec),
            "training_flops": run_flops(spec),
            "training_seconds": self.seconds,
            "scores": {split: [score_record(score) for score in m.scores] for split, m in self.held_out.items()},
            "answer": {split: score_record(measured.answer) for split, measured in self.held_out.items()},
        }


def show(blocks: Side, reference: Side) -> None:
    show_table(COLUMNS, [_row("blocks", blocks), _row("reference", reference)])
    print(_gap_words(blocks, reference))
    if blocks.run.spec.corpus.tokenizer_sha256 is not None:
        print(_tokens_words({"blocks": blocks, "reference": reference}))


def write(out: Path, blocks: Side, reference: Side, budget: Budget) -> list[Path]:
    """Writes the curves and the document; returns their paths."""
    document = {
        "blocktrain": version("blocktrain"),
        "work": budget.value,
        "machine": machine(),
        "gap_nats_per_byte": _gaps(blocks, reference),
        "blocks": blocks.record(),
        "reference": reference.record(),
    }
    write_whole(out / "report.json", json.dumps(document, indent=2).encode())
    figure = line_figure(
        [
            *training_curves(blocks.run.spec, blocks.losses),
            *training_curves(reference.run.spec, reference.losses, color="#000000"),
        ],
        title=f"{blocks.run.spec.name}: training loss, in blocks and end to end",
        x_title="training text seen (bytes)",
        y_title="loss (nats per byte)",
    )
    page, rows = out / "curves.html", [_row("blocks", blocks), _row("reference", reference)]
    losses = Section("Training loss", _gap_words(blocks, reference), figure, COLUMNS, rows)
    write_page(page, blocks.run.spec.name, [losses], _summary(blocks, reference))
    image = write_png(figure, out / "curves.png", lambda reason: say(f"{reason}; {page} shows the same"))
    return [out / "report.json", page, *image]


def _summary(blocks: Side, reference: Side) -> PageSummary:
    figures = [
        (name, f"{side.held_out['test'].answer.nats_per_byte:.3f}", "nats/byte on the test split")
        for name, side in (("Blocks", blocks), ("End to end", reference))
    ]
    return PageSummary(figures, newest_sample(blocks.run.samples()))


def _gap_words(blocks: Side, reference: Side) -> str:
    return ", ".join(f"gap on {split} {gap:+.4f} nats/byte" for split, gap in _gaps(blocks, reference).items())


def _tokens_words(sides: Mapping[str, Side]) -> str:
    found = [
        f"{name} {' and '.join(f'{side.held_out[split].answer.nats_per_token:.4f} on {split}' for split in HELD_OUT)}"
        for name, side in sides.items()
    ]
    return f"nats/token: {', '.join(found)}"


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": pick_device().type,
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def _row(name: str, side: Side) -> list[str]:
    spec = side.run.spec
    cells = [name, f"{sum(side.parameters):,}", training_text(spec), quantity(run_flops(spec), "FLOP")]
    cells.append(duration(side.seconds))
    for measured in side.held_out.values():
        cells += [f"{measured.answer.nats_per_byte:.4f}", error_cell(measured.answer)]
    return cells


def _gaps(blocks: Side, reference: Side) -> dict[str, float]:
    return {
        split: blocks.held_out[split].answer.nats_per_byte - reference.held_out[split].answer.nats_per_byte
        for split in HELD_OUT
    }
