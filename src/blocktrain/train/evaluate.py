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
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.data.corpus import consecutive_windows
from blocktrain.model.stack import BlockModel, Readings
from blocktrain.spec import EndToEnd

BATCH_WINDOWS = 32
FIT_WINDOWS, FIT_BATCH_WINDOWS = 128, 8
EULER_SEED = 20_240_601  # the Euler path starts from noise; a fixed seed makes evaluations repeatable


@dataclass(frozen=True)
class Score:
    """Cross entropy of one reading of a model. The standard error assumes that windows are independent."""

    path: str
    reading: str  # "block 0", …, "last", "combined"
    nats_per_byte: float
    standard_error: float
    num_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats_per_byte / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_byte)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bits_per_byte": self.bits_per_byte, "perplexity": self.perplexity}


@torch.no_grad()
def evaluate(
    model: BlockModel,
    data: NDArray[Any],
    *,
    missing: Collection[int] = (),
    max_windows: int | None = None,
    report: Callable[[int, int], None] | None = None,
) -> list[Score]:
    """Score every reading on all of `data` (or its first windows). Each byte is predicted once."""
    windows = _windows(model, data, max_windows)
    losses: dict[tuple[str, str], list[Tensor]] = {}
    generator = torch.Generator().manual_seed(EULER_SEED)
    for part in torch.split(windows, BATCH_WINDOWS):
        batch = part.to(next(model.parameters()).device).long()
        inputs, targets = batch[:, :-1], batch[:, 1:]
        for path in model.paths:
            readings = model.readings(inputs, path, generator, missing)
            for name, logits in _named(model, path, readings, missing):
                losses.setdefault((path, name), []).append(_window_losses(logits, targets))
        if report:
            report(batch.size(0), len(windows))
    return [_score(path, name, torch.cat(parts), model) for (path, name), parts in losses.items()]


def answer(scores: list[Score]) -> Score:
    """The score of what the model answers with: the composition of its first path."""
    first_path = [score for score in scores if score.path == scores[0].path]
    return first_path[-1]


def fit_combination(model: BlockModel, data: NDArray[Any]) -> dict[str, tuple[float, ...]]:
    """The weights w_k of log p = Σ w_k logits_k + const that predict `data` best, for the model's first path. The
    problem is convex and has one number per block: a few iterations of L-BFGS."""
    if isinstance(model.spec.objective, EndToEnd) or len(model.blocks) == 1:
        return {}
    device = next(model.parameters()).device
    windows = _windows(model, data, FIT_WINDOWS).long().to(device)
    path = model.paths[0]
    batches = torch.split(windows, FIT_BATCH_WINDOWS)
    with torch.no_grad():
        logits_KNV = [torch.stack(model.readings(batch[:, :-1], path)).flatten(1, 2) for batch in batches]
    targets_N = [batch[:, 1:].flatten() for batch in batches]
    num_bytes = sum(map(len, targets_N))
    start = [0.0] * (len(model.blocks) - 1) + [1.0] if path == "stack" else [1 / len(model.blocks)] * len(model.blocks)
    weights = torch.tensor(start, device=device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=30, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for logits, targets in zip(
            logits_KNV, targets_N, strict=True
        ):  # one at a time, to save memory: the gradients add up
            mixed = torch.tensordot(weights, logits, dims=1)
            loss = F.cross_entropy(mixed, targets, reduction="sum") / num_bytes
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return {path: tuple(weights.detach().tolist())}


def _windows(model: BlockModel, data: NDArray[Any], most: int | None) -> Tensor:
    return torch.from_numpy(consecutive_windows(data, model.spec.model.context + 1)[:most].copy())


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
    losses = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="none")
    return losses.view_as(targets_BT).mean(1).cpu().double()


def _score(path: str, name: str, window_losses: Tensor, model: BlockModel) -> Score:
    count = len(window_losses)
    error = window_losses.std().item() / math.sqrt(count) if count > 1 else math.nan
    return Score(path, name, window_losses.mean().item(), error, count * model.spec.model.context)
