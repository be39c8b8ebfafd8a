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
    Decoder,
    DecodeStats,
    Mode,
    Request,
    WrittenToken,
    check,
    denoises,
)
from blocktrain.serve.segment.sampling import (
    ACCEPT,
    DRAFT,
    REPLACE,
    before_each,
    effective_candidates,
    pick,
    probabilities,
    uniforms,
)
from blocktrain.serve.traversal import Draft, Forward, ModelInfo, Noise, Traversal, Weigh

FIRST_DRAFT_BYTES = 8  # before anything is measured
LONGEST_DRAFT_BYTES = 64
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

    @property
    def _left(self) -> int:
        return self.request.max_bytes - self.stats.written

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
        single = reply.tails is not None and reply.tails.size(0) == 1 and reply.shares is None  # not one of several
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
        return self._write([WrittenToken(value, logits)])


class Speculative(TextDecoder):
    """Lossless speculative decoding (Leviathan et al. 2023): the first segment drafts k tokens, one traversal
    checks them all.

    Every token is a function of the seed, its position and the two distributions there. So k, which depends on measured
    times, changes the number of traversals and not the output."""

    def __init__(self, request: Request, info: ModelInfo, session: str) -> None:
        super().__init__(request, info, session)
        self._pace = Pace()

    def ask(self) -> Traversal | None:
        if not self._left:
            return None
        prompt, request = self._window(), self.request
        longest = min(self._left - 1, self.info.context - len(prompt))  # a draft never crosses a move of the window
        length = min(request.draft_bytes or self._pace.draft_bytes(), longest)
        settings = (request.temperature, request.top_p, len(self._text))
        return self._traversal(prompt, draft=Draft(length, 1, request.seed, *settings))

    def take(self, reply: Traversal, seconds: float) -> list[WrittenToken]:
        self._count(reply, seconds)
        logits = _at_all_places(reply.prompt_logits, reply.tail_logits)
        model, drafter = (
            probabilities(each, self.request.temperature, self.request.top_p)
            for each in (logits, _at_all_places(reply.draft_prompt_logits, reply.draft_tail_logits))
        )
        places, seed = len(logits), self.request.seed
        drawn, accept, replace = (
            uniforms(seed, stream, 1, len(self._text), places)[0] for stream in (DRAFT, ACCEPT, REPLACE)
        )
        one_more = pick(drafter[-1:], drawn[-1:])  # the last place was not drafted: draw it here in the same way
        drafted = one_more if reply.tails is None else torch.cat([reply.tails[0].long().cpu(), one_more])
        written, kept = speculate(model, drafter, drafted, accept, replace)
        self._measure(kept, len(written), places - 1, reply, seconds)
        return self._write([WrittenToken(value, logits[at]) for at, value in enumerate(written)])

    def _measure(self, kept: int, decided: int, drafted: int, reply: Traversal, seconds: float) -> None:
        self.stats.drafted += drafted
        self.stats.accepted += min(kept, drafted)
        draft_s = sum(stage.drafted_s for stage in reply.trace)
        self._pace.measured(kept, decided, drafted, draft_s, seconds - draft_s)


class DenoisingSweep(TextDecoder):
    """All positions start as noise, and every block denoises them. Writes the tokens of BlockModel.sweep with the
    same seed. An output that is longer than the spans of the training takes several sweeps."""

    def ask(self) -> Traversal | None:
        if not self._left:
            return None
        length = min(self._left, self.info.longest_sweep, self.request.draft_bytes or self._left)
        prompt = self._end(-(self.info.context - length))
        return Traversal(self._session, prompt, noise=Noise(length, self.request.seed + self.stats.traversals))

    def take(self, reply: Traversal, seconds: float) -> list[WrittenToken]:
        self._count(reply, seconds)
        assert reply.written is not None
        return self._write([WrittenToken(value) for value in reply.written])


