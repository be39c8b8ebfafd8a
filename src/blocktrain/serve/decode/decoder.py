"""The decoders: four ways to continue a prompt. A decoder asks for traversals and takes their results; `decode`
connects it to a model. No socket. Next: traversal.py is what they ask for; segment/sampling.py draws tokens and
chooses rows."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blocktrain.model.kv_cache import TokenIds, common_prefix, joined, token_ids
from blocktrain.model.stack import EMPTY_PROMPT, draw, window_start
from blocktrain.serve.decode.request import (
    DEFAULT_CANDIDATES,
    TREE_ROWS,
    Decoder,
    DecodeStats,
    Mode,
    Request,
    WrittenToken,
    check,
    denoises,
)
from blocktrain.serve.segment.sampling import before_each, divergence_bound, effective_candidates
from blocktrain.serve.traversal import Draft, Forward, ModelInfo, Noise, Traversal, Verify, Weigh

FIRST_DRAFT_TOKENS = 32  # before anything is measured
LONGEST_DRAFT_TOKENS = 64
SWEEP_TREE_COLUMNS = 64  # of the exact part of a sweep
RANKED_TEMPERATURE = 0.3  # of drafted candidates when the most likely one is wanted


@dataclass(frozen=True)
class Step:
    """The tokens that one traversal decided. `stats` are those of the whole output so far."""

    written: Sequence[WrittenToken]
    stats: DecodeStats


async def decode(forward: Forward, request: Request) -> AsyncGenerator[Step, None]:
    """One step per traversal. Close it (contextlib.aclosing) to stop early: the stages then forget the session."""
    session = uuid.uuid4().hex
    decoder = decoder_of(request, forward.info, session)
    try:
        while (traversal := decoder.ask()) is not None:
            began_s = time.perf_counter()
            reply = await forward(traversal)
            yield Step(decoder.take(reply, time.perf_counter() - began_s), decoder.stats)
    finally:
        await forward.forget(session)


def decoder_of(request: Request, info: ModelInfo, session: str) -> Decoder:
    check(request, info)
    if request.mode is Mode.AUTOREGRESSIVE:
        return Autoregressive(request, info, session)
    if request.mode is Mode.SPECULATIVE:
        return Speculative(request, info, session)
    kind = DenoisingSweep if denoises(request, info) else WeighedSweep
    return kind(request, info, session)


class TextDecoder:
    """What the decoders share: the text so far, what the KV caches hold of it, and the costs."""

    def __init__(self, request: Request, info: ModelInfo, session: str) -> None:
        self.request, self.info, self.stats = request, info, DecodeStats()
        self._session = session
        self._prompt: TokenIds = token_ids(info.tokenizer.encode(request.prompt).tolist(), info.vocabulary)
        self._text = list(self._prompt or info.tokenizer.encode(EMPTY_PROMPT).tolist())
        self._cached: TokenIds = b""
        self._columns = 0  # of the tree that was asked for last

    @property
    def _candidates(self) -> int:
        return self.request.candidates or DEFAULT_CANDIDATES

    @property
    def _left(self) -> int:
        return self.request.max_tokens - self.stats.written

    def _window(self) -> TokenIds:
        """The part of the text that the model sees."""
        return self._end(window_start(len(self._text), self.info.context))

    def _end(self, start: int) -> TokenIds:
        return token_ids(self._text[start:], self.info.vocabulary)

    def _traversal(self, prompt: TokenIds, **settings: Any) -> Traversal:
        start = min(common_prefix(self._cached, prompt), len(prompt) - 1)
        return Traversal(self._session, prompt, start=start, **settings)

    def _count(self, reply: Traversal, seconds: float) -> None:
        if not self.stats.traversals:
            unread = self._prompt[: max(0, len(self._prompt) - len(reply.prompt))]
            self.stats.prompt_bytes_unread = len(self.info.tokenizer.decode(unread))
        self.stats.traversals += 1
        self.stats.seconds += seconds
        self.stats.draft_s += sum(stage.drafted_s for stage in reply.trace)
        self.stats.degraded |= reply.degraded
        single = reply.tails is not None and reply.log_weights is None and reply.written is None  # not one of several
        tail = reply.tails[0].tolist() if single and reply.tails is not None else []
        self._cached = joined(reply.prompt, token_ids(tail, self.info.vocabulary))

    def _write(self, written: list[WrittenToken]) -> list[WrittenToken]:
        written = written[: self._left]
        self._text += [token.value for token in written]
        self.stats.written += len(written)
        return written


class Autoregressive(TextDecoder):
    """One token per traversal. Writes the tokens of BlockModel.generate with the same seed."""

    def __init__(self, request: Request, info: ModelInfo, session: str) -> None:
        super().__init__(request, info, session)
        self._generator = torch.Generator().manual_seed(request.seed)

    def ask(self) -> Traversal | None:
        return self._traversal(self._window()) if self._left else None

    def take(self, reply: Traversal, seconds: float) -> list[WrittenToken]:
        self._count(reply, seconds)
        assert reply.prompt_logits is not None
        logits = reply.prompt_logits[-1].cpu()
        value = draw(logits, self._generator, self.request.temperature, self.request.top_p)
        self.stats.exact += 1
        return self._write([WrittenToken(value, logits)])


class TreeDecoder(TextDecoder):
    """Asks for a tree of drafts and takes what the whole model draws. The model draws every token itself, with noise
    that is a function of the seed and the position (Gumbel coupling). The first segment knows the noise too, so it
    drafts what the model will probably draw. Drafts change the number of traversals and never the output."""

    def _tree(self, columns: int, rows: int) -> Traversal:
        prompt, request = self._window(), self.request
        longest = min(self._left - 1, self.info.context - len(prompt))  # a draft never crosses a move of the window
        settings, offset = (request.temperature, request.top_p), len(self._text)
        self._columns = min(columns, longest)
        draft = Draft(self._columns, rows, request.seed, *settings, offset)
        return self._traversal(prompt, draft=draft, verify=Verify(*settings, request.seed, offset))

    def _drawn(self, reply: Traversal) -> list[WrittenToken]:
        assert reply.written is not None
        self.stats.drafted += self._columns
        self.stats.accepted += len(reply.written) - 1
        logits = _at_all_places(reply.prompt_logits, reply.tail_logits)
        written = self._write([WrittenToken(*each) for each in zip(reply.written, logits, strict=False)])
        self.stats.exact += len(written)
        return written


class Speculative(TreeDecoder):
    """Lossless speculative decoding: the first segment drafts a tree of k columns, and one traversal decides up to
    k + 1 tokens. k depends on measured times."""

    def __init__(self, request: Request, info: ModelInfo, session: str) -> None:
        super().__init__(request, info, session)
        self._pace = Pace()

    def ask(self) -> Traversal | None:
        if not self._left:
            return None
        rows = self.request.candidates or TREE_ROWS
        return self._tree(self.request.draft_tokens or self._pace.draft_tokens(), rows)

    def take(self, reply: Traversal, seconds: float) -> list[WrittenToken]:
        self._count(reply, seconds)
        written = self._drawn(reply)
        draft_s, decided = sum(stage.drafted_s for stage in reply.trace), len(reply.written or ())
        left_tree = int(decided <= self._columns)  # otherwise nobody knows how far the tree would have been right
        self._pace.measured(decided - 1, decided - 1 + left_tree, self._columns, draft_s, seconds - draft_s)
        return written


class DenoisingSweep(TextDecoder):
    """All positions start as noise, and every block denoises them. Writes the tokens of BlockModel.sweep with the
    same seed. An output that is longer than the spans of the training takes several sweeps."""

    def ask(self) -> Traversal | None:
        if not self._left:
            return None
        length = min(self._left, self.info.longest_sweep, self.request.draft_tokens or self._left)
        prompt = self._end(-(self.info.context - length))
        return Traversal(self._session, prompt, noise=Noise(length, self.request.seed + self.stats.traversals))

    def take(self, reply: Traversal, seconds: float) -> list[WrittenToken]:
        self._count(reply, seconds)
        assert reply.written is not None
        return self._write([WrittenToken(value) for value in reply.written])


class WeighedSweep(TreeDecoder):
    """First a tree, which is exact as far as it goes, as in speculative decoding. Then the first segment drafts M
    candidates of all that follows, all blocks score them in one traversal, and one is drawn by its weight p / q:
    sampling importance resampling (Rubin 1987). As M grows this becomes sampling from the whole model. Temperature 0
    takes the candidate that the whole model finds most likely. One candidate is the first segment's text alone.

    The weights of long outputs are very unequal, so the best candidate nearly always wins (stats.effective_candidates
    says how many count). `draft_tokens` cuts what follows into several sweeps, each weighed on its own. top_p applies
    to the draft."""

    def ask(self) -> Traversal | None:
        if not self._left:
            return None
        request, context = self.request, self.info.context
        if not self.stats.traversals and self._candidates > 1:
            return self._tree(SWEEP_TREE_COLUMNS, self._candidates)
        room = context - min(len(self._text), context // 2)  # the model sees at least half a context of the text
        length = min(self._left, room, request.draft_tokens or room)
        prompt = self._end(-(context - length))
        draft = Draft(length, self._candidates, request.seed, self._draft_temperature, request.top_p, len(self._text))
        weigh = Weigh(request.temperature, request.seed, len(self._text)) if self._candidates > 1 else None
        return self._traversal(prompt, draft=draft, weigh=weigh)

    def take(self, reply: Traversal, seconds: float) -> list[WrittenToken]:
        self._count(reply, seconds)
        if reply.written is not None:
            return self._drawn(reply)
        assert reply.tails is not None
        logits = before_each(reply.prompt_logits, reply.tail_logits)[0]
        self.stats.drafted += self._candidates * reply.tails.size(1)
        self.stats.accepted += reply.tails.size(1)
        if reply.log_weights is not None:
            self.stats.effective_candidates = effective_candidates(reply.log_weights.double().softmax(-1))
            if self.request.temperature:
                self.stats.divergence_nats += divergence_bound(reply.log_weights.double())
        return self._write([WrittenToken(*each) for each in zip(reply.tails[0].tolist(), logits, strict=True)])

    @property
    def _draft_temperature(self) -> float:
        if self.request.temperature == 0 and self._candidates > 1:
            return RANKED_TEMPERATURE
        return self.request.temperature


class Pace:
    """Chooses the length of drafts from measured times and acceptance. Recent traversals count more."""

    DECAY = 0.9  # of earlier measurements, per traversal

    def __init__(self) -> None:
        self._good, self._tried = 9.5, 10.0  # as if 19 of 20 drafted columns had been accepted
        self._traversal_s: float | None = None
        self._token_s: float | None = None

    def measured(self, good: int, tried: int, drafted: int, draft_s: float, traversal_s: float) -> None:
        self._good = self._good * self.DECAY + good
        self._tried = self._tried * self.DECAY + tried
        self._traversal_s = self._smooth(self._traversal_s, traversal_s)
        if drafted:
            self._token_s = self._smooth(self._token_s, draft_s / drafted)

    def _smooth(self, before: float | None, now: float) -> float:
        return now if before is None else self.DECAY * before + (1 - self.DECAY) * now

    def draft_tokens(self) -> int:
        if self._traversal_s is None or self._token_s is None:
            return FIRST_DRAFT_TOKENS
        return best_draft_tokens(self._good / self._tried, self._token_s, self._traversal_s)


def best_draft_tokens(acceptance: float, token_s: float, traversal_s: float) -> int:
    """The k that writes the most tokens per second: (1 - a^(k + 1)) / (1 - a) tokens in traversal_s + k · token_s."""

    def tokens_per_s(k: int) -> float:
        expected = sum(acceptance**place for place in range(k + 1))
        return expected / max(traversal_s + k * token_s, 1e-9)

    return max(range(1, LONGEST_DRAFT_TOKENS + 1), key=tokens_per_s)


def _at_all_places(prompt_logits: Tensor | None, tail_logits: Tensor | None) -> Tensor:
    """[k + 1, V]: the logits of the first new token, and those behind each drafted token."""
    assert prompt_logits is not None
    first = prompt_logits.view(-1, prompt_logits.size(-1))[-1:].cpu().float()
    return first if tail_logits is None else torch.cat([first, tail_logits[0].cpu().float()])
