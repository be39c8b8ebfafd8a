"""Traversal: one walk of some text through all blocks of a model, and what it brings back. The one value that decoders
ask for, segments advance and stages pass on; no socket, no model. Next: segment.py advances it, decode.py asks for it,
frames.py makes bytes of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from blocktrain.errors import ConfigError

Wire = Literal["fp32", "fp16", "bf16", "int8"]  # how floats travel between stages
WHOLE: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelInfo:
    """What a decoder and a gateway must know of the model behind a forward."""

    name: str
    version: str  # of a consistent set of blocks: the same on every stage that serves it
    objective: Literal["stacked", "denoise", "end_to_end"]
    blocks: int
    context: int
    longest_sweep: int  # bytes a denoising sweep may write; 0 where the blocks were not trained on spans
    survives_loss: bool  # trained with state dropout: may answer without a stage

    @property
    def independent(self) -> bool:
        """Blocks do not read each other's output: all may be asked at once."""
        return self.objective == "denoise"


@dataclass(frozen=True)
class Draft:
    """Let the first segment continue the prompt on its own, `candidates` times, `length` bytes each."""

    length: int
    candidates: int = 1
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    offset: int = 0  # of the first drafted byte in the whole text: its random number is a function of seed and place


@dataclass(frozen=True)
class Weigh:
    """Let the last segment choose one of several drafted rows by its weight under the whole model."""

    temperature: float
    seed: int
    offset: int  # as a draft's


@dataclass(frozen=True)
class Piece:
    """Some columns of the tails, sent ahead while the first segment drafts on. The pieces of a stream come in order,
    the first with all that belongs to the prompt, the last with all that is known only at the end."""

    stream: str
    first: int  # columns before these
    total: int  # columns in all


@dataclass(frozen=True)
class Noise:
    """Let the first segment put noise behind the prompt, for the blocks to turn into `length` bytes as they pass."""

    length: int
    seed: int


@dataclass(frozen=True)
class Traversal:
    """A prompt, and rows of bytes that continue it (none to start with; a draft adds them).

    Stages may hold the first `start` positions of `session` in their caches, so that only later states travel; one
    that does not and cannot rebuild them raises CacheMiss, and the same traversal with start = 0 mends it. The text is
    always whole, so a cache never decides what is computed, only how fast."""

    session: str  # names the caches; nothing else depends on it
    prompt: bytes  # 1 to context bytes, the window of the text so far
    tails: Tensor | None = None  # [R, N] uint8: R rows of N bytes that follow the prompt
    start: int = 0
    read: int = 1  # how many of the prompt's last positions are read out; the tails are read at every position
    draft: Draft | None = None  # done and cleared by the first segment
    weigh: Weigh | None = None  # done and cleared by the last segment
    piece: Piece | None = None  # what is here of the tails, where they come in pieces
    noise: Noise | None = None  # stays: the span is denoised by every block
    missing: tuple[int, ...] = WHOLE  # blocks to do without
    wire: Wire = "fp32"
    # what one segment hands to the next
    prompt_state: Tensor | None = None  # [1, len(prompt) - start, D], or z [1, T, 256] of a sweep
    tail_state: Tensor | None = None  # [R, N, D]
    prompt_logits: Tensor | None = None  # [read, 256]: the weighted evidence so far, after the last segment the answer
    tail_logits: Tensor | None = None  # [R, N, 256]
    draft_prompt_logits: Tensor | None = None  # [256], of the first segment alone where it drafted
    draft_tail_logits: Tensor | None = None  # [1, N, 256], of a single row
    draft_log_likelihood: Tensor | None = None  # [R], log q of each of several rows: all that weighing them needs
    shares: Tensor | None = None  # [R], the chances that the rows had, where one of them was chosen
    written: bytes | None = None  # by a sweep, after the last segment
    degraded: bool = False  # some stage was missing
    trace: tuple[Hop, ...] = ()  # who worked on it, for how long

    @property
    def is_last(self) -> bool:
        """Nothing more of it will come."""
        return self.piece is None or self.tails is None or self.piece.first + self.tails.size(1) == self.piece.total

    def with_(self, **changes: object) -> Traversal:
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Hop:
    """One stage's share of a traversal."""

    stage: str
    blocks: tuple[int, ...]
    queued_s: float
    computed_s: float
    drafted_s: float = 0.0


