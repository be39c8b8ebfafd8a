"""blocktrain eval: cross entropy of runs on held-out text, for every reading of every path.
Next: cli/shared/scoring.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.console import say, show_table
from blocktrain.cli.machine import chosen_device, use_threads
from blocktrain.cli.options import DeviceName, MaxWindows, Threads, require_positive
from blocktrain.errors import ConfigError

if TYPE_CHECKING:
    from blocktrain.cli.shared.scoring import Measured
    from blocktrain.train.evaluate import Score


def evaluate(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run directories of train, reference or export.")
    ],
    split: Annotated[str, typer.Option(help="Part of the text: train, valid or test.")] = "valid",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document instead of a table.")] = False,
    max_windows: MaxWindows = None,
    missing: Annotated[str, typer.Option(metavar="1,2", help="Measure without these blocks.")] = "",
    corpus: Annotated[
        str | None, typer.Option(metavar="PATH", help="Measure on this text instead of the run's.")
    ] = None,
    device: DeviceName = None,
    threads: Threads = None,
) -> None:
    """Measure the loss of trained runs on held-out text.

    An unfinished run is measured with its last saved weights and marked as unfinished."""
    require_positive("--max-windows", max_windows)
    left_out = _blocks(missing)

    from blocktrain.cli.shared.scoring import half_trained, measure, open_trained, text_of
    from blocktrain.io.checkpoint import RunDirectory

    use_threads(threads)
    own_device, measured = chosen_device(device), []
    for path in runs:
        so_far = half_trained(path, left_out)
        run = RunDirectory.open(path) if so_far else open_trained(path, left_out)
        text = text_of(run, corpus)
        measured.append(
            measure(run, text, split, missing=left_out, max_windows=max_windows, so_far=so_far, device=own_device)
        )
    if as_json:
        print(json.dumps(_document(measured, split, left_out, max_windows), indent=2))
    else:
        _show(measured)


def _blocks(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")}) if text else []
    except ValueError:
        raise ConfigError(f"--missing {text} is not a list of blocks: write for example --missing 1,2") from None


def _show(measured: Sequence[Measured]) -> None:
    from blocktrain.cli.shared.scoring import baseline

    base = baseline(measured)
    pairs = [(each, score) for each in measured for score in each.scores]
    columns = ["run", "path", "reading", "nats/byte", "± s.e.", "bits/byte", "perplexity", ""]
    with_tokens = any(score.num_tokens != score.num_bytes for _, score in pairs)
    rows = [_row(each, score, base) for each, score in pairs]
    if with_tokens:
        columns.insert(-1, "nats/token")
        for row, (_, score) in zip(rows, pairs, strict=True):
            row.insert(-1, f"{score.nats_per_token:.4f}")
    answers = [index for index, (each, score) in enumerate(pairs) if score is each.answer]
    show_table(columns, rows, marked=answers)
    say(f"measured on {base.answer.num_bytes:,} bytes; answer: the reading that generate uses")


def _row(each: Measured, score: Score, base: Measured) -> list[str]:
    from blocktrain.cli.shared.scoring import error_cell

    names = [each.name, score.path, score.reading]
    numbers = [f"{score.nats_per_byte:.4f}", error_cell(score), f"{score.bits_per_byte:.4f}", f"{score.perplexity:.3f}"]
    return [*names, *numbers, _remark(each, base) if score is each.answer else ""]


def _remark(each: Measured, base: Measured) -> str:
    gap = each.gap_to(base)
    return "answer" if gap is None or each is base else f"answer, {gap:+.4f} nats/byte to {base.run.path}"


def _document(measured: Sequence[Measured], split: str, missing: list[int], max_windows: int | None) -> dict[str, Any]:
    from blocktrain.cli.shared.scoring import baseline

    base = baseline(measured)
    return {
        "split": split,
        "missing_blocks": missing,
        "max_windows": max_windows,
        "gap_to": str(base.run.path),
        "runs": [_record(each, base) for each in measured],
    }


def _record(each: Measured, base: Measured) -> dict[str, Any]:
    from blocktrain.cli.shared.scoring import score_record

    return {
        "path": str(each.run.path),
        "name": each.run.spec.name,
        "objective": each.run.spec.objective.kind,
        "spec_digest": each.run.spec.digest(),
        "text_sha256": each.text_sha256,
        "half_trained": each.half_trained,
        "scores": [score_record(score) for score in each.scores],
        "answer": score_record(each.answer),
        "gap_nats_per_byte": each.gap_to(base),
    }
