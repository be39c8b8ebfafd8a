"""What a caller asks of a decoder, and what it gets back: tokens, text and costs. Settings are checked when the request
is made and against the model. No decoding and no torch here, so that a command's help is fast. Next: decoder.py."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from blocktrain.errors import ConfigError
from blocktrain.sampling_settings import check_sampling

if TYPE_CHECKING:
    from torch import Tensor

    from blocktrain.serve.traversal import ModelInfo, Traversal

MAX_CANDIDATES = 256
DEFAULT_CANDIDATES = 8  # of a sweep
TREE_ROWS = 4  # of speculative decoding: more take longer to score than they save
MAX_ROW_BYTES = 2**16  # of all candidates of a sweep, with their prompt: each token costs the stages memory


class Mode(StrEnum):
    AUTOREGRESSIVE = "autoregressive"
    SPECULATIVE = "speculative"
    SWEEP = "sweep"


@dataclass(frozen=True)
class Request:
    """A token is a byte unless the model has a tokenizer. The prompt is text. Errors name the options `--max-bytes` and
    `--draft-bytes`.

    `draft_tokens` is how much is drafted for one traversal. None adapts it (speculative) or takes as much as fits
    (sweep). `candidates` is how many tokens are drafted for each position: the rows of a tree (speculative), or of a
    sweep that drafts and weighs. None takes 4 or 8, or the denoising sweep if the model was
    trained for it."""

    prompt: bytes
    max_tokens: int = 200
    mode: Mode = Mode.AUTOREGRESSIVE
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    candidates: int | None = None
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in list(Mode):
            raise ConfigError(f'there is no mode "{self.mode}": choose one of {", ".join(Mode)}')
        object.__setattr__(self, "mode", Mode(self.mode))
        check_sampling(self.max_tokens, self.temperature, self.top_p, self.seed)
        if self.candidates is not None and not 1 <= self.candidates <= MAX_CANDIDATES:
            raise ConfigError(f"candidates = {self.candidates} is out of range: give 1 to {MAX_CANDIDATES}")
        if self.draft_tokens is not None and self.draft_tokens < 1:
            raise ConfigError(f"draft_bytes = {self.draft_tokens} is too small: give 1 or more")
        if self.candidates is not None and self.mode is Mode.AUTOREGRESSIVE:
            raise ConfigError(
                f"mode {self.mode} has no candidates: leave them out, or choose mode speculative or sweep"
            )
        if self.draft_tokens is not None and self.mode is Mode.AUTOREGRESSIVE:
            raise ConfigError("mode autoregressive drafts nothing: leave draft_bytes out, or choose mode speculative")


def check(request: Request, info: ModelInfo) -> None:
    """Raises ConfigError if the model cannot do it."""
    if request.draft_tokens is not None and request.draft_tokens >= info.context:
        raise ConfigError(
            f"draft_bytes = {request.draft_tokens} does not fit behind a prompt in the model's context of "
            f"{info.context} {info.unit}: give at most {info.context - 1}"
        )
    prompt = len(info.tokenizer.encode(request.prompt)) if request.candidates is not None else 0
    window = min(info.context, prompt + min(request.max_tokens, request.draft_tokens or request.max_tokens))
    if request.candidates is not None and request.candidates > (most := max(1, MAX_ROW_BYTES // window)):
        raise ConfigError(
            f"candidates = {request.candidates} of {window} {info.unit} each are too many for the memory of the "
            f"stages: give at most {most}, or fewer {info.unit}"
        )
    if denoises(request, info) and (request.temperature != 1 or request.top_p != 1):
        raise ConfigError(
            f"a denoising sweep has no temperature or top_p, got {request.temperature} and {request.top_p}: "
            f"leave them at 1, or give candidates to draft and weigh instead"
        )


def denoises(request: Request, info: ModelInfo) -> bool:
    """The request is for the sweep that turns noise into tokens."""
    return request.mode is Mode.SWEEP and info.longest_sweep > 0 and request.candidates is None


@dataclass(frozen=True)
class WrittenToken:
    """One token of the output, and the whole model's logits for it if the mode computes them."""

    value: int
    logits: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def log_probability(self) -> float | None:
        """Under the unchanged model: temperature 1, no top_p."""
        return None if self.logits is None else float(self.logits.double().log_softmax(-1)[self.value])

    def likeliest(self, count: int) -> list[tuple[int, float]]:
        """The `count` most probable tokens with their log-probabilities."""
        if self.logits is None:
            return []
        values, order = self.logits.double().log_softmax(-1).topk(count)
        return list(zip(order.tolist(), values.tolist(), strict=True))


@dataclass
class DecodeStats:
    """Costs of an output so far."""

    traversals: int = 0
    written: int = 0  # tokens
    drafted: int = 0  # tokens, of all candidates
    accepted: int = 0  # drafted tokens that were written
    exact: int = 0  # tokens that were drawn from the whole model's own distribution
    divergence_nats: float = 0.0  # of the weighings: see divergence_bound in segment/sampling.py
    draft_s: float = 0.0
    seconds: float = 0.0
    effective_candidates: float | None = None  # of the last weighing: 1 / Σ share²
    degraded: bool = False
    prompt_bytes_unread: int = 0  # at the start of a prompt that is longer than what the model reads


class TextStream:
    """Takes bytes as they come and returns the characters that are certain. It holds back what may still become a stop
    string; after a stop string it returns nothing more. Bytes that are not UTF-8 become �."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped_by: str | None = None
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def feed(self, data: bytes | Iterable[int]) -> str:
        return self._take(self._decoder.decode(bytes(data)))

    def finish(self) -> str:
        """The rest, when no more bytes come: what was held back, and � for an incomplete character."""
        certain = self._take(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return certain + rest

    def _take(self, characters: str) -> str:
        if self.stopped_by is not None:
            return ""
        if not self._stop:
            return characters
        certain = []
        for character in characters:
            self._held += character
            if found := self._completed():
                self.stopped_by = found
                certain.append(self._held[: -len(found)])
                self._held = ""
                break
            safe = len(self._held) - self._open()
            certain.append(self._held[:safe])
            self._held = self._held[safe:]
        return "".join(certain)

    def _completed(self) -> str | None:
        """The longest stop string that ends here."""
        return max((stop for stop in self._stop if stop and self._held.endswith(stop)), key=len, default=None)

    def _open(self) -> int:
        """How many of the held characters may begin a stop string."""
        longest = max(map(len, self._stop), default=0)
        starts = range(max(0, len(self._held) - longest + 1), len(self._held))
        return next((len(self._held) - at for at in starts if self._may_become_stop(self._held[at:])), 0)

    def _may_become_stop(self, ending: str) -> bool:
        return any(stop.startswith(ending) for stop in self._stop)


class Decoder(Protocol):
    """Asks for traversals and takes their results. It does not know whether the model is in this process."""

    stats: DecodeStats

    def ask(self) -> Traversal | None:
        """The next traversal to compute, or None when the output is complete."""
        ...

    def take(self, reply: Traversal, seconds: float) -> list[WrittenToken]:
        """Takes the result of the traversal and the time it took. Returns the tokens that it decided."""
        ...
