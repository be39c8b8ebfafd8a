"""Quick steps: a byte more of several rows of text on the CPU: what `Block.step` computes, to rounding. A single byte
costs its operations, not its arithmetic, so what is no matrix is done by numpy, whose calls take a third of torch's
time, into arrays that are already there. Next: serve/segment/drafting.py, which writes drafts with it."""

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
LARGEST_BYTES = 2**28  # of a block's matrices; the time of larger ones is arithmetic, and here they are kept twice


@dataclass(frozen=True)
class QuickLayer:
    """A layer's matrices as they are multiplied from the right, with the modulation multiplied in."""

    heads: int
    look: Tensor  # [D, 3 D]: query, key and value
    attention_out: Tensor
    up: Tensor
    down: Tensor
    look_shift: Floats | None  # [3 D], what a modulation adds
    up_shift: Floats | None  # [4 D]


@dataclass(frozen=True)
class QuickBlock:
    table: Floats  # [256, D]: what each byte brings into the stream
    layers: tuple[QuickLayer, ...]
    first_layer: int  # its number in memories
    continues: bool  # the stream of the block before

    @classmethod
    def of(cls, block: Block, first_layer: int) -> QuickBlock | None:
        """None where the block's own `step` is the way: on other devices, in other precisions, from the disk, large."""
        real = [layer for layer in block.layers if type(layer) is Layer]
        matrices = [matrix for layer in real for matrix in layer.parameters()]
        usual = all(each.device.type == "cpu" and each.dtype == torch.float32 for each in (*matrices, block.embedding))
        if len(real) < len(block.layers) or not usual or sum(each.nbytes for each in matrices) > LARGEST_BYTES:
            return None
        own = lean_norm(block.embedding.detach())
        gain = block.step_gain
        table = own if gain is None else gain.detach() * own
        layers = [quick_layer(layer, block.step_modulation) for layer in real]
        shared = tuple(layers[index % len(layers)] for index in range(block.num_layers))
        return cls(table.numpy(), shared, first_layer, continues=gain is not None)


def quick_layer(layer: Layer, modulation: Modulation | None) -> QuickLayer:
    look = torch.cat([layer.query, layer.key, layer.value]).detach()
    out, up, down = (matrix.detach() for matrix in (layer.attention_out, layer.up, layer.down))
    look_shift = up_shift = None
    if modulation is not None:
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = (each.detach().flatten() for each in modulation)
        look_shift, up_shift = F.linear(shift_a, look).numpy(), F.linear(shift_m, up).numpy()
        look, up = look * (1 + scale_a), up * (1 + scale_m)
        out, down = out * (1 + gate_a)[:, None], down * (1 + gate_m)[:, None]
    look, out, up, down = (matrix.T.contiguous() for matrix in (look, out, up, down))
    return QuickLayer(layer.heads, look, out, up, down, look_shift, up_shift)


