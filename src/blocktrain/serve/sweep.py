"""Sweeps: the whole output in one traversal; in a few where it does not fit the model's window behind its prompt. Two
forms: noise turned into bytes by every block as it passes, or candidates drafted by the first segment and weighed by
all. Next: segment.py, which drafts and denoises."""

from __future__ import annotations

import torch
from torch import Tensor

from blocktrain.serve.request import DEFAULT_CANDIDATES, WrittenByte
from blocktrain.serve.sampling import CHOOSE, log_likelihood, pick, uniforms
from blocktrain.serve.traversal import Draft, Noise, Traversal
from blocktrain.serve.writer import Writer

RANKED_TEMPERATURE = 0.3  # at which candidates are drafted when the likeliest of them is wanted


class DenoisingSweep(Writer):
    """All positions start as noise: the bytes of BlockModel.sweep with the same seed. More bytes than the model was
    trained to denoise at once take more sweeps."""

    def ask(self) -> Traversal | None:
        if not self._left:
            return None
        length = min(self._left, self.info.longest_sweep, self.request.draft_bytes or self._left)
        prompt = bytes(self._text[-(self.info.context - length) :])
        return Traversal(self._session, prompt, noise=Noise(length, self.request.seed + self.stats.traversals))

    def tell(self, reply: Traversal, seconds: float) -> list[WrittenByte]:
        self._told(reply, seconds)
        assert reply.written is not None
        return self._write([WrittenByte(value) for value in reply.written])


class WeighedSweep(Writer):
    """Draft and weigh: the first segment drafts M candidates, all blocks score every byte of them at once, and one is
    drawn by its weight p / q: sampling importance resampling (Rubin 1987), which becomes sampling from the whole model
    as M grows. Temperature 0 takes the candidate that the whole model finds likeliest.

    The weights of long outputs are so unequal that nearly always the best candidate wins (stats.effective_candidates
    says how many count); `draft_bytes` cuts the output into several sweeps, each weighed on its own. top_p cuts what is
    drafted."""

    def ask(self) -> Traversal | None:
        if not self._left:
            return None
        request, context = self.request, self.info.context
        room = context - min(len(self._text), context // 2)  # at least half a context of the text stays in sight
        length = min(self._left, room, request.draft_bytes or room)
        prompt = bytes(self._text[-(context - length) :])
        draft = Draft(length, self._candidates, request.seed, self._draft_temperature, request.top_p, len(self._text))
        return self._traversal(prompt, draft=draft)

    def tell(self, reply: Traversal, seconds: float) -> list[WrittenByte]:
        self._told(reply, seconds)
        assert reply.tails is not None
        logits = _before_each(reply.prompt_logits, reply.tail_logits)
        shares = self._shares(reply, logits)
        uniform = uniforms(self.request.seed, CHOOSE, 1, len(self._text), 1)[0]
        chosen = int(pick(shares[None], uniform))
        self.stats.drafted += reply.tails.numel()
        self.stats.accepted += reply.tails.size(1)
        self.stats.effective_candidates = effective_candidates(shares)
        values = reply.tails[chosen].tolist()
        return self._write([WrittenByte(value, logits[chosen, at]) for at, value in enumerate(values)])

    @property
    def _candidates(self) -> int:
        return self.request.candidates or DEFAULT_CANDIDATES

    @property
    def _draft_temperature(self) -> float:
        if self.request.temperature == 0 and self._candidates > 1:
            return RANKED_TEMPERATURE
        return self.request.temperature

    def _shares(self, reply: Traversal, logits: Tensor) -> Tensor:
        """Each candidate's chance to be the answer, [M]."""
        assert reply.tails is not None
        if reply.draft_log_likelihood is None:
            return torch.ones(1, dtype=torch.double)
        if self.request.temperature == 0:
            return one_hot(log_likelihood(logits, reply.tails))
        likelihood = log_likelihood(logits, reply.tails, self.request.temperature)
        return (likelihood - reply.draft_log_likelihood.cpu()).softmax(-1)


def effective_candidates(shares: Tensor) -> float:
    """1 / Σ share²: M where all count the same, 1 where one takes all."""
    return float(1 / shares.square().sum())


def one_hot(scores: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()


def _before_each(prompt_logits: Tensor | None, tail_logits: Tensor | None) -> Tensor:
    """[M, N, 256]: what was said before each byte of each candidate was seen."""
    assert prompt_logits is not None
    assert tail_logits is not None
    rows, _, symbols = tail_logits.shape
    first = prompt_logits.view(-1, symbols)[-1].expand(rows, 1, symbols)
    return torch.cat([first, tail_logits[:, :-1]], 1).cpu().float()
