"""Traversal: one pass of some text through all blocks of a model, and its result. Decoders ask for traversals, segments
advance them and stages pass them on. No socket and no model here. Next: decode/decoder.py asks for traversals,
segment/segment.py advances them, chain/frames.py turns them into bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Protocol

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer
from blocktrain.errors import ConfigError
from blocktrain.model.kv_cache import TokenIds
from blocktrain.settings import BYTES
from blocktrain.spec import NUM_SYMBOLS, Denoise, RunSpec, Stacked

Wire = Literal["fp32", "fp16", "bf16", "int8"]  # number format of floats between stages
ALL_BLOCKS: tuple[int, ...] = ()  # no block is missing

Name = Annotated[str, Field(min_length=1, max_length=200)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
BlockIndex = Annotated[int, Field(ge=0, lt=2**20)]
Seconds = Annotated[float, Field(ge=0, le=1e7)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Temperature = Annotated[float, Field(ge=0, le=1e6)]
CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False, revalidate_instances="always")  # as a field of a message


@dataclass(frozen=True)
class ModelInfo:
    """What a decoder and a gateway need to know about the model."""

    name: str
    version: str  # names a consistent set of blocks; the same on every stage that serves it
    objective: Literal["stacked", "denoise", "end_to_end"]
    blocks: int
    context: int  # tokens: bytes, unless there is a tokenizer
    longest_sweep: int  # tokens that a denoising sweep may write; 0 if the blocks were not trained on spans
    survives_loss: bool  # the model may answer without some of its blocks
    vocabulary: int = NUM_SYMBOLS
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer, compare=False, repr=False)

    @classmethod
    def of(cls, spec: RunSpec, version: str, tokenizer: Tokenizer | None = None) -> ModelInfo:
        """Without a tokenizer the model must be one on bytes. Raises ConfigError if it is not the model's."""
        objective, tokenizer = spec.objective, tokenizer or ByteTokenizer()
        if tokenizer.sha256 != spec.corpus.tokenizer_sha256 or tokenizer.vocabulary != spec.model.vocabulary:
            raise ConfigError(
                f"the model has the tokenizer {spec.corpus.tokenizer or BYTES} with {spec.model.vocabulary} tokens, "
                f"got {tokenizer.name} with {tokenizer.vocabulary}: give the tokenizer.json of its run"
            )
        return cls(
            name=spec.name,
            version=version,
            objective=objective.kind,
            blocks=spec.model.blocks,
            context=spec.model.context,
            longest_sweep=int(spec.model.context * objective.span_share) if isinstance(objective, Denoise) else 0,
            survives_loss=isinstance(objective, Denoise)
            or (isinstance(objective, Stacked) and objective.state_dropout > 0),
            vocabulary=spec.model.vocabulary,
            tokenizer=tokenizer,
        )

    @property
    def unit(self) -> str:
        """Of lengths, for people."""
        return "bytes" if self.tokenizer.sha256 is None else "tokens"

    @property
    def independent(self) -> bool:
        """Blocks do not read each other's output."""
        return self.objective == "denoise"


@dataclass(frozen=True)
class Draft:
    """Asks the first segment to continue the prompt on its own: `candidates` rows of `length` tokens each."""

    __pydantic_config__ = CHECKED

    length: Annotated[int, Field(ge=0, le=2**16)]
    candidates: Annotated[int, Field(ge=1, le=256)] = 1  # as many as a request may ask for
    seed: Seed = 0
    temperature: Temperature = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    offset: Count = 0  # position of the first drafted token: each random number depends on seed and position


@dataclass(frozen=True)
class Weigh:
    """Asks the last segment to choose one of several drafted rows by its weight under the whole model."""

    __pydantic_config__ = CHECKED

    temperature: Temperature
    seed: Seed
    offset: Count  # as in Draft


@dataclass(frozen=True)
class Verify:
    """Asks the first segment to draft a tree instead of rows, and the last segment to follow it as far as the whole
    model draws the same tokens with the same random numbers."""

    __pydantic_config__ = CHECKED

    temperature: Temperature
    top_p: Annotated[float, Field(ge=0, le=1)]
    seed: Seed
    offset: Count  # as in Draft


@dataclass(frozen=True)
class Piece:
    """Says which columns of the tails are here. The first segment sends columns ahead while it drafts more. The pieces
    of one stream arrive in order. The first piece also carries what belongs to the prompt, the last one what is known
    only at the end."""

    __pydantic_config__ = CHECKED

    stream: Name
    first: Count  # number of columns before these
    total: Annotated[int, Field(ge=1, le=2**16)]  # number of columns in all pieces