class Lane:
    """Rows that continue one text side by side, with their keys and values, [R, H, capacity, W] a layer: those of a
    fan, or a single text's own memory. There is room for all that will be written."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor], filled: int) -> None:
        self.rows, self.filled = keys[0].size(0), filled
        self.keys, self.values = ([each.numpy() for each in side] for side in (keys, values))
        flat_keys, self.flat_values = (
            [each.reshape(-1, *each.shape[2:]) for each in s] for s in (self.keys, self.values)
        )
        self.turned_keys = [each.transpose(0, 2, 1) for each in flat_keys]


class QuickSteps:
    """Steps of the rows of all lanes together; `step` fills the next position of each, `rows` says whose are whose."""

    def __init__(self, blocks: Sequence[QuickBlock], rotary: tuple[Tensor, Tensor], lanes: Sequence[Lane]) -> None:
        self._blocks, self._lanes = blocks, lanes
        cos, sin = rotary
        self._cos, self._sin = torch.cat([cos, cos], -1).numpy(), torch.cat([-sin, sin], -1).numpy()
        rows, width, heads = sum(lane.rows for lane in lanes), blocks[0].table.shape[1], blocks[0].layers[0].heads
        self._row_lanes = np.repeat(np.arange(len(lanes)), [lane.rows for lane in lanes])
        ends = np.cumsum([lane.rows for lane in lanes]).tolist()
        self.rows = [slice(end - lane.rows, end) for lane, end in zip(lanes, ends, strict=True)]
        self._attention = _Attention(rows, heads, width)
        self._normed, self._added, self._wide = _array(rows, width), _array(rows, width), _array(rows, 4 * width)
        self._size = _array(rows, 1)
        self._normed_t, self._added_t, self._wide_t = map(torch.from_numpy, (self._normed, self._added, self._wide))

    def step(self, bytes_T: npt.NDArray[np.integer]) -> list[Floats]:
        """The rows' next bytes in, the hidden stream after each block [T, D] out."""
        filled = np.array([lane.filled for lane in self._lanes])[self._row_lanes]
        self._attention.turn_to(self._cos[filled][:, None], self._sin[filled][:, None])
        each: list[Floats] = []
        for block in self._blocks:
            hidden = block.table[bytes_T]
            if block.continues and each:
                hidden += each[-1]
            for number, layer in enumerate(block.layers, block.first_layer):
                self._look_back(layer, number, hidden)
                self._think(layer, hidden)
            each.append(hidden)
        for lane in self._lanes:
            lane.filled += 1
        return each

    def _look_back(self, layer: QuickLayer, number: int, hidden: Floats) -> None:
        attention = self._attention
        _norm(hidden, self._size, self._normed)
        torch.mm(self._normed_t, layer.look, out=attention.seen_t)
        if layer.look_shift is not None:
            attention.seen += layer.look_shift
        attention.turn()
        for lane, rows in zip(self._lanes, self.rows, strict=True):
            attention.mix(lane, rows, number)
        torch.mm(attention.mixed_t, layer.attention_out, out=self._added_t)
        hidden += self._added

    def _think(self, layer: QuickLayer, hidden: Floats) -> None:
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
    """The arrays between query, key and value of all rows and what attention makes of them."""

    def __init__(self, rows: int, heads: int, width: int) -> None:
        head_width = width // heads
        self._heads, self._scale = heads, head_width**-0.5
        self.seen, self._mixed = _array(rows, 3 * width), _array(rows, heads, head_width)
        self.seen_t, self.mixed_t = torch.from_numpy(self.seen), torch.from_numpy(self._mixed.reshape(rows, width))
        self._both = self.seen[:, : 2 * width].reshape(rows, 2 * heads, head_width)
        self._value = self.seen[:, 2 * width :].reshape(rows, heads, head_width)
        self._turned, self._crossed = _array(rows, 2 * heads, head_width), _array(rows, 2 * heads, head_width)
        self._query, self._size = _array(rows, heads, head_width), _array(rows, 2 * heads, 1)
        half = head_width // 2
        self._halves = [
            (self._both[..., half:], self._crossed[..., :half], slice(0, half)),
            (self._both[..., :half], self._crossed[..., half:], slice(half, None)),
        ]

    def turn_to(self, cos: Floats, sin: Floats) -> None:
        self._cos = cos
        self._crossings = [(other, out, np.ascontiguousarray(sin[..., part])) for other, out, part in self._halves]

    def turn(self) -> None:
        """Rotates query and key, and norms them: the lengths of both, then the query itself."""
        np.multiply(self._both, self._cos, out=self._turned)
        for other, out, sin in self._crossings:
            np.multiply(other, sin, out=out)
        self._turned += self._crossed
        _root_mean_square(self._turned, self._size)
        np.divide(self._turned[:, : self._heads], self._size[:, : self._heads], out=self._query)

    def mix(self, lane: Lane, rows: slice, layer: int) -> None:
        """Keeps the rows' keys and values, and mixes the values they look back at. Query and key are normed, so that
        no score is beyond √W: nothing overflows without the largest taken off first."""
        at, end = lane.filled, lane.filled + 1
        np.divide(self._turned[rows, self._heads :], self._size[rows, self._heads :], out=lane.keys[layer][:, :, at])
        lane.values[layer][:, :, at] = self._value[rows]
        query = self._query[rows].reshape(-1, 1, self._query.shape[-1])
        mixed = self._mixed[rows].reshape(query.shape)
        shares = np.matmul(query, lane.turned_keys[layer][:, :, :end])
        shares *= self._scale
        np.exp(shares, out=shares)
        np.matmul(shares, lane.flat_values[layer][:, :end], out=mixed)
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
