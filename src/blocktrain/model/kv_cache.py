"""KV caches: keys and values of positions that are already computed, so that a text is extended without computing it
again. The new positions of many texts go through the layers as one flat batch. Only attention runs per text, on its own
cache: nothing is padded or copied to form the batch. Next: block.py runs its layers on a CacheView;
serve/segment/sessions.py keeps one cache per session."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from blocktrain.spec import NUM_SYMBOLS

TokenIds: TypeAlias = bytes | tuple[int, ...]  # of a text: bytes, unless the vocabulary is larger
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value -> mixed values, all [T, H, W]
SMALLEST_CAPACITY = 64


class KVCache:
    """One text's keys and values in every layer of some blocks, [H, positions, W] each. It grows by doubling. `text` is
    what the first positions were computed from, so cutting it back to a prefix is free."""

    def __init__(self, layers: int, heads: int, head_width: int, like: Tensor) -> None:
        self.text: TokenIds = b""
        self.keys, self.values = ([like.new_empty(heads, 0, head_width) for _ in range(layers)] for _ in range(2))

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (*self.keys, *self.values))

    def common_prefix(self, text: TokenIds) -> int:
        """How many positions of `text` are already computed."""
        return common_prefix(self.text, text)

    def keep(self, length: int) -> None:
        self.text = self.text[:length]

    def reserve(self, length: int) -> None:
        """Makes room for `length` positions and keeps the present ones."""
        if length > self.keys[0].size(1):
            capacity = max(SMALLEST_CAPACITY, 1 << (length - 1).bit_length())
            self.keys, self.values = ([_grown(old, capacity) for old in each] for each in (self.keys, self.values))

    def put(self, layer: int, first: int, key_THW: Tensor, value_THW: Tensor) -> tuple[Tensor, Tensor]:
        """Stores new keys and values. Returns all of the layer up to and including them, [H, positions, W]."""
        end = first + key_THW.size(0)
        keys, values = self.keys[layer], self.values[layer]
        keys[:, first:end] = key_THW.transpose(0, 1)
        values[:, first:end] = value_THW.transpose(0, 1)
        return keys[:, :end], values[:, :end]


class Positions(Protocol):
    """New positions of one text, or of several rows that continue one text: a part of a flat batch."""

    @property
    def count(self) -> int: ...

    def rows_of(self, table: Tensor) -> Tensor:
        """Their rows of a table that has one row per position."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


class TextPositions:
    """The `count` positions of one text from `first` on. Their keys and values go into its cache."""

    def __init__(self, cache: KVCache, first: int, count: int) -> None:
        cache.reserve(first + count)
        self.cache, self.first, self.count = cache, first, count
        self._mask = _causal(count, first + count, cache.keys[0].device) if first and count > 1 else None

    def rows_of(self, table: Tensor) -> Tensor:
        return table[self.first : self.first + self.count]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.cache.put(layer, self.first, key, value)
        query = query.transpose(0, 1)[None]
        is_causal = not self.first and self.count > 1
        mixed = F.scaled_dot_product_attention(query, keys[None], values[None], self._mask, is_causal=is_causal)
        return mixed[0].transpose(0, 1)


class BranchedCache:
    """The caches of several rows that continue one text, [R, H, positions, W] per layer. The text's own cache is copied
    for each row."""

    def __init__(self, trunk: KVCache, rows: int, length: int) -> None:
        self.rows, self.filled = rows, len(trunk.text)
        self.keys, self.values = (
            [_branched(each[:, : self.filled], rows, length) for each in side] for side in (trunk.keys, trunk.values)
        )

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (*self.keys, *self.values))

    def reorder(self, rows: Tensor, first: int, end: int) -> None:
        """Row k goes on from what row rows[k] has at the positions from `first` to `end`."""
        for each in (*self.keys, *self.values):
            each[:, :, first:end] = each[:, :, first:end].index_select(0, rows)

    def next(self, length: int) -> BranchPositions:
        first, self.filled = self.filled, self.filled + length
        return BranchPositions(self, first, length)


