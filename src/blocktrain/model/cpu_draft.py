"""Drafting on the CPU: extends several rows of text by one byte. It computes what `Block.step` computes, up to
rounding. The cost of a single byte is the number of operations, not the arithmetic. So everything except matrix
products is numpy, whose calls take a third of the time of torch's, and results go into existing arrays. Next:
serve/segment/drafting.py writes drafts with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from blocktrain.model.block import Block
from blocktrain.model.transformer import Layer, Modulation, lean_norm

Floats = npt.NDArray[np.float32]
EPSILON = float(np.finfo(np.float32).eps)  # of the norms, as torch has it
LARGEST_BYTES = 2**28  # of a block's matrices: larger ones take arithmetic, and a DraftBlock keeps a second copy


@dataclass(frozen=True)
class DraftLayer:
    """A layer's matrices, transposed, with the modulation multiplied in."""

    heads: int
    qkv: Tensor  # [D, 3 D]: query, key and value
    attention_out: Tensor
    up: Tensor
    down: Tensor
    qkv_shift: Floats | None  # [3 D], what a modulation adds
    up_shift: Floats | None  # [4 D]


@dataclass(frozen=True)
class DraftBlock:
    table: Floats | None  # [256, D]: what each byte adds to the stream; None: the block reads the stream alone
    layers: tuple[DraftLayer, ...]
    first_layer: int  # its number in the KV caches
    continues: bool  # adds the stream of the previous block

    @classmethod
    def of(cls, block: Block, first_layer: int) -> DraftBlock | None:
        """None if the block must draft with its own `step`: another device or precision, offloaded or large."""
        real = [layer for layer in block.layers if type(layer) is Layer]
        matrices = [matrix for layer in real for matrix in layer.parameters()]
        usual = all(each.device.type == "cpu" and each.dtype == torch.float32 for each in (*matrices, block.readout))
        if len(real) < len(block.layers) or not usual or sum(each.nbytes for each in matrices) > LARGEST_BYTES:
            return None
        layers = [_draft_layer(layer, block.step_modulation) for layer in real]
        shared = tuple(layers[index % len(layers)] for index in range(block.num_layers))
        if block.embedding is None:
            return cls(None, shared, first_layer, continues=True)
        own, gain = lean_norm(block.embedding_table().detach()), block.step_gain
        table = own if gain is None else gain.detach() * own
        return cls(table.numpy(), shared, first_layer, continues=gain is not None)


def _draft_layer(layer: Layer, modulation: Modulation | None) -> DraftLayer:
    qkv = torch.cat([layer.query, layer.key, layer.value]).detach()
    out, up, down = (matrix.detach() for matrix in (layer.attention_out, layer.up, layer.down))
    qkv_shift = up_shift = None
    if modulation is not None:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (each.detach().flatten() for each in modulation)
        qkv_shift, up_shift = F.linear(shift_a, qkv).numpy(), F.linear(shift_m, up).numpy()
        qkv, up = qkv * (1 + scale_a), up * (1 + scale_m)
        out, down = out * (1 + gate_a)[:, None], down * (1 + gate_m)[:, None]
    qkv, out, up, down = (matrix.T.contiguous() for matrix in (qkv, out, up, down))
    return DraftLayer(layer.heads, qkv, out, up, down, qkv_shift, up_shift)