class WeighedSweep(TextDecoder):
    """The first segment drafts M candidates of the whole output, all blocks score them in one traversal, and one is
    drawn by its weight p / q: sampling importance resampling (Rubin 1987). As M grows this becomes sampling from the
    whole model. Temperature 0 takes the candidate that the whole model finds most likely.

    The weights of long outputs are very unequal, so the best candidate nearly always wins (stats.effective_candidates
    says how many count). `draft_bytes` cuts the output into several sweeps, each weighed on its own. top_p applies to
    the draft."""

    def ask(self) -> Traversal | None:
        if not self._left:
            return None
        request, context = self.request, self.info.context
        room = context - min(len(self._text), context // 2)  # the model sees at least half a context of the text
        length = min(self._left, room, request.draft_bytes or room)
        prompt = self._end(-(context - length))
        draft = Draft(length, self._candidates, request.seed, self._draft_temperature, request.top_p, len(self._text))
        weigh = Weigh(request.temperature, request.seed, len(self._text)) if self._candidates > 1 else None
        return self._traversal(prompt, draft=draft, weigh=weigh)

    def take(self, reply: Traversal, seconds: float) -> list[WrittenToken]:
        self._count(reply, seconds)
        assert reply.tails is not None
        logits = before_each(reply.prompt_logits, reply.tail_logits)[0]
        self.stats.drafted += self._candidates * reply.tails.size(1)
        self.stats.accepted += reply.tails.size(1)
        self.stats.effective_candidates = 1.0 if reply.shares is None else effective_candidates(reply.shares.double())
        return self._write([WrittenToken(value, logits[at]) for at, value in enumerate(reply.tails[0].tolist())])

    @property
    def _candidates(self) -> int:
        return self.request.candidates or DEFAULT_CANDIDATES

    @property
    def _draft_temperature(self) -> float:
        if self.request.temperature == 0 and self._candidates > 1:
            return RANKED_TEMPERATURE
        return self.request.temperature


def speculate(
    model: Tensor, drafter: Tensor, drafted: Tensor, accept: Tensor, replace: Tensor
) -> tuple[list[int], int]:
    """The tokens that one traversal decides, and how many of them were drafted. The rejection rule: token x, drawn from
    q, stays with probability min(1, p(x) / q(x)); otherwise a token is drawn from max(0, p - q), and the rest of the
    draft is dropped. Each written token is then distributed as p.

    `model` and `drafter` are p and q [places, V]; `accept` and `replace` are uniform numbers, one per place."""
    places = torch.arange(len(model))
    stays = accept * drafter[places, drafted] < model[places, drafted]
    kept = int(stays.long().cumprod(0).sum())
    written: list[int] = drafted[:kept].tolist()
    if kept < len(model):
        rest = (model[kept] - drafter[kept]).clamp_min(0)
        written += pick((rest if rest.any() else model[kept])[None], replace[kept : kept + 1]).tolist()
    return written, kept


class Pace:
    """Chooses the length of drafts from measured times and acceptance. Recent traversals count more."""

    DECAY = 0.9  # of earlier measurements, per traversal

    def __init__(self) -> None:
        self._good, self._tried = 3.0, 4.0  # as if three of four drafted tokens had been accepted
        self._traversal_s: float | None = None
        self._byte_s: float | None = None

    def measured(self, good: int, tried: int, drafted: int, draft_s: float, traversal_s: float) -> None:
        self._good = self._good * self.DECAY + good
        self._tried = self._tried * self.DECAY + tried
        self._traversal_s = self._smooth(self._traversal_s, traversal_s)
        if drafted:
            self._byte_s = self._smooth(self._byte_s, draft_s / drafted)

    def _smooth(self, before: float | None, now: float) -> float:
        return now if before is None else self.DECAY * before + (1 - self.DECAY) * now

    def draft_bytes(self) -> int:
        if self._traversal_s is None or self._byte_s is None:
            return FIRST_DRAFT_BYTES
        return best_draft_bytes(self._good / self._tried, self._byte_s, self._traversal_s)


def best_draft_bytes(acceptance: float, byte_s: float, traversal_s: float, longest: int = LONGEST_DRAFT_BYTES) -> int:
    """The k that writes the most tokens per second: (1 - a^(k + 1)) / (1 - a) tokens in traversal_s + k · byte_s."""

    def bytes_per_s(k: int) -> float:
        expected = sum(acceptance**place for place in range(k + 1))
        return expected / max(traversal_s + k * byte_s, 1e-9)

    return max(range(1, longest + 1), key=bytes_per_s)


def _at_all_places(prompt_logits: Tensor | None, tail_logits: Tensor | None) -> Tensor:
    """[k + 1, V]: the logits of the first new token, and those behind each drafted token."""
    assert prompt_logits is not None
    first = prompt_logits.view(-1, prompt_logits.size(-1))[-1:].cpu().float()
    return first if tail_logits is None else torch.cat([first, tail_logits[0].cpu().float()])
