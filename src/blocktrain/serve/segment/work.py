"""Work: one traversal while a segment computes it: which positions are new, what came out of them.
Next: drafting.py, its rows while they are drafted; segment.py, which runs many of them in common passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blocktrain.model.kv_cache import Fan, Memory
from blocktrain.serve.traversal import Piece, Traversal

Hidden = dict[int, Tensor]  # block -> its hidden vectors at some tokens, [T, D]


@dataclass
class Streamed:
    """What a segment remembers of rows that come in pieces."""

    stream: str
    rows: int
    total: int  # columns
    columns: int = 0  # so far
    fan: Fan | None = None
    pieces: list[Traversal] = field(default_factory=list)  # scored, in the last segment

    @property
    def num_bytes(self) -> int:
        evidence = [piece.tail_logits for piece in self.pieces if piece.tail_logits is not None]
        return sum(each.nbytes for each in evidence) + (self.fan.num_bytes if self.fan else 0)

    def expects(self, piece: Piece, rows: int) -> bool:
        own = (self.stream, self.rows, self.total, self.columns)
        return own == (piece.stream, rows, piece.total, piece.first)

    def gather(self, piece: Traversal) -> Traversal:
        """All pieces as one traversal once the last has come; until then the piece itself."""
        self.pieces.append(piece)
        if not piece.is_last:
            return piece
        tails, logits = ([getattr(each, name) for each in self.pieces] for name in ("tails", "tail_logits"))
        return piece.with_(
            piece=None,
            tails=torch.cat(tails, 1),
            tail_logits=torch.cat(logits, 1),
            prompt_logits=self.pieces[0].prompt_logits,
        )


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
    piece: Piece | None = None
    streamed: Streamed | None = None  # where the rows come in pieces
    ahead: Callable[[Traversal], None] | None = None  # takes pieces of what is drafted

    def __post_init__(self) -> None:
        self.tails, self.piece = self.traversal.tails, self.traversal.piece

    @property
    def the_memory(self) -> Memory:
        assert self.memory is not None
        return self.memory

    @property
    def has_prompt(self) -> bool:
        """Later pieces bring more of their rows only."""
        return self.piece is None or self.piece.first == 0

    def fan(self) -> Fan:
        """Where the rows' own keys and values go."""
        assert self.tails is not None
        if self.streamed is None:
            return Fan(self.the_memory, *self.tails.shape)
        if self.streamed.fan is None:
            self.streamed.fan = Fan(self.the_memory, self.streamed.rows, self.streamed.total)
        return self.streamed.fan

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
