"""Measures a composed model: cross entropy and its standard error on a held-out split, for every block, path and
composition. Also fits the weights of the composition. The target never enters the model.
Next: model/stack.py, the composed model; cli/commands/training/eval.py, the command."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from blocktrain.data.windows import Tokens, consecutive_windows, num_consecutive_windows, require_vocabulary, text_bytes
from blocktrain.model.stack import BlockModel, Readings
from blocktrain.spec import MAX_COMPOSITION_WEIGHT, NUM_SYMBOLS, EndToEnd, RunSpec

BATCH_WINDOWS = 32
FIT_WINDOWS, FIT_BATCH_WINDOWS = 128, 8
FIT_STEPS, FIT_TOLERANCE, FIT_SUFFICIENT = 30, 1e-7, 1e-3  # nats per byte; of what the slope promises
FIT_DAMPING = 1e-6  # of the curvature: blocks that predict nearly the same determine only the sum of their weights
EULER_SEED = 20_240_601  # the Euler path starts from noise; a fixed seed makes evaluations repeatable


@dataclass(frozen=True)
class Score:
    """Cross entropy of one reading of a model: all nats over all bytes of the text, whatever the tokenizer is. The
    standard error assumes that windows are independent."""

    path: str
    reading: str  # "block 0", …, "last", "combined"
    nats_per_byte: float
    standard_error: float
    num_bytes: int  # of the original text
    num_tokens: int

    @property
    def nats_per_token(self) -> float:
        return self.nats_per_byte * self.num_bytes / self.num_tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats_per_byte / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_byte)

    def as_dict(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("nats_per_token", "bits_per_byte", "perplexity")}
        return asdict(self) | derived


@torch.no_grad()
def evaluate(
    model: BlockModel,
    data: Tokens,
    *,
    missing: Collection[int] = (),
    max_windows: int | None = None,
    report: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Score every reading on all of `data` (or its first windows). Each byte is predicted once."""
    length = model.spec.model.context + 1
    require_vocabulary(model.spec, data)
    total = num_consecutive_windows(data, length)
    total = total if max_windows is None else min(total, max_windows)
    losses: dict[tuple[str, str], list[Tensor]] = {}
    sizes: list[Tensor] = []  # bytes of text that each window predicts
    generator = torch.Generator().manual_seed(EULER_SEED)
    at_once = windows_at_once(model.spec, BATCH_WINDOWS)
    for first in range(0, total, at_once):
        window = consecutive_windows(data, length, first, min(at_once, total - first))
        sizes.append(torch.from_numpy(text_bytes(data, window[:, 1:]).sum(1)))
        batch = torch.from_numpy(window).to(next(model.parameters()).device).long()
        inputs, targets = batch[:, :-1], batch[:, 1:]
        for path in model.paths:
            readings = model.readings(inputs, path, generator, missing)
            for name, logits in _named(model, path, readings, missing):
                losses.setdefault((path, name), []).append(_window_losses(logits, targets))
        if report:
            report(batch.size(0), total)
    num_tokens = total * model.spec.model.context
    return [
        _score(path, name, torch.cat(parts), torch.cat(sizes).double(), num_tokens)
        for (path, name), parts in losses.items()
    ]


