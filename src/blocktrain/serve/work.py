"""Work: one traversal while a segment computes it: which positions are new, what came out of them, what is drafted.
Next: segment.py, which runs many of them in common passes."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from blocktrain.model.memory import Fan, Memory, Part, Strand
from blocktrain.serve.sampling import DRAFT, log_share, pick, probabilities, uniforms
from blocktrain.serve.traversal import Traversal

Hidden = dict[int, Tensor]  # block -> its hidden vectors at some tokens, [T, D]


@dataclass
class Work:
    """One traversal while its segment works on it."""

    traversal: Traversal
    present: list[int]
    needs_state: bool
    memory: Memory | None = None
    first: int = 0  # the first position that is computed
    prompt_hidden: Hidden = field(default_factory=dict)  # [T, D] from `first` to the prompt's end
    tail_hidden: Hidden = field(default_factory=dict)  # [R, N, D]
    tails: Tensor | None = None
    draft_prompt_logits: Tensor | None = None
    draft_tail_logits: Tensor | None = None
    draft_log_likelihood: Tensor | None = None

    def __post_init__(self) -> None:
        self.tails = self.traversal.tails

    @property
    def the_memory(self) -> Memory:
        assert self.memory is not None
        return self.memory

    @property
    def single_tail(self) -> Tensor | None:
        return self.tails if self.tails is not None and self.tails.size(0) == 1 else None

    def new_text(self) -> bytes:
        tail = b"" if self.single_tail is None else bytes(self.single_tail[0].tolist())
        return self.traversal.prompt[self.first :] + tail

    def new_states(self) -> Tensor | None:
        """What the segment before made of the new text, [T, D]."""
        t = self.traversal
        if not self.needs_state:
            return None
        assert t.prompt_state is not None
        if self.single_tail is None:
            return t.prompt_state[0]
        assert t.tail_state is not None
        return torch.cat([t.prompt_state[0], t.tail_state[0]])

    def take_prompt(self, hidden: Hidden) -> None:
        own = len(self.traversal.prompt) - self.first
        self.prompt_hidden = {index: each[:own] for index, each in hidden.items()}
        self.the_memory.text = self.traversal.prompt
        if self.single_tail is not None:
            self.tail_hidden = {index: each[None, own:] for index, each in hidden.items()}
            self.the_memory.text += bytes(self.single_tail[0].tolist())


class Drafting:
    """One traversal's rows while they are drafted. A single row goes on in the session's memory, where its accepted
    bytes are wanted next; several have a fan."""

    def __init__(self, work: Work, prompt_logits: Tensor) -> None:
        assert work.traversal.draft is not None
        self.work, self.draft, self.remaining = work, work.traversal.draft, work.traversal.draft.length
        self._settings = (self.draft.temperature, self.draft.top_p)
        self._uniforms = uniforms(self.draft.seed, DRAFT, self.draft.candidates, self.draft.offset, self.draft.length)
        self._logits = [prompt_logits.expand(self.draft.candidates, -1)]
        self._bytes: list[Tensor] = []
        self._hidden: list[Hidden] = []
        self._log_likelihood = torch.zeros(self.draft.candidates, dtype=torch.double)
        self._fan = None if self.draft.candidates == 1 else Fan(work.the_memory, self.draft.candidates, self.remaining)

    def draw(self) -> Tensor:
        """The next byte of every row."""
        shares = probabilities(self._logits[-1], *self._settings)
        picked = pick(shares, self._uniforms[:, len(self._bytes)])
        self._log_likelihood += log_share(shares, picked)
        self._bytes.append(picked.to(torch.uint8))
        self.remaining -= 1
        return self._bytes[-1]

    def next_part(self) -> Part:
        if self._fan is not None:
            return self._fan.next(1)
        return Strand(self.work.the_memory, len(self.work.traversal.prompt) + len(self._bytes) - 1, 1)

    def take(self, hidden: Hidden, logits: Tensor) -> None:
        self._hidden.append(hidden)
        self._logits.append(logits)

    def finish(self) -> None:
        work = self.work
        work.draft_prompt_logits = self._logits[0][0]
        if not self._bytes:
            return
        work.tails = torch.stack(self._bytes, 1)
        if self._fan is None:
            work.draft_tail_logits = torch.stack(self._logits[1:], 1)
        else:
            work.draft_log_likelihood = self._log_likelihood.float()
        work.tail_hidden = {index: torch.stack([step[index] for step in self._hidden], 1) for index in self._hidden[0]}
        if self._fan is None:
            work.the_memory.text += bytes(work.tails[0].tolist())
