"""What eval, compare and report share: open a trained run, score it, and compare it with another.
Next: train/evaluate.py, which computes the scores."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from blocktrain.cli.console import say
from blocktrain.cli.shared.progress import evaluation_progress, preparing_progress
from blocktrain.data.corpus import Corpus, load_corpus
from blocktrain.errors import CheckpointError, ConfigError, CorpusError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.settings import TOKENIZER_FILE
from blocktrain.spec import EndToEnd
from blocktrain.train.evaluate import Score, answer, evaluate
from blocktrain.train.run import load_model
from blocktrain.train.trainer import pick_device
from blocktrain.train.unfinished import SoFar, trained_so_far


@dataclass(frozen=True)
class Measured:
    """The scores of one run on one split of some text."""

    run: RunDirectory
    text_sha256: str
    scores: list[Score]
    half_trained: str | None = None  # how far the training is, if it has not ended

    @property
    def name(self) -> str:
        return f"{self.run.path} (unfinished)" if self.half_trained else str(self.run.path)

    @property
    def answer(self) -> Score:
        return answer(self.scores)

    def gap_to(self, other: Measured) -> float | None:
        """Nats per byte above `other`. None if the two were not measured on the same text."""
        if self.text_sha256 != other.text_sha256:
            return None
        return self.answer.nats_per_byte - other.answer.nats_per_byte


def open_trained(path: Path, missing: Collection[int] = ()) -> RunDirectory:
    """A run whose blocks are all trained, except those that will be left out."""
    run = RunDirectory.open(path)
    trained, every = run.manifest().blocks, range(run.spec.model.blocks)
    if unknown := sorted(set(missing) - set(every)):
        raise ConfigError(f"--missing {unknown[0]}: {path} has blocks 0 to {every[-1]}, name blocks from that range")
    if set(every) <= set(missing):
        raise ConfigError(f"--missing names all {len(every)} blocks of {path}: keep at least one")
    if absent := [str(block) for block in every if block not in trained and block not in missing]:
        raise CheckpointError(
            f"{path} has no trained block {', '.join(absent)} yet: run the same blocktrain train command again "
            f"until it is finished"
        )
    return run


def half_trained(path: Path, missing: Collection[int] = ()) -> SoFar | None:
    """What a run is so far, if some of its blocks are not trained yet or are trained further, and the user does not
    leave out any."""
    run = RunDirectory.open(path)
    manifest = run.manifest()
    under_way = (x.index for x in run.spec.phases if x.index not in manifest.finished)
    is_whole = len(manifest.blocks) == run.spec.model.blocks
    if missing or (is_whole and not any(run.progress_file(phase).exists() for phase in under_way)):
        return None
    found = trained_so_far(run)
    say(f"{path} is unfinished: {found.where}")
    return found


def text_of(run: RunDirectory, elsewhere: str | None = None) -> Corpus:
    """The text of the run's training, or other text if the user names it."""
    changes = {"source": elsewhere} if elsewhere else {}
    if (elsewhere or run.spec.train.start_sha256) and run.tokenizer_file() is not None:
        changes["tokenizer"] = str(run.path / TOKENIZER_FILE)  # which may have been learned from the other text
    corpus = run.spec.corpus.model_copy(update=changes)
    try:
        with preparing_progress() as report:
            text = load_corpus(corpus, run.spec.model.context, report)
    except CorpusError:
        if elsewhere is not None:
            raise
        sha256 = run.manifest().corpus_sha256
        raise CorpusError(
            f'{run.path} was trained on the text "{corpus.name}" (sha256 {sha256[:12]}…), which is not here: '
            f"name the file or folder with --corpus PATH"
        ) from None
    if elsewhere is None and text.sha256 != run.manifest().corpus_sha256:
        raise CheckpointError(
            f'{run.path} was trained on other text than corpus "{corpus.source}" holds now: '
            f"restore it, or name another text with --corpus PATH"
        )
    return text


def measure(
    run: RunDirectory,
    text: Corpus,
    split: str,
    *,
    missing: Collection[int] = (),
    max_windows: int | None = None,
    so_far: SoFar | None = None,
    device: torch.device | None = None,
) -> Measured:
    model = (so_far.model() if so_far else load_model(run)).to(device or pick_device())
    with evaluation_progress(f"{run.path} on {split}") as report:
        scores = evaluate(model, text.split(split), missing=missing, max_windows=max_windows, report=report)
    return Measured(run, text.sha256, scores, so_far.where if so_far else None)


def baseline(measured: Sequence[Measured]) -> Measured:
    """The run to compare the others with: the first end-to-end run, or else the last run given."""
    references = [each for each in measured if isinstance(each.run.spec.objective, EndToEnd)]
    return references[0] if references else measured[-1]


def score_record(score: Score) -> dict[str, Any]:
    """For JSON, which has no NaN: None instead."""
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value for key, value in score.as_dict().items()
    }


def error_cell(score: Score) -> str:
    return "–" if math.isnan(score.standard_error) else f"{score.standard_error:.4f}"
