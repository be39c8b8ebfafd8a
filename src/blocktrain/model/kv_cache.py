"""Memory: keys and values of positions already computed, so that one byte more costs one byte more. The new positions
of many texts go through the layers as one flat batch; only attention is each text's own, on its keys where they lie:
nothing is padded or copied to make a batch. Next: serve/segment/segment.py, which keeps a memory a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value -> mixed values, all [T, H, W]
SMALLEST_CAPACITY = 64


class Memory:
    """One text's keys and values in every layer of some blocks, [H, positions, W] each. It grows by doubling; cutting
    it back to a prefix is free: `text` says what the first positions were computed from."""

    def __init__(self, layers: int, heads: int, head_width: int, like: Tensor) -> None:
        self.text = b""
        self.keys, self.values = ([like.new_empty(heads, 0, head_width) for _ in range(layers)] for _ in range(2))

    @property
    def num_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (*self.keys, *self.values))

    def common_prefix(self, text: bytes) -> int:
        """How many positions of `text` need no computing."""
        return common_prefix(self.text, text)

    def keep(self, length: int) -> None:
        self.text = self.text[:length]

    def reserve(self, length: int) -> None:
        """Room for so many positions; what is known stays."""
        if length > self.keys[0].size(1):
            capacity = max(SMALLEST_CAPACITY, 1 << (length - 1).bit_length())
            self.keys, self.values = ([_grown(old, capacity) for old in each] for each in (self.keys, self.values))

    def put(self, layer: int, first: int, key_THW: Tensor, value_THW: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer up to and with the new ones, [H, positions, W]."""
        end = first + key_THW.size(0)
        keys, values = self.keys[layer], self.values[layer]
        keys[:, first:end] = key_THW.transpose(0, 1)
        values[:, first:end] = value_THW.transpose(0, 1)
        return keys[:, :end], values[:, :end]


class Part(Protocol):
    """Some tokens of a batch, and how they look back."""

    @property
    def num_tokens(self) -> int: ...

    def rows_of(self, table: Tensor) -> Tensor:
        """The rows of a table of positions that are theirs."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


class Strand:
    """The next `count` positions of one text, kept in its memory."""

    def __init__(self, memory: Memory, first: int, count: int) -> None:
        memory.reserve(first + count)
        self.memory, self.first, self.num_tokens = memory, first, count
        self._mask = _causal(count, first + count, memory.keys[0].device) if first and count > 1 else None

    def rows_of(self, table: Tensor) -> Tensor:
        return table[self.first : self.first + self.num_tokens]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.memory.put(layer, self.first, key, value)
        query = query.transpose(0, 1)[None]
        is_causal = not self.first and self.num_tokens > 1
        mixed = F.scaled_dot_product_attention(query, keys[None], values[None], self._mask, is_causal=is_causal)
        return mixed[0].transpose(0, 1)


class Fan:
    """Several continuations of one text: its memory, computed once, is copied for each of them, and forgotten with the
    fan. [R, H, positions, W] a layer."""

    def __init__(self, trunk: Memory, rows: int, length: int) -> None:
        self.rows, self.filled = rows, len(trunk.text)
        self.keys, self.values = (
            [_fanned(each[:, : self.filled], rows, length) for each in side] for side in (trunk.keys, trunk.values)
        )

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in (*self.keys, *self.values))

    def next(self, count: int) -> Fronds:
        first, self.filled = self.filled, self.filled + count
        return Fronds(self, first, count)


class Fronds:
    """The next `count` positions of every row of a fan, row by row."""

    def __init__(self, fan: Fan, first: int, count: int) -> None:
        self.fan, self.first, self.count = fan, first, count
        self.num_tokens = fan.rows * count
        self._mask = None if count == 1 else _causal(count, first + count, fan.keys[0].device)

    def rows_of(self, table: Tensor) -> Tensor:
        rows = table[self.first : self.first + self.count]
        return rows.expand(self.fan.rows, -1) if self.count == 1 else rows.repeat(self.fan.rows, 1)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        end = self.first + self.count
        keys, values = self.fan.keys[layer], self.fan.values[layer]
        if self.count == 1:  # a byte of a draft, which costs as much as the operations it takes
            keys[:, :, self.first] = key
            values[:, :, self.first] = value
            mixed = F.scaled_dot_product_attention(query[:, :, None], keys[:, :, :end], values[:, :, :end])
            return mixed[:, :, 0]
        query, key, value = (
            x.view(self.fan.rows, self.count, *x.shape[1:]).transpose(1, 2) for x in (query, key, value)
        )
        keys[:, :, self.first : end] = key
        values[:, :, self.first : end] = value
        mixed = F.scaled_dot_product_attention(query, keys[:, :, :end], values[:, :, :end], self._mask)
        return mixed.transpose(1, 2).flatten(0, 1)


class Tokens:
    """The new positions of several texts as one batch [T]."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts, self.sizes = parts, [part.num_tokens for part in parts]
        self._rotary: tuple[Tensor, Tensor] | None = None

    def rotary(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """cos for both halves of each head's channels, and sin with the sign each half takes, [T, 1, W]. All blocks
        have the same tables."""
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
class Recall:
    """What one block's layers need of a batch; the first of them is number `first_layer` of the memories."""

    tokens: Tokens
    first_layer: int

    def attend(self, index: int) -> Attend:
        return partial(self.tokens.attend, self.first_layer + index)


def common_prefix(old: bytes, new: bytes) -> int:
    """How many bytes the two begin with alike."""
    if new.startswith(old):
        return len(old)
    return next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(new))


def _grown(old: Tensor, capacity: int) -> Tensor:
    heads, before, width = old.shape
    new = old.new_empty(heads, capacity, width)
    new[:, :before] = old
    return new


def _fanned(trunk: Tensor, rows: int, length: int) -> Tensor:
    """The trunk [H, P, W] in each row of a new [R, H, P + length, W]."""
    heads, before, width = trunk.shape
    fan = trunk.new_empty(rows, heads, before + length, width)
    fan[:, :, :before] = trunk
    return fan


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """The last query sees all keys, each one before it one less."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
