"""Memory: keys and values of positions already computed, so that one byte more costs one byte more. The new positions
of many texts go through the layers as one flat batch; only attention is each text's own, on its keys where they lie:
nothing is padded and nothing copied. Next: serve/segment.py, which keeps a memory a session."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # query, key, value -> mixed values, all [1, H, T, W]
SMALLEST_CAPACITY = 64


class Memory:
    """One text's keys and values in every layer of some blocks, [L, H, positions, W] each. It grows by doubling;
    cutting it back to a prefix is free: `text` says what the first positions were computed from."""

    def __init__(self, layers: int, heads: int, head_width: int, like: Tensor) -> None:
        self.text = b""
        self.keys = like.new_empty(layers, heads, 0, head_width)
        self.values = like.new_empty(layers, heads, 0, head_width)

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def common_prefix(self, text: bytes) -> int:
        """How many positions of `text` need no computing."""
        return common_prefix(self.text, text)

    def keep(self, length: int) -> None:
        self.text = self.text[:length]

    def reserve(self, length: int) -> None:
        """Room for so many positions; what is known stays."""
        capacity = self.keys.size(2)
        if length > capacity:
            capacity = max(SMALLEST_CAPACITY, 1 << (length - 1).bit_length())
            self.keys, self.values = (_grown(old, capacity) for old in (self.keys, self.values))

    def put(self, layer: int, first: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer up to and with the new ones."""
        end = first + key.size(2)
        self.keys[layer, :, first:end] = key[0]
        self.values[layer, :, first:end] = value[0]
        return self.keys[layer, None, :, :end], self.values[layer, None, :, :end]


class Part(Protocol):
    """Some tokens of a batch, and how they look back."""

    @property
    def num_tokens(self) -> int: ...

    def positions(self) -> list[int]: ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


class Strand:
    """The next `count` positions of one text, kept in its memory."""

    def __init__(self, memory: Memory, first: int, count: int) -> None:
        memory.reserve(first + count)
        self.memory, self.first, self.num_tokens = memory, first, count
        self._mask = _causal(count, first + count, memory.keys.device) if first and count > 1 else None

    def positions(self) -> list[int]:
        return list(range(self.first, self.first + self.num_tokens))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.memory.put(layer, self.first, key, value)
        return F.scaled_dot_product_attention(query, keys, values, self._mask, is_causal=keys.size(2) == query.size(2))


class Fan:
    """Several continuations of one text: they share its memory (computed once, never copied) and have their own for
    what follows, which is forgotten with the fan."""

    def __init__(self, trunk: Memory, rows: int, length: int) -> None:
        layers, heads, _, width = trunk.keys.shape
        self.trunk, self.trunk_length, self.rows = trunk, len(trunk.text), rows
        self.keys, self.values = (trunk.keys.new_empty(layers, heads, rows, length, width) for _ in range(2))
        self.filled = 0

    def next(self, count: int) -> Fronds:
        first, self.filled = self.filled, self.filled + count
        return Fronds(self, first, count)


class Fronds:
    """The next `count` positions of every row of a fan, row by row."""

    def __init__(self, fan: Fan, first: int, count: int) -> None:
        self.fan, self.first, self.count = fan, first, count
        self.num_tokens = fan.rows * count
        self._mask = None if count == 1 else _causal(count, first + count, fan.keys.device)

    def positions(self) -> list[int]:
        begin = self.fan.trunk_length + self.first
        return list(range(begin, begin + self.count)) * self.fan.rows

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """softmax over the shared and the own keys together; the shared ones are read once for all rows."""
        fan, end = self.fan, self.first + self.count
        H, W = query.size(1), query.size(3)
        split = (H, fan.rows, self.count, W)
        fan.keys[layer, :, :, self.first : end] = key.view(split)
        fan.values[layer, :, :, self.first : end] = value.view(split)
        query = query[0] / math.sqrt(W)
        shared = query @ fan.trunk.keys[layer, :, : fan.trunk_length].mT  # [H, R·T, P]
        own = query.view(split) @ fan.keys[layer, :, :, :end].mT  # [H, R, T, end]
        if self._mask is not None:
            own = own.masked_fill(~self._mask, -torch.inf)
        shares = torch.cat([shared.view(*split[:3], -1), own], -1).softmax(-1)
        of_shared, of_own = torch.split(shares, [fan.trunk_length, end], -1)
        mixed = of_shared.reshape(H, self.num_tokens, -1) @ fan.trunk.values[layer, :, : fan.trunk_length]
        return (mixed + (of_own @ fan.values[layer, :, :, :end]).view(H, self.num_tokens, W))[None]


class Tokens:
    """The new positions of several texts as one batch [1, T]."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.parts, self.sizes = parts, [part.num_tokens for part in parts]
        self._positions = torch.tensor([at for part in parts for at in part.positions()], device=device)

    def rotary(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return cos[self._positions], sin[self._positions]

    def attend(self, layer: int) -> Attend:
        def mixed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if len(self.parts) == 1:
                return self.parts[0].attend(layer, query, key, value)
            each = zip(self.parts, *(torch.split(x, self.sizes, 2) for x in (query, key, value)), strict=True)
            return torch.cat([part.attend(layer, *own) for part, *own in each], 2)

        return mixed


@dataclass(frozen=True)
class Recall:
    """What one block's layers need of a batch: whose first layer is number `first_layer` of the memories."""

    tokens: Tokens
    first_layer: int

    def attend(self, index: int) -> Attend:
        return self.tokens.attend(self.first_layer + index)


def common_prefix(old: bytes, new: bytes) -> int:
    """How many bytes the two begin with alike."""
    if new.startswith(old):
        return len(old)
    return next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(new))


def _grown(old: Tensor, capacity: int) -> Tensor:
    layers, heads, before, width = old.shape
    new = old.new_empty(layers, heads, capacity, width)
    new[:, :, :before] = old
    return new


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """The last query sees all keys, each one before it one less."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
