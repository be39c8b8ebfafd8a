"""Drafting: the rows of one traversal while they are drafted, one token per step; or a tree of rows. Next: segment.py
runs the steps of all drafts together; model/cpu_draft.py computes them on a CPU."""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from blocktrain.model.cpu_draft import DraftRows
from blocktrain.model.kv_cache import BranchedCache, Positions, TextPositions, joined, token_ids
from blocktrain.serve.segment.sampling import (
    DRAFT,
    gumbels,
    log_of,
    perturbed,
    pick,
    probabilities,
    share_of,
    uniforms,
)
from blocktrain.serve.segment.sessions import ActiveTraversal, Hidden
from blocktrain.serve.traversal import Piece, token_dtype

PIECE_COLUMNS = 96  # of a draft, sent ahead together: each piece costs frames and passes, later ones arrive later
DOUBT = 0.1  # in logits, how far the whole model's opinion of a token may be from the first segment's: a good one's


def drafting_of(active: ActiveTraversal, prompt_logits: Tensor) -> Drafting:
    return (Drafting if active.traversal.verify is None else TreeDrafting)(active, prompt_logits)


class Drafting:
    """A single row continues the session's KV cache, where its accepted tokens are needed next. Several rows have a
    branched cache."""

    def __init__(self, active: ActiveTraversal, prompt_logits: Tensor) -> None:
        assert active.traversal.draft is not None
        self.active, self.draft = active, active.traversal.draft
        self.remaining = self.draft.length
        self._settings = (self.draft.temperature, self.draft.top_p)
        self._uniforms = uniforms(self.draft.seed, DRAFT, self.draft.candidates, self.draft.offset, self.draft.length)
        self._logits = [prompt_logits.expand(self.draft.candidates, -1)]
        self._dtype = token_dtype(active.vocabulary)
        self._tokens: list[Tensor] = []
        self._hidden: list[Hidden] = []
        self._shares: list[Tensor] = []  # probabilities of the drawn tokens
        self._stream, self._sent = uuid.uuid4().hex, 0  # columns that went ahead
        branches = self.draft.candidates > 1 or active.traversal.verify is not None
        self._branched = BranchedCache(active.the_cache, self.draft.candidates, self.remaining) if branches else None

    def draw(self) -> Tensor:
        """Draws the next token of every row."""
        shares = probabilities(self._logits[-1], *self._settings)
        picked = pick(shares, self._uniforms[:, len(self._tokens)])
        self._shares.append(share_of(shares, picked))
        self._tokens.append(picked.to(self._dtype))
        self.remaining -= 1
        return self._tokens[-1]

    def next_positions(self) -> Positions:
        if self._branched is not None:
            return self._branched.next(1)
        return TextPositions(self.active.the_cache, len(self.active.traversal.prompt) + len(self._tokens) - 1, 1)

    @cached_property
    def rows(self) -> DraftRows:
        """The rows' KV caches, with room for the whole draft."""
        if self._branched is not None:
            return DraftRows(self._branched.keys, self._branched.values, self._branched.filled)
        cache, filled = self.active.the_cache, len(self.active.traversal.prompt)
        cache.reserve(filled + self.draft.length)
        keys, values = ([each[None] for each in side] for side in (cache.keys, cache.values))
        return DraftRows(keys, values, filled)

    def take(self, hidden: Hidden, logits: Tensor) -> None:
        self._hidden.append(hidden)
        self._logits.append(logits)

    @property
    def piece_is_due(self) -> bool:
        goes_ahead = self.active.ahead is not None and self._branched is not None
        return goes_ahead and len(self._tokens) - self._sent >= PIECE_COLUMNS and self.remaining > 0

    def cut_piece(self) -> ActiveTraversal:
        """The columns since the last piece, as a traversal of their own."""
        piece = replace(self.active, prompt_hidden={} if self._sent else self.active.prompt_hidden)
        self._put_columns(piece)
        piece.piece = Piece(self._stream, self._sent, self.draft.length)
        self._sent = len(self._tokens)
        return piece

    def _put_columns(self, active: ActiveTraversal) -> Tensor:
        tails = active.tails = torch.stack(self._tokens[self._sent :], 1)
        steps = self._hidden[self._sent :]
        active.tail_hidden = {index: torch.stack([step[index] for step in steps], 1) for index in steps[0]}
        return tails

    def finish(self) -> None:
        """Puts the results into the traversal: all columns, or those that did not go ahead."""
        active = self.active
        if not self._tokens:
            return
        tails = self._put_columns(active)
        if self._sent:
            active.piece, active.prompt_hidden = Piece(self._stream, self._sent, self.draft.length), {}
        if self._branched is None:
            active.the_cache.text = joined(active.the_cache.text, token_ids(tails[0].tolist(), active.vocabulary))
        elif self._shares:
            active.draft_log_likelihood = log_of(torch.stack(self._shares, 1)).sum(-1).float()


class TreeDrafting(Drafting):
    """Each column holds the beginnings that the whole model will most probably draw with the same random numbers. A
    token is as probable as its perturbed logit is large: where the two largest are close, the tree branches. So the
    whole model leaves the tree later than it would leave a single row."""

    def __init__(self, active: ActiveTraversal, prompt_logits: Tensor) -> None:
        super().__init__(active, prompt_logits)
        draft = self.draft
        self._noise = gumbels(draft.seed, draft.offset, draft.length, active.vocabulary)
        self._scores = torch.full((draft.candidates,), -torch.inf, dtype=torch.double)
        self._scores[0] = 0.0  # at first there is one beginning
        self._parents: list[Tensor] = []
        self._in_order = torch.arange(draft.candidates)

    def draw(self) -> Tensor:
        at, rows = len(self._tokens), self.draft.candidates
        values = perturbed(self._logits[-1], self._noise[at], *self._settings)
        likeliest = (values / DOUBT).log_softmax(-1).topk(min(rows, values.size(-1)), -1)
        self._scores, chosen = (self._scores[:, None] + likeliest.values).flatten().topk(rows)
        parents = chosen // likeliest.values.size(-1)
        if at and not torch.equal(parents, self._in_order) and self._branched is not None:
            first = len(self.active.traversal.prompt)
            self._branched.reorder(parents, first, first + at)
        self._parents.append(parents.to(torch.uint8))
        self._tokens.append(likeliest.indices.flatten()[chosen].to(self._dtype))
        self.remaining -= 1
        return self._tokens[-1]

    @property
    def piece_is_due(self) -> bool:
        return False  # the rows change their order

    def finish(self) -> None:
        super().finish()
        if self._parents:
            self.active.parents = torch.stack(self._parents, 1)
