"""Sessions: what a segment keeps between traversals of one text, and one traversal while the segment advances it. No
blocks here. Next: segment.py advances many traversals in common passes; drafting.py writes drafts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blocktrain.model.kv_cache import (
    BranchedCache,
    KVCache,
    Positions,
    TokenIds,
    TreePositions,
    joined,
    token_ids,
)
from blocktrain.serve.traversal import CacheMiss, Piece, Traversal

FLOAT_BYTES = 4
Hidden = dict[int, Tensor]  # block -> its hidden vectors at some positions, [T, D]


@dataclass
class PieceStream:
    """What a segment keeps of rows that come in pieces."""

    stream: str
    rows: int
    total: int  # columns in all pieces
    columns: int = 0  # so far
    cache: BranchedCache | None = None
    pieces: list[Traversal] = field(default_factory=list)  # scored, in the last segment

    @property
    def num_bytes(self) -> int:
        logits = [piece.tail_logits for piece in self.pieces if piece.tail_logits is not None]
        return sum(each.nbytes for each in logits) + (self.cache.num_bytes if self.cache else 0)

    def expects(self, piece: Piece, rows: int) -> bool:
        own = (self.stream, self.rows, self.total, self.columns)
        return own == (piece.stream, rows, piece.total, piece.first)

    def gather(self, piece: Traversal) -> Traversal:
        """All pieces as one traversal when the last one has come; before that the piece itself."""
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
class Session:
    cache: KVCache
    missing: tuple[int, ...]  # keys and values depend on which blocks are missing below
    has_drafter: bool  # whether the drafter's keys and values are there too
    pieces: PieceStream | None = None

    @property
    def num_bytes(self) -> int:
        return self.cache.num_bytes + (self.pieces.num_bytes if self.pieces else 0)

    def stream_of(self, t: Traversal) -> PieceStream | None:
        """The stream that this piece continues, or None if the rows are whole. The last piece ends the stream."""
        if t.piece is None or t.tails is None:
            return None
        rows, columns = t.tails.shape
        if not t.piece.first:
            self.pieces = PieceStream(t.piece.stream, rows, t.piece.total)
        known = self.pieces
        if known is None or not known.expects(t.piece, rows):
            raise CacheMiss(t.session, len(t.prompt) + t.piece.first, len(t.prompt) + (known.columns if known else 0))
        known.columns += columns
        if t.is_last:
            self.pieces = None
        return known


class Sessions:
    """All sessions of a segment. Above `limit_bytes` the least recently used ones are dropped."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: OrderedDict[str, Session] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return sum(session.num_bytes for session in self._held.values())

    def session(self, t: Traversal, new_cache: Callable[[], KVCache], has_drafter: bool = False) -> Session:
        held = self._held.get(t.session)
        if held is None or (held.missing, held.has_drafter) != (t.missing, has_drafter):
            held = self._held[t.session] = Session(new_cache(), t.missing, has_drafter)
        self._held.move_to_end(t.session)
        return held

    def forget(self, session: str) -> None:
        self._held.pop(session, None)

    def make_room(self) -> None:
        """Keeps at least the newest session: otherwise a large one could never continue."""
        excess = self.num_bytes - self._limit_bytes
        while excess > 0 and len(self._held) > 1:
            excess -= self._held.popitem(last=False)[1].num_bytes


