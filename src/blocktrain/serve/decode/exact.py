"""The ways to decode, without any socket: a decoder asks for traversals and is told what came of them. Here the two
exact ones; `decode` joins a decoder and a forward. Next: sweep.py, the whole output in one traversal."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blocktrain.model.stack import draw
from blocktrain.serve.decode.base import Writer
from blocktrain.serve.decode.mode import Mode
from blocktrain.serve.decode.request import Decoder, DecodeStats, Request, WrittenByte, check, denoises
from blocktrain.serve.decode.sweep import DenoisingSweep, WeighedSweep
from blocktrain.serve.segment.sampling import ACCEPT, DRAFT, REPLACE, pick, probabilities, uniforms
from blocktrain.serve.traversal import Draft, Forward, ModelInfo, Traversal

__all__ = ["DecodeStats", "Decoder", "Mode", "Request", "Step", "WrittenByte", "check", "decode", "decoder"]

FIRST_DRAFT_BYTES = 8  # before anything is measured
LONGEST_DRAFT_BYTES = 64


@dataclass(frozen=True)
class Step:
    """What one traversal brought; `stats` are those of the whole output so far."""

    written: Sequence[WrittenByte]
    stats: DecodeStats


def decoder(request: Request, info: ModelInfo, session: str) -> Decoder:
    check(request, info)
    if request.mode is Mode.AUTOREGRESSIVE:
        return Autoregressive(request, info, session)
    if request.mode is Mode.SPECULATIVE:
        return Speculative(request, info, session)
    kind = DenoisingSweep if denoises(request, info) else WeighedSweep
    return kind(request, info, session)


async def decode(forward: Forward, request: Request) -> AsyncGenerator[Step, None]:
    """One step a traversal. Close it (contextlib.aclosing) to stop early: the stages forget the session at once."""
    session = uuid.uuid4().hex
    asking = decoder(request, forward.info, session)
    try:
        while (traversal := asking.ask()) is not None:
            began_s = time.perf_counter()
            reply = await forward(traversal)
            yield Step(asking.tell(reply, time.perf_counter() - began_s), asking.stats)
    finally:
        await forward.forget(session)


class Autoregressive(Writer):
    """One byte a traversal: the bytes of BlockModel.generate with the same seed."""

    def __init__(self, request: Request, info: ModelInfo, session: str) -> None:
        super().__init__(request, info, session)
        self._generator = torch.Generator().manual_seed(request.seed)

    def ask(self) -> Traversal | None:
        return self._traversal(self._window()) if self._left else None

    def tell(self, reply: Traversal, seconds: float) -> list[WrittenByte]:
        self._told(reply, seconds)
        assert reply.prompt_logits is not None
        logits = reply.prompt_logits[-1].cpu()
        value = draw(logits, self._generator, self.request.temperature, self.request.top_p)
        return self._write([WrittenByte(value, logits)])


class Speculative(Writer):
    """Lossless (Leviathan et al. 2023): the first segment drafts k bytes, one traversal weighs them all.

    Every byte is a function of the seed, its place and the two distributions there, so k, which follows the clock,
    changes how many traversals it takes and not what is written."""

    def __init__(self, request: Request, info: ModelInfo, session: str) -> None:
        super().__init__(request, info, session)
        self._pace = Pace()

    def ask(self) -> Traversal | None:
        if not self._left:
            return None
        prompt, request = self._window(), self.request
        longest = min(self._left - 1, self.info.context - len(prompt))  # never over a move of the window
        length = min(request.draft_bytes or self._pace.draft_bytes(), longest)
        settings = (request.temperature, request.top_p, len(self._text))
        return self._traversal(prompt, draft=Draft(length, 1, request.seed, *settings))

    def tell(self, reply: Traversal, seconds: float) -> list[WrittenByte]:
        self._told(reply, seconds)
        logits = _at_all_places(reply.prompt_logits, reply.tail_logits)
        model, drafter = (
            probabilities(each, self.request.temperature, self.request.top_p)
            for each in (logits, _at_all_places(reply.draft_prompt_logits, reply.draft_tail_logits))
        )
        places, seed = len(logits), self.request.seed
        drawn, accept, replace = (
            uniforms(seed, stream, 1, len(self._text), places)[0] for stream in (DRAFT, ACCEPT, REPLACE)
        )
        one_more = pick(drafter[-1:], drawn[-1:])  # the last place was not drafted: done here, as if it had been
        drafted = one_more if reply.tails is None else torch.cat([reply.tails[0].long().cpu(), one_more])
        written, kept = speculate(model, drafter, drafted, accept, replace)
        self._count(kept, len(written), places - 1, reply, seconds)
        return self._write([WrittenByte(value, logits[at]) for at, value in enumerate(written)])

    def _count(self, kept: int, decided: int, drafted: int, reply: Traversal, seconds: float) -> None:
        self.stats.drafted += drafted
        self.stats.accepted += min(kept, drafted)
        draft_s = sum(hop.drafted_s for hop in reply.trace)
        self._pace.measured(kept, decided, drafted, draft_s, seconds - draft_s)


def speculate(
    model: Tensor, drafter: Tensor, drafted: Tensor, accept: Tensor, replace: Tensor
) -> tuple[list[int], int]:
    """The bytes that one traversal decides, by the rejection rule: byte x, drawn from q, stays with probability
    min(1, p(x) / q(x)), else one is drawn from max(0, p - q), and what follows is void. Each is then distributed as p.
    Also how many of the drafted ones stayed.

    `model` and `drafter` are p and q [places, 256], `accept` and `replace` uniform numbers, one a place."""
    places = torch.arange(len(model))
    stays = accept * drafter[places, drafted] < model[places, drafted]
    kept = int(stays.long().cumprod(0).sum())
    written: list[int] = drafted[:kept].tolist()
    if kept < len(model):
        rest = (model[kept] - drafter[kept]).clamp_min(0)
        written += pick((rest if rest.any() else model[kept])[None], replace[kept : kept + 1]).tolist()
    return written, kept


class Pace:
    """How far to draft, from what was measured. Recent traversals count more."""

    MEMORY = 0.9  # of what was measured before, at each traversal

    def __init__(self) -> None:
        self._good, self._tried = 3.0, 4.0  # as if three of four drafted bytes had been accepted
        self._traversal_s: float | None = None
        self._byte_s: float | None = None

    def measured(self, good: int, tried: int, drafted: int, draft_s: float, traversal_s: float) -> None:
        self._good = self._good * self.MEMORY + good
        self._tried = self._tried * self.MEMORY + tried
        self._traversal_s = self._smooth(self._traversal_s, traversal_s)
        if drafted:
            self._byte_s = self._smooth(self._byte_s, draft_s / drafted)

    def _smooth(self, before: float | None, now: float) -> float:
        return now if before is None else self.MEMORY * before + (1 - self.MEMORY) * now

    def draft_bytes(self) -> int:
        if self._traversal_s is None or self._byte_s is None:
            return FIRST_DRAFT_BYTES
        return best_draft_bytes(self._good / self._tried, self._byte_s, self._traversal_s)


def best_draft_bytes(acceptance: float, byte_s: float, traversal_s: float, longest: int = LONGEST_DRAFT_BYTES) -> int:
    """The k that writes the most bytes a second: (1 - a^(k + 1)) / (1 - a) of them in traversal_s + k · byte_s."""

    def bytes_per_s(k: int) -> float:
        expected = sum(acceptance**place for place in range(k + 1))
        return expected / max(traversal_s + k * byte_s, 1e-9)

    return max(range(1, longest + 1), key=bytes_per_s)


def _at_all_places(prompt_logits: Tensor | None, tail_logits: Tensor | None) -> Tensor:
    """[k + 1, 256]: where the first new byte is read, and behind each drafted one."""
    assert prompt_logits is not None
    first = prompt_logits.view(-1, prompt_logits.size(-1))[-1:].cpu().float()
    return first if tail_logits is None else torch.cat([first, tail_logits[0].cpu().float()])