class BranchPositions:
    """The `length` positions of every row of a branched cache from `first` on, row after row."""

    def __init__(self, cache: BranchedCache, first: int, length: int) -> None:
        self.cache, self.first, self.length = cache, first, length
        self.count = cache.rows * length
        self._mask = None if length == 1 else _causal(length, first + length, cache.keys[0].device)

    def rows_of(self, table: Tensor) -> Tensor:
        rows = table[self.first : self.first + self.length]
        return rows.expand(self.cache.rows, -1) if self.length == 1 else rows.repeat(self.cache.rows, 1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        end = self.first + self.length
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self.length == 1:  # a byte of a draft: its cost is the number of operations
            keys[:, :, self.first] = key
            values[:, :, self.first] = value
            mixed = F.scaled_dot_product_attention(query[:, :, None], keys[:, :, :end], values[:, :, :end])
            return mixed[:, :, 0]
        query, key, value = (
            x.view(self.cache.rows, self.length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)
        )
        keys[:, :, self.first : end] = key
        values[:, :, self.first : end] = value
        mixed = F.scaled_dot_product_attention(query, keys[:, :, :end], values[:, :, :end], self._mask)
        return mixed.transpose(1, 2).flatten(0, 1)


class TreePositions:
    """The positions of a tree of tokens behind one text, row after row: each sees the text, its ancestors and itself.
    `parents` [R, N] has the row of the column before that each token continues. Nothing is kept in the text's cache."""

    def __init__(self, trunk: KVCache, parents: Tensor) -> None:
        rows, self._length = parents.shape
        self._trunk, self._first, self._rows, self.count = trunk, len(trunk.text), rows, parents.numel()
        device = trunk.keys[0].device
        sees = torch.zeros(rows, self._length, rows, self._length, dtype=torch.bool, device=device)
        every = torch.arange(rows, device=device)
        for column in range(self._length):
            if column:
                sees[:, column] = sees[parents[:, column].long().to(device), column - 1]
            sees[every, column, every, column] = True
        text = torch.ones(self.count, self._first, dtype=torch.bool, device=device)
        self._mask = torch.cat([text, sees.view(self.count, self.count)], 1)

    def rows_of(self, table: Tensor) -> Tensor:
        return table[self._first : self._first + self._length].repeat(self._rows, 1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        keys, values = (each[layer][None, :, : self._first] for each in (self._trunk.keys, self._trunk.values))
        keys, values = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        return F.scaled_dot_product_attention(query, keys, values, self._mask)[0].transpose(0, 1)


class PositionBatch:
    """The new positions of several texts as one flat batch [T]."""

    def __init__(self, parts: Sequence[Positions]) -> None:
        self.parts, self.sizes = parts, [part.count for part in parts]
        self._rotary: tuple[Tensor, Tensor] | None = None

    def rotary(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """cos for both halves of each head's channels, and sin with the sign of each half, [T, 1, W]. All blocks have
        the same tables."""
        if self._rotary is None:
            own_cos, own_sin = (torch.cat([part.rows_of(table) for part in self.parts]) for table in (cos, sin))
            self._rotary = torch.cat([own_cos, own_cos], -1)[:, None], torch.cat([-own_sin, own_sin], -1)[:, None]
        return self._rotary

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0].attend(layer, query, key, value)
        each = zip(self.parts, *(torch.split(x, self.sizes) for x in (query, key, value)), strict=True)
        return torch.cat([part.attend(layer, *own) for part, *own in each])


@dataclass(frozen=True)
class CacheView:
    """One block's layers in the caches of a batch. Its first layer is layer `first_layer` of each cache."""

    batch: PositionBatch
    first_layer: int

    def attend(self, index: int) -> Attend:
        return partial(self.batch.attend, self.first_layer + index)


def common_prefix(old: TokenIds, new: TokenIds) -> int:
    """The length of the longest common prefix."""
    if new[: len(old)] == old:
        return len(old)
    differs = (at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    return next(differs, min(len(old), len(new)))


def token_ids(ids: Iterable[int], vocabulary: int) -> TokenIds:
    return bytes(ids) if vocabulary <= NUM_SYMBOLS else tuple(ids)


def joined(*parts: TokenIds) -> TokenIds:
    """One text after the other."""
    if all(isinstance(part, bytes) for part in parts):
        return b"".join(bytes(part) for part in parts)
    return tuple(token for part in parts for token in part)


def _grown(old: Tensor, capacity: int) -> Tensor:
    heads, before, width = old.shape
    new = old.new_empty(heads, capacity, width)
    new[:, :before] = old
    return new


def _branched(trunk: Tensor, rows: int, length: int) -> Tensor:
    """A new [R, H, P + length, W] that begins with the trunk [H, P, W] in each row."""
    heads, before, width = trunk.shape
    branches = trunk.new_empty(rows, heads, before + length, width)
    branches[:, :, :before] = trunk
    return branches


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """The last query sees all keys, each earlier query one key less."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