@dataclass
class ActiveTraversal:
    """One traversal while its segment advances it: which positions are new, and the results so far."""

    traversal: Traversal
    present: list[int]  # the segment's blocks that are not missing
    computed: list[int]  # the same, and the drafter if it is needed
    needs_state: bool
    vocabulary: int
    cache: KVCache | None = None
    first: int = 0  # the first position that is computed
    prompt_hidden: Hidden = field(default_factory=dict)  # [T, D] from `first` to the prompt's end
    tail_hidden: Hidden = field(default_factory=dict)  # [R, N, D]
    tails: Tensor | None = None
    parents: Tensor | None = None  # if the tails are a tree
    draft_log_likelihood: Tensor | None = None
    piece: Piece | None = None
    stream: PieceStream | None = None  # if the rows come in pieces
    ahead: Callable[[Traversal], None] | None = None  # takes pieces of the draft

    def __post_init__(self) -> None:
        self.tails, self.parents, self.piece = self.traversal.tails, self.traversal.parents, self.traversal.piece

    @property
    def the_cache(self) -> KVCache:
        assert self.cache is not None
        return self.cache

    @property
    def has_prompt(self) -> bool:
        """Later pieces carry only more columns of their rows."""
        return self.piece is None or self.piece.first == 0

    @property
    def has_rows(self) -> bool:
        """Several rows or a tree, which leave the session's KV cache as it is."""
        return self.tails is not None and (self.tails.size(0) != 1 or self.parents is not None)

    def row_positions(self) -> Positions:
        """The positions of all tails."""
        assert self.tails is not None
        if self.parents is not None:
            return TreePositions(self.the_cache, self.parents)
        return self._branched_cache().next(self.tails.size(1))

    def _branched_cache(self) -> BranchedCache:
        """For the keys and values of the rows."""
        assert self.tails is not None
        if self.stream is None:
            return BranchedCache(self.the_cache, *self.tails.shape)
        if self.stream.cache is None:
            self.stream.cache = BranchedCache(self.the_cache, self.stream.rows, self.stream.total)
        return self.stream.cache

    @property
    def single_tail(self) -> Tensor | None:
        return self.tails if self.tails is not None and not self.has_rows else None

    def new_text(self) -> TokenIds:
        return joined(self.traversal.prompt[self.first :], self._single_text())

    def _single_text(self) -> TokenIds:
        return b"" if self.single_tail is None else token_ids(self.single_tail[0].tolist(), self.vocabulary)

    def new_states(self) -> Tensor | None:
        """The states of the new text from the previous segment, [T, D]."""
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
        self.the_cache.text = self.traversal.prompt
        if self.single_tail is not None:
            self.tail_hidden = {index: each[None, own:] for index, each in hidden.items()}
            self.the_cache.text = joined(self.the_cache.text, self._single_text())


def row_bytes(t: Traversal, width: int, layers: int, blocks: int, vocabulary: int) -> int:
    """The memory of a traversal's rows in a segment: each has its own copy of the KV cache, its states and logits."""
    num_tails, tail = (t.tails.size(0), t.tails.size(1)) if t.tails is not None else (0, 0)
    rows = t.draft.candidates if t.draft else num_tails
    if rows < 2:
        return 0  # a single row continues the cache of its session
    new = t.draft.length if t.draft else t.piece.total if t.piece else tail
    cached, computed = 2 * layers * width, blocks * width + 3 * vocabulary
    return rows * (cached * (len(t.prompt) + new) + computed * new) * FLOAT_BYTES


def one_per_session(batch: Sequence[Traversal]) -> Iterable[list[int]]:
    """The batch's indices in rounds with at most one traversal per session: two would share one KV cache."""
    rounds: list[list[int]] = []
    seen: dict[str, int] = {}
    for at, traversal in enumerate(batch):
        turn = seen[traversal.session] = seen.get(traversal.session, -1) + 1
        rounds += [[] for _ in range(turn + 1 - len(rounds))]
        rounds[turn].append(at)
    return rounds


def parts_within(budget_bytes: int, sizes: Sequence[int], turns: Iterable[Sequence[int]]) -> Iterator[list[int]]:
    """Divides each turn (indices into `sizes`) into parts that fit into the budget, to be computed one after the other.
    What is larger than the budget is a part of its own."""
    for turn in turns:
        part: list[int] = []
        for at in turn:
            if part and sum(sizes[each] for each in part) + sizes[at] > budget_bytes:
                yield part
                part = []
            part.append(at)
        yield part