def windows_at_once(spec: RunSpec, of_bytes: int, least: int = 1) -> int:
    """How many windows have logits that take no more memory than those of `of_bytes` windows of a model on bytes."""
    return max(least, of_bytes * NUM_SYMBOLS // max(NUM_SYMBOLS, spec.model.vocabulary))


def answer(scores: list[Score]) -> Score:
    """The score of what the model answers with: the composition of its first path."""
    first_path = [score for score in scores if score.path == scores[0].path]
    return first_path[-1]


def fit_combination(model: BlockModel, data: Tokens) -> dict[str, tuple[float, ...]]:
    """The weights w_k of log p = Σ w_k logits_k + const that predict `data` best, for the model's first path. The
    problem is convex and has one number per block: a few steps of Newton's method, each halved until it helps.
    torch.optim.LBFGS does the same, but imports torch's compiler, which takes longer than the fit."""
    if isinstance(model.spec.objective, EndToEnd) or len(model.blocks) == 1:
        return {}
    most = windows_at_once(model.spec, FIT_WINDOWS, FIT_BATCH_WINDOWS)
    drawn = consecutive_windows(data, model.spec.model.context + 1, most=most)
    windows = torch.from_numpy(drawn).long().to(next(model.parameters()).device)
    path = model.paths[0]
    batches = torch.split(windows, FIT_BATCH_WINDOWS)
    with torch.no_grad():
        logits_KNV = [torch.stack(model.readings(batch[:, :-1], path)).flatten(1, 2).float() for batch in batches]
    targets_N = [batch[:, 1:].flatten() for batch in batches]
    start = [0.0] * (len(model.blocks) - 1) + [1.0] if path == "stack" else [1 / len(model.blocks)] * len(model.blocks)
    weights = torch.tensor(start, dtype=torch.float64)
    loss, gradient, curvature = _mixed_loss(weights, logits_KNV, targets_N)
    for _ in range(FIT_STEPS):
        damping = FIT_DAMPING * curvature.trace() + torch.finfo(torch.float64).tiny
        damped = curvature + damping * torch.eye(len(weights), dtype=torch.float64)
        step = -torch.linalg.solve(damped, gradient)
        while (gain := -(gradient @ step).item()) > FIT_TOLERANCE:
            if (weights + step).abs().max() <= MAX_COMPOSITION_WEIGHT:  # a model that learned little asks for more
                tried = _mixed_loss(weights + step, logits_KNV, targets_N)
                if tried[0] <= loss - FIT_SUFFICIENT * gain:
                    break
            step = step / 2
        else:
            break
        weights, (loss, gradient, curvature) = weights + step, tried
    return {path: tuple(weights.tolist())}


@torch.no_grad()
def _mixed_loss(weights: Tensor, logits_KNV: list[Tensor], targets_N: list[Tensor]) -> tuple[float, Tensor, Tensor]:
    """Nats per token of softmax(Σ w_k logits_k), with their gradient and Hessian in w: the covariance of the logits."""
    loss, gradient = 0.0, torch.zeros_like(weights)
    curvature = torch.zeros(len(weights), len(weights), dtype=weights.dtype)
    for logits, targets in zip(logits_KNV, targets_N, strict=True):  # one batch at a time, to save memory
        log_p_NV = torch.tensordot(weights.to(logits), logits, dims=1).log_softmax(-1)
        p_NV, at_N1 = log_p_NV.exp(), targets[:, None]
        centred_KNV = logits - (p_NV * logits).sum(-1, keepdim=True)
        loss -= log_p_NV.gather(-1, at_N1).sum().item()
        gradient -= centred_KNV.gather(-1, at_N1.expand(len(weights), -1, -1)).sum((1, 2)).cpu().double()
        curvature += ((p_NV * centred_KNV).flatten(1) @ centred_KNV.flatten(1).T).cpu().double()
    num_tokens = sum(map(len, targets_N))
    return loss / num_tokens, gradient / num_tokens, curvature / num_tokens


def _named(model: BlockModel, path: str, readings: Readings, missing: Collection[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(model.spec.objective, EndToEnd):
        yield "last", readings[-1]  # the only read-out that was trained
        return
    present = [index for index in range(len(model.blocks)) if index not in missing]
    yield from ((f"block {index}", logits) for index, logits in zip(present, readings, strict=True))
    if path in ("stack", "euler"):
        yield "last", readings[-1]
    if path != "euler":
        yield "combined", model.combined(readings, path)


def _window_losses(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """All nats of each window."""
    losses = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="none")
    return losses.view_as(targets_BT).cpu().double().sum(1)


def _score(path: str, name: str, nats: Tensor, num_bytes: Tensor, num_tokens: int) -> Score:
    """From the nats and the bytes of each window. The error is that of a ratio of two means (Cochran 1977, 6.4)."""
    ratio = (nats.sum() / num_bytes.sum()).item()
    spread = (nats - ratio * num_bytes).std().item() if len(nats) > 1 else math.nan
    error = spread / num_bytes.mean().item() / math.sqrt(len(nats))
    return Score(path, name, ratio, error, int(num_bytes.sum()), num_tokens)
