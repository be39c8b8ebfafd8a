"""What somebody wants written, and how: checked at birth, and against the model that is to write it. Also what a
decoder gives back. No decoding here. Next: decode.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from blocktrain.errors import ConfigError
from blocktrain.serve.decode.mode import Mode
from blocktrain.serve.traversal import ModelInfo, Traversal

MAX_CANDIDATES = 256
DEFAULT_CANDIDATES = 8


@dataclass(frozen=True)
class Request:
    """`draft_bytes` is how much is drafted for one traversal: None adapts it (speculative) or takes as much as fits
    (sweep). `candidates` is for a sweep that drafts and weighs; None takes 8, or the denoising sweep where the model
    was trained for it."""

    prompt: bytes
    max_bytes: int = 200
    mode: Mode = Mode.AUTOREGRESSIVE
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    candidates: int | None = None
    draft_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in list(Mode):
            raise ConfigError(f'there is no mode "{self.mode}": choose one of {", ".join(Mode)}')
        object.__setattr__(self, "mode", Mode(self.mode))
        if self.max_bytes < 1:
            raise ConfigError(f"max_bytes = {self.max_bytes} is too small: give 1 or more")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature = {self.temperature} is out of range: give 0 or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p = {self.top_p} is out of range: give more than 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed = {self.seed} is out of range: give 0 to 2^63 - 1")
        if self.candidates is not None and not 1 <= self.candidates <= MAX_CANDIDATES:
            raise ConfigError(f"candidates = {self.candidates} is out of range: give 1 to {MAX_CANDIDATES}")
        if self.draft_bytes is not None and self.draft_bytes < 1:
            raise ConfigError(f"draft_bytes = {self.draft_bytes} is too small: give 1 or more")
        if self.candidates is not None and self.mode is not Mode.SWEEP:
            raise ConfigError(f"mode {self.mode} has no candidates: leave them out, or take mode sweep")
        if self.draft_bytes is not None and self.mode is Mode.AUTOREGRESSIVE:
            raise ConfigError("mode autoregressive drafts nothing: leave draft_bytes out, or take mode speculative")


def check(request: Request, info: ModelInfo) -> None:
    """Whether this model can do it. Raises ConfigError."""
    if request.draft_bytes is not None and request.draft_bytes >= info.context:
        raise ConfigError(
            f"draft_bytes = {request.draft_bytes} does not fit behind a prompt in the model's context of "
            f"{info.context} bytes: give at most {info.context - 1}"
        )
    if denoises(request, info) and (request.temperature != 1 or request.top_p != 1):
        raise ConfigError(
            f"a denoising sweep knows no temperature or top_p, got {request.temperature} and {request.top_p}: "
            f"leave them at 1, or give candidates to draft and weigh instead"
        )


def denoises(request: Request, info: ModelInfo) -> bool:
    """Whether the request is for the sweep that turns noise into bytes."""
    return request.mode is Mode.SWEEP and info.longest_sweep > 0 and request.candidates is None


@dataclass(frozen=True)
class WrittenByte:
    """A byte of the output and the whole model's logits there, where the mode knows them."""

    value: int
    logits: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def log_probability(self) -> float | None:
        """Under the model as it is: at temperature 1, with nothing cut."""
        return None if self.logits is None else float(self.logits.double().log_softmax(-1)[self.value])

    def likeliest(self, count: int) -> list[tuple[int, float]]:
        """(byte, log-probability) of the likeliest ones."""
        if self.logits is None:
            return []
        values, order = self.logits.double().log_softmax(-1).topk(count)
        return list(zip(order.tolist(), values.tolist(), strict=True))


@dataclass
class DecodeStats:
    """What it took so far."""

    traversals: int = 0
    written: int = 0
    drafted: int = 0  # bytes, of all candidates
    accepted: int = 0  # drafted bytes that were written
    draft_s: float = 0.0
    seconds: float = 0.0
    effective_candidates: float | None = None  # of the last weighing: 1 / Σ share²
    degraded: bool = False

    @property
    def bytes_per_traversal(self) -> float:
        return self.written / max(1, self.traversals)


class Decoder(Protocol):
    """Asks for traversals and is told their results: the same for one process and for a network."""

    stats: DecodeStats

    def ask(self) -> Traversal | None:
        """What to compute next; None when all is written."""
        ...

    def tell(self, reply: Traversal, seconds: float) -> list[WrittenByte]:
        """What came of it, and how long it took. The bytes this decided."""
        ...
