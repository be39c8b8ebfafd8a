"""Drafting: one traversal's rows while they are drafted, a byte a step. Next: segment.py, which takes the steps of all
drafts together."""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from blocktrain.model.cpu_draft import Lane
from blocktrain.model.kv_cache import Fan, Part, Strand
from blocktrain.serve.segment.sampling import DRAFT, log_of, pick, probabilities, share_of, uniforms
from blocktrain.serve.segment.work import Hidden, Work
from blocktrain.serve.traversal import Piece

PIECE_COLUMNS = 32  # of a draft, sent ahead together: later ones wait for less, each costs its frames


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
        self._shares: list[Tensor] = []  # of what was picked
        self._stream, self._sent = uuid.uuid4().hex, 0  # columns that went ahead
        self._fan = None if self.draft.candidates == 1 else Fan(work.the_memory, self.draft.candidates, self.remaining)

    def draw(self) -> Tensor:
        """The next byte of every row."""
        shares = probabilities(self._logits[-1], *self._settings)
        picked = pick(shares, self._uniforms[:, len(self._bytes)])
        self._shares.append(share_of(shares, picked))
        self._bytes.append(picked.to(torch.uint8))
        self.remaining -= 1
        return self._bytes[-1]

    def next_part(self) -> Part:
        if self._fan is not None:
            return self._fan.next(1)
        return Strand(self.work.the_memory, len(self.work.traversal.prompt) + len(self._bytes) - 1, 1)

    @cached_property
    def lane(self) -> Lane:
        """The rows' memories, with room for all that will be drafted."""
        if self._fan is not None:
            return Lane(self._fan.keys, self._fan.values, self._fan.filled)
        memory, filled = self.work.the_memory, len(self.work.traversal.prompt)
        memory.reserve(filled + self.draft.length)
        keys, values = ([each[None] for each in side] for side in (memory.keys, memory.values))
        return Lane(keys, values, filled)

    def take(self, hidden: Hidden, logits: Tensor) -> None:
        self._hidden.append(hidden)
        self._logits.append(logits)

    @property
    def piece_is_due(self) -> bool:
        drafted = len(self._bytes) - self._sent
        return self.work.ahead is not None and self._fan is not None and drafted >= PIECE_COLUMNS and self.remaining > 0

    def cut_piece(self) -> Work:
        """What was drafted since the last piece, as a work of its own."""
        work = replace(self.work, prompt_hidden={} if self._sent else self.work.prompt_hidden)
        self._take_columns(work)
        work.piece = Piece(self._stream, self._sent, self.draft.length)
        self._sent = len(self._bytes)
        return work

    def _take_columns(self, work: Work) -> Tensor:
        tails = work.tails = torch.stack(self._bytes[self._sent :], 1)
        steps = self._hidden[self._sent :]
        work.tail_hidden = {index: torch.stack([step[index] for step in steps], 1) for index in steps[0]}
        return tails

    def finish(self) -> None:
        """The work as it goes on: all columns, or those that did not go ahead."""
        work = self.work
        work.draft_prompt_logits = self._logits[0][0]
        if not self._bytes:
            return
        tails = self._take_columns(work)
        if self._sent:
            work.piece, work.prompt_hidden = Piece(self._stream, self._sent, self.draft.length), {}
        if self._fan is None:
            work.draft_tail_logits = torch.stack(self._logits[1:], 1)
        else:
            work.draft_log_likelihood = log_of(torch.stack(self._shares, 1)).sum(-1).float()
        if self._fan is None:
            work.the_memory.text += bytes(tails[0].tolist())
