"""Sweeps: the whole output in one traversal; in a few where it does not fit the model's window behind its prompt. Two
forms: noise turned into bytes by every block as it passes, or candidates drafted by the first segment and weighed by
all. Next: segment.py, which drafts and denoises; weighing.py, which chooses."""

from __future__ import annotations

from blocktrain.serve.decode.base import Writer
from blocktrain.serve.decode.request import DEFAULT_CANDIDATES, WrittenByte
from blocktrain.serve.segment.resample import before_each, effective_candidates, weighed
from blocktrain.serve.traversal import Draft, Noise, Traversal, Weigh

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
        return self._traversal(prompt, draft=draft, weigh=self._weigh if self._candidates > 1 else None)

    def tell(self, reply: Traversal, seconds: float) -> list[WrittenByte]:
        self._told(reply, seconds)
        if self._candidates > 1 and reply.shares is None:  # the evidence was summed up here: nobody else had it all
            reply = weighed(reply, self._weigh)
        assert reply.tails is not None
        logits = before_each(reply.prompt_logits, reply.tail_logits)[0]
        self.stats.drafted += self._candidates * reply.tails.size(1)
        self.stats.accepted += reply.tails.size(1)
        self.stats.effective_candidates = 1.0 if reply.shares is None else effective_candidates(reply.shares.double())
        return self._write([WrittenByte(value, logits[at]) for at, value in enumerate(reply.tails[0].tolist())])

    @property
    def _candidates(self) -> int:
        return self.request.candidates or DEFAULT_CANDIDATES

    @property
    def _weigh(self) -> Weigh:
        return Weigh(self.request.temperature, self.request.seed, len(self._text))

    @property
    def _draft_temperature(self) -> float:
        if self.request.temperature == 0 and self._candidates > 1:
            return RANKED_TEMPERATURE
        return self.request.temperature
