"""How texts are held against others: how likely they are under a model, and whether a classifier can tell them from the
texts of another decoder. Pure functions of texts, models and arrays. Next: serve_quality.py measures with them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812

from blocktrain.model.stack import BlockModel

Floats = npt.NDArray[np.float64]
LONGEST_GRAM = 4
BUCKETS = 4096
FOLDS = 5
RIDGE = 1.0
RESAMPLES = 400
BATCH_TEXTS = 50


@dataclass(frozen=True)
class Estimate:
    """A mean over outputs and its standard error."""

    value: float
    error: float


def mean_of(values: Floats) -> Estimate:
    return Estimate(float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5))


@torch.no_grad()
def surprises(model: BlockModel, pairs: Sequence[tuple[bytes, bytes]], read: int | None = None) -> Floats:
    """[texts, bytes]: -log p of every byte of each text behind its prompt, which all fit into one window. `read` is the
    block that is asked instead of the whole model."""
    prompt, text = (len(part) for part in pairs[0])
    whole = np.frombuffer(b"".join(before + after for before, after in pairs), np.uint8).reshape(len(pairs), -1)
    assert whole.shape[1] == prompt + text <= model.spec.model.context + 1, "texts of one length, within a window"
    windows, found = torch.from_numpy(whole.astype(np.int64)), []
    for batch in torch.split(windows, BATCH_TEXTS):
        logits = _logits(model, batch[:, :-1], read)[:, prompt - 1 :]
        found.append(F.cross_entropy(logits.transpose(1, 2).double(), batch[:, prompt:], reduction="none"))
    surprise: Floats = torch.cat(found).numpy()
    return surprise


def _logits(model: BlockModel, windows: torch.Tensor, read: int | None) -> torch.Tensor:
    return model.logits(windows) if read is None else model.readings(windows, model.paths[0])[read]


def gram_features(texts: Sequence[bytes]) -> Floats:
    """[texts, buckets]: how often runs of 1 to 4 bytes occur, in logarithms, each text with norm 1."""
    counts = np.zeros((len(texts), BUCKETS))
    for row, text in enumerate(texts):
        for length in range(1, LONGEST_GRAM + 1):
            for at in range(len(text) - length + 1):
                counts[row, zlib.crc32(text[at : at + length]) % BUCKETS] += 1
    logs = np.log1p(counts)
    features: Floats = logs / np.linalg.norm(logs, axis=1, keepdims=True)
    return features


def surprise_features(surprise: Floats) -> Floats:
    """[texts, 5]: mean, spread, and three high quantiles of a text's surprises."""
    high = np.quantile(surprise, [0.5, 0.9, 0.99], axis=1).T
    features: Floats = np.column_stack([surprise.mean(1), surprise.std(1), high])
    return features


def tell_apart(ones: Sequence[Floats], others: Sequence[Floats]) -> Estimate:
    """The classifier two-sample test (Lopez-Paz and Oquab 2017): how often a linear classifier ranks a text of the ones
    above a text of the others, on prompts that it was not trained with. 0.5: it cannot tell them apart; 1: always.
    Each group of features [texts, n] weighs as much as each other group; text k of both sides has the same prompt."""
    features = np.column_stack([_scaled(np.concatenate(both)) for both in zip(ones, others, strict=True)])
    count = len(ones[0])
    sides = np.concatenate([np.ones(count), -np.ones(count)])
    prompts = np.tile(np.arange(count), 2)
    kernel, scores = features @ features.T, np.zeros(2 * count)
    for fold in range(FOLDS):
        tested = prompts % FOLDS == fold
        known = ~tested
        solved = np.linalg.solve(kernel[np.ix_(known, known)] + RIDGE * np.eye(known.sum()), sides[known])
        scores[tested] = kernel[np.ix_(tested, known)] @ solved
    own, their = scores[:count], scores[count:]
    generator = np.random.default_rng(0)
    drawn = (generator.integers(count, size=count) for _ in range(RESAMPLES))
    return Estimate(ranked_above(own, their), float(np.std([ranked_above(own[at], their[at]) for at in drawn])))


def _scaled(features: Floats) -> Floats:
    """Columns that vary little do not outweigh the others, and the group's rows have the mean norm 1."""
    centred, spread = features - features.mean(0), features.std(0)
    centred = centred / (spread + np.median(spread) + 1e-12)
    scaled: Floats = centred / max(float(np.linalg.norm(centred, axis=1).mean()), 1e-12)
    return scaled


def ranked_above(ones: Floats, others: Floats) -> float:
    """The area under the ROC curve."""
    above = (ones[:, None] > others).mean() + (ones[:, None] == others).mean() / 2
    return float(above)