@dataclass(frozen=True)
class Noise:
    """Asks the first segment to append noise to the prompt. The blocks turn it into `length` tokens."""

    __pydantic_config__ = CHECKED

    length: Annotated[int, Field(ge=1, le=2**16)]
    seed: Seed


@dataclass(frozen=True)
class StageTiming:
    """The time that one stage spent on a traversal."""

    __pydantic_config__ = CHECKED

    stage: Annotated[str, Field(max_length=300)]
    blocks: tuple[BlockIndex, ...]
    queued_s: Seconds
    computed_s: Seconds
    drafted_s: Seconds = 0.0


@dataclass(frozen=True)
class Traversal:
    """A prompt, and rows of tokens that continue it. There are no rows at first; a draft adds them. V is the size of
    the vocabulary; tokens are bytes and V is 256, unless the model has a tokenizer.

    Stages may hold the first `start` positions of `session` in their KV caches; then only later states travel. A
    segment that does not hold them and cannot rebuild them raises CacheMiss; sending the traversal again with
    start = 0 always works. The text is always whole, so a KV cache changes only the speed, never the result."""

    session: str  # names the KV caches; nothing else depends on it
    prompt: TokenIds  # 1 to context tokens: the window of the text so far
    tails: Tensor | None = None  # [R, N] of token_dtype(V): R rows of N tokens that follow the prompt
    parents: Tensor | None = None  # [R, N] uint8, of a tree: the row of the column before that each token continues
    start: int = 0
    read: int = 1  # number of the prompt's last positions that are read out; tails are read out at every position
    draft: Draft | None = None  # the first segment does it and clears it
    weigh: Weigh | None = None  # the last segment does it and clears it
    verify: Verify | None = None  # the last segment does it and clears it
    piece: Piece | None = None  # which columns of the tails are here, if they come in pieces
    noise: Noise | None = None  # stays set: every block denoises the span
    missing: tuple[int, ...] = ALL_BLOCKS  # blocks to skip
    wire: Wire = "fp32"
    # what one segment passes to the next
    prompt_state: Tensor | None = None  # [1, len(prompt) - start, D], or z [1, T, code width] of a denoising sweep
    tail_state: Tensor | None = None  # [R, N, D]
    prompt_logits: Tensor | None = None  # [read, V]: the weighted logits so far; after the last segment the result
    tail_logits: Tensor | None = None  # [R, N, V]
    draft_log_likelihood: Tensor | None = None  # [R], log q of each of several rows: enough to weigh them
    log_weights: Tensor | None = None  # [R], log p / q of each row, if one of them was chosen
    written: TokenIds | None = None  # what the last segment decided: by denoising, or by following a tree
    degraded: bool = False  # some blocks were missing
    trace: tuple[StageTiming, ...] = ()  # the stages that worked on it, in order

    @property
    def is_last(self) -> bool:
        """No more pieces follow."""
        return self.piece is None or self.tails is None or self.piece.first + self.tails.size(1) == self.piece.total

    def with_(self, **changes: object) -> Traversal:
        return replace(self, **changes)  # type: ignore[arg-type]


class CacheMiss(Exception):
    """The segment holds fewer than `start` positions of the session and cannot compute the missing ones itself."""

    def __init__(self, session: str, start: int, have: int) -> None:
        super().__init__(f"session {session} holds {have} positions here, {start} are needed: send it with start = 0")
        self.session, self.start, self.have = session, start, have


Outcome = Traversal | CacheMiss | ConfigError  # of one traversal in one segment


class Forward(Protocol):
    """A whole model: serve/segment/local.py in this process, serve/chain/pipeline.py over TCP."""

    @property
    def info(self) -> ModelInfo: ...

    async def __call__(self, traversal: Traversal) -> Traversal: ...

    async def forget(self, session: str) -> None:
        """Frees what the session holds and cancels its traversals."""
        ...


def last_present(info: ModelInfo, missing: Collection[int]) -> int:
    return max(index for index in range(info.blocks) if index not in missing)


def block_weight(index: int, info: ModelInfo, weights: Sequence[float] | None, missing: Collection[int]) -> float:
    """A block's weight in the answer, as in BlockModel.combined."""
    if not missing and weights is not None:
        return weights[index]
    if info.independent:
        return 1 / (info.blocks - len(set(missing)))
    return float(index == last_present(info, missing))


def token_dtype(vocabulary: int) -> torch.dtype:
    """Of tokens in tensors."""
    return torch.uint8 if vocabulary <= NUM_SYMBOLS else torch.int32