class CacheMiss(Exception):
    """A segment holds fewer than `start` positions of the session and needs the states of the earlier ones."""

    def __init__(self, session: str, start: int, have: int) -> None:
        super().__init__(f"session {session} holds {have} positions here, {start} expected: send it with start = 0")
        self.session, self.start, self.have = session, start, have


class Forward(Protocol):
    """A whole model, wherever its blocks are: serve/segment/segment.py in this process, serve/chain/pipeline.py over
    TCP."""

    @property
    def info(self) -> ModelInfo: ...

    async def __call__(self, traversal: Traversal) -> Traversal: ...

    async def forget(self, session: str) -> None:
        """Free what the session holds; its work still under way is given up."""
        ...


ForwardCall = Callable[[Traversal], Awaitable[Traversal]]


def last_present(info: ModelInfo, missing: Collection[int]) -> int:
    return max(index for index in range(info.blocks) if index not in missing)


def check_traversal(t: Traversal, info: ModelInfo, upstream: bool) -> None:
    """What anybody may send. Raises ConfigError."""
    num_tail = t.tails.size(1) if t.tails is not None else 0
    num_new = t.draft.length if t.draft else t.noise.length if t.noise else t.piece.total if t.piece else num_tail
    length = len(t.prompt) + num_new
    if not t.prompt or length > info.context:
        raise ConfigError(
            f"a prompt of {len(t.prompt)} bytes and {num_new} bytes behind it were sent, the model's context is "
            f"{info.context}: send 1 to {info.context} bytes in all"
        )
    if not (1 <= t.read <= len(t.prompt) and 0 <= t.start <= len(t.prompt) - t.read):
        raise ConfigError(
            f"start = {t.start} and read = {t.read} do not fit a prompt of {len(t.prompt)} bytes: "
            f"read 1 or more of its last positions, and start before them"
        )
    if set(t.missing) >= set(range(info.blocks)):
        raise ConfigError(f"missing names all {info.blocks} blocks: leave one in")
    if t.noise and not info.longest_sweep:
        raise ConfigError("this model's blocks were not trained on spans: send no noise")
    if t.tails is not None and (t.tails.dim() != 2 or t.tails.dtype != torch.uint8 or not t.tails.numel()):
        raise ConfigError(f"tails of {t.tails.dtype} {list(t.tails.shape)} were sent: send uint8 [rows, bytes]")
    if t.weigh and not (t.draft and t.draft.candidates > 1 and t.draft.length) and not _is_drafted(t):
        raise ConfigError("rows are weighed with the log-likelihoods of their draft: ask for a draft of several")
    if t.piece and (t.tails is None or t.tails.size(0) < 2 or t.draft or t.piece.first + num_tail > t.piece.total):
        raise ConfigError("a piece is some columns of several drafted rows: pass on what the stage before gave")
    if t.draft and (t.tails is not None or upstream or t.draft.candidates < 1 or t.draft.length < 0):
        raise ConfigError("a draft is made by the first segment, for 1 or more candidates, where no tails are given")


def _is_drafted(t: Traversal) -> bool:
    """Whether the rows can be weighed, or their last piece will bring what is needed."""
    return t.tails is not None and (t.draft_log_likelihood is not None or not t.is_last)


def check_states(t: Traversal, width: int) -> None:
    expected = [None if t.piece and t.piece.first else (1, len(t.prompt) - t.start, width)]
    got = [None if t.prompt_state is None else tuple(t.prompt_state.shape)]
    if t.tails is not None:
        expected.append((*t.tails.shape, width))
        got.append(None if t.tail_state is None else tuple(t.tail_state.shape))
    if got != expected:
        raise ConfigError(f"states of shapes {got} came, {expected} were expected: pass on what the stage before gave")