class DraftRows:
    """The rows of one draft with their keys and values, [R, H, capacity, W] per layer: a BranchedCache, or a single
    text's own KVCache. There is room for the whole draft."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], filled: int) -> None:
        self.rows, self.filled = keys[0].size(0), filled
        self.keys, self.values = ([each.numpy() for each in side] for side in (keys, values))
        flat_keys, self.flat_values = (
            [each.reshape(-1, *each.shape[2:]) for each in s] for s in (self.keys, self.values)
        )
        self.transposed_keys = [each.transpose(0, 2, 1) for each in flat_keys]


class DraftStepper:
    """Extends the rows of all drafts together. `step` fills the next position of each row; `rows` has the rows of each
    draft in the batch."""

    def __init__(
        self, blocks: Sequence[DraftBlock], rotary: tuple[Tensor, Tensor], drafts: Sequence[DraftRows]
    ) -> None:
        self._blocks, self._drafts = blocks, drafts
        cos, sin = rotary
        self._cos, self._sin = torch.cat([cos, cos], -1).numpy(), torch.cat([-sin, sin], -1).numpy()
        rows, first = sum(draft.rows for draft in drafts), blocks[0].layers[0]
        width, heads = first.attention_out.size(0), first.heads
        self._draft_of_row = np.repeat(np.arange(len(drafts)), [draft.rows for draft in drafts])
        ends = np.cumsum([draft.rows for draft in drafts]).tolist()
        self.rows = [slice(end - draft.rows, end) for draft, end in zip(drafts, ends, strict=True)]
        self._attention = _Attention(rows, heads, width)
        self._normed, self._added, self._wide = _array(rows, width), _array(rows, width), _array(rows, 4 * width)
        self._size = _array(rows, 1)
        self._normed_t, self._added_t, self._wide_t = map(torch.from_numpy, (self._normed, self._added, self._wide))

    def step(self, bytes_T: npt.NDArray[np.integer]) -> list[Floats]:
        """Takes the rows' next bytes and returns the hidden stream after each block, [T, D]."""
        filled = np.array([draft.filled for draft in self._drafts])[self._draft_of_row]
        self._attention.move_to(self._cos[filled][:, None], self._sin[filled][:, None])
        each: list[Floats] = []
        for block in self._blocks:
            hidden = self._entering(block, bytes_T, each[-1] if each else None)
            for number, layer in enumerate(block.layers, block.first_layer):
                self._attend(layer, number, hidden)
                self._mlp(layer, hidden)
            each.append(hidden)
        for draft in self._drafts:
            draft.filled += 1
        return each

    def _entering(self, block: DraftBlock, bytes_T: npt.NDArray[np.integer], before: Floats | None) -> Floats:
        """A new array, which the layers change."""
        if block.table is None:
            return np.zeros_like(self._normed) if before is None else before.copy()
        hidden: Floats = block.table[bytes_T]
        if block.continues and before is not None:
            hidden += before
        return hidden

    def _attend(self, layer: DraftLayer, number: int, hidden: Floats) -> None:
        attention = self._attention
        _norm(hidden, self._size, self._normed)
        torch.mm(self._normed_t, layer.qkv, out=attention.qkv_t)
        if layer.qkv_shift is not None:
            attention.qkv += layer.qkv_shift
        attention.rotate()
        for draft, rows in zip(self._drafts, self.rows, strict=True):
            attention.mix(draft, rows, number)
        torch.mm(attention.mixed_t, layer.attention_out, out=self._added_t)
        hidden += self._added

    def _mlp(self, layer: DraftLayer, hidden: Floats) -> None:
        wide = self._wide
        _norm(hidden, self._size, self._normed)
        torch.mm(self._normed_t, layer.up, out=self._wide_t)
        if layer.up_shift is not None:
            wide += layer.up_shift
        np.maximum(wide, 0, out=wide)
        np.multiply(wide, wide, out=wide)
        torch.mm(self._wide_t, layer.down, out=self._added_t)
        hidden += self._added


class _Attention:
    """Attention of all rows, with the arrays that it writes into."""

    def __init__(self, rows: int, heads: int, width: int) -> None:
        head_width = width // heads
        self._heads, self._scale = heads, head_width**-0.5
        self.qkv, self._mixed = _array(rows, 3 * width), _array(rows, heads, head_width)
        self.qkv_t, self.mixed_t = torch.from_numpy(self.qkv), torch.from_numpy(self._mixed.reshape(rows, width))
        self._both = self.qkv[:, : 2 * width].reshape(rows, 2 * heads, head_width)
        self._value = self.qkv[:, 2 * width :].reshape(rows, heads, head_width)
        self._rotated, self._crossed = _array(rows, 2 * heads, head_width), _array(rows, 2 * heads, head_width)
        self._query, self._size = _array(rows, heads, head_width), _array(rows, 2 * heads, 1)
        half = head_width // 2
        self._halves = [
            (self._both[..., half:], self._crossed[..., :half], slice(0, half)),
            (self._both[..., :half], self._crossed[..., half:], slice(half, None)),
        ]

    def move_to(self, cos: Floats, sin: Floats) -> None:
        self._cos = cos
        self._crossings = [(other, out, np.ascontiguousarray(sin[..., part])) for other, out, part in self._halves]

    def rotate(self) -> None:
        """Rotates query and key, computes the norms of both, and normalises the query."""
        np.multiply(self._both, self._cos, out=self._rotated)
        for other, out, sin in self._crossings:
            np.multiply(other, sin, out=out)
        self._rotated += self._crossed
        _root_mean_square(self._rotated, self._size)
        np.divide(self._rotated[:, : self._heads], self._size[:, : self._heads], out=self._query)

    def mix(self, draft: DraftRows, rows: slice, layer: int) -> None:
        """Stores the rows' keys and values and attends to all earlier ones. Query and key are normalised, so no score
        exceeds √W, and exp cannot overflow."""
        at, end = draft.filled, draft.filled + 1
        np.divide(self._rotated[rows, self._heads :], self._size[rows, self._heads :], out=draft.keys[layer][:, :, at])
        draft.values[layer][:, :, at] = self._value[rows]
        query = self._query[rows].reshape(-1, 1, self._query.shape[-1])
        mixed = self._mixed[rows].reshape(query.shape)
        shares = np.matmul(query, draft.transposed_keys[layer][:, :, :end])
        shares *= self._scale
        np.exp(shares, out=shares)
        np.matmul(shares, draft.flat_values[layer][:, :end], out=mixed)
        mixed /= np.add.reduce(shares, -1, keepdims=True)


def _norm(x: Floats, size: Floats, out: Floats) -> None:
    _root_mean_square(x, size)
    np.divide(x, size, out=out)


def _root_mean_square(x: Floats, out: Floats) -> None:
    np.vecdot(x, x, out=out[..., 0])
    out *= 1 / x.shape[-1]
    out += EPSILON
    np.sqrt(out, out=out)


def _array(*shape: int) -> Floats:
    return np.empty(shape, np.float32)