def check_tokens(t: Traversal, info: ModelInfo) -> None:
    """Raises ConfigError if its tokens or logits are not those of the model's vocabulary."""
    dtype, most = token_dtype(info.vocabulary), info.vocabulary
    for text in (t.prompt, t.written or b""):
        if text and (isinstance(text, bytes) != (dtype == torch.uint8) or not 0 <= min(text) <= max(text) < most):
            raise ConfigError(f"a text with other tokens than 0 to {most - 1} was sent: use the model's own tokenizer")
    if t.tails is not None:
        if t.tails.dim() != 2 or t.tails.dtype != dtype or not t.tails.numel():
            kind = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"tails of {t.tails.dtype} {list(t.tails.shape)} were sent: send {kind} [rows, {info.unit}]"
            )
        if not 0 <= int(t.tails.min()) <= int(t.tails.max()) < most:
            raise ConfigError(f"tails with other tokens than 0 to {most - 1} were sent: use the model's own tokenizer")
    for name in ("prompt_logits", "tail_logits"):
        if (logits := getattr(t, name)) is not None and logits.size(-1) != most:
            raise ConfigError(f"{name} has {logits.size(-1)} columns, the model has {most} tokens: send one per token")


def check_traversal(t: Traversal, info: ModelInfo, upstream: bool) -> None:
    """Raises ConfigError if the traversal does not fit the model. `upstream`: some block before these is present."""
    num_tail = t.tails.size(1) if t.tails is not None else 0
    num_new = t.draft.length if t.draft else t.noise.length if t.noise else t.piece.total if t.piece else num_tail
    length = len(t.prompt) + num_new
    if not t.prompt or length > info.context:
        raise ConfigError(
            f"a prompt of {len(t.prompt)} {info.unit} and {num_new} {info.unit} behind it were sent, the model's "
            f"context is {info.context}: send 1 to {info.context} {info.unit} in all"
        )
    if not (1 <= t.read <= len(t.prompt) and 0 <= t.start <= len(t.prompt) - t.read):
        raise ConfigError(
            f"start = {t.start} and read = {t.read} do not fit a prompt of {len(t.prompt)} {info.unit}: "
            f"read 1 or more of its last positions, and start before them"
        )
    if set(t.missing) >= set(range(info.blocks)):
        raise ConfigError(f"missing names all {info.blocks} blocks: keep at least one")
    if t.noise and not info.longest_sweep:
        raise ConfigError("this model's blocks were not trained on spans: send no noise")
    check_tokens(t, info)
    if t.weigh and not (t.draft and t.draft.candidates > 1 and t.draft.length) and not _is_drafted(t):
        raise ConfigError(
            "weighing rows needs the log-likelihoods of their draft: ask for a draft of several candidates"
        )
    _check_tree(t)
    if t.piece and (t.tails is None or t.tails.size(0) < 2 or t.draft or t.piece.first + num_tail > t.piece.total):
        raise ConfigError("a piece is some columns of several drafted rows: pass on what the previous stage sent")
    if t.draft and (t.tails is not None or upstream or t.draft.candidates < 1 or t.draft.length < 0):
        raise ConfigError("only the first segment drafts, 1 or more candidates, and only if no tails are given")


def _check_tree(t: Traversal) -> None:
    if t.verify and (t.weigh or (not t.draft and t.tails is not None and t.parents is None)):
        raise ConfigError("verifying needs a tree, which the first segment drafts: send it with a draft and no weigh")
    if t.parents is not None and not (
        t.verify
        and t.tails is not None
        and t.parents.dtype == torch.uint8
        and t.parents.shape == t.tails.shape
        and int(t.parents.max()) < t.tails.size(0)
    ):
        raise ConfigError(
            f"parents of {t.parents.dtype} {list(t.parents.shape)} were sent: send uint8 with the shape of the tails, "
            f"each the number of a row"
        )


def _is_drafted(t: Traversal) -> bool:
    """The rows can be weighed, or will be when their last piece arrives."""
    return t.tails is not None and (t.draft_log_likelihood is not None or not t.is_last)


def check_states(t: Traversal, width: int) -> None:
    expected = [None if t.piece and t.piece.first else (1, len(t.prompt) - t.start, width)]
    got = [None if t.prompt_state is None else tuple(t.prompt_state.shape)]
    if t.tails is not None:
        expected.append((*t.tails.shape, width))
        got.append(None if t.tail_state is None else tuple(t.tail_state.shape))
    if got != expected:
        raise ConfigError(f"states have shapes {got}, expected {expected}: pass on what the previous stage sent")
