"""Blocks whose matrices stay where they lie (a mapped file) and pass through memory one by one, so that a block may be
larger than the memory. For running only, not for training. Next: io/tensor_file.py, where the matrices lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from blocktrain.model.block import Block, build_block
from blocktrain.model.transformer import Layer
from blocktrain.spec import RunSpec

MATRICES = ("query", "key", "value", "attention_out", "up", "down")  # in the order in which a layer uses them
TILE_VALUES = 2**20  # upcast at a time: 4 MiB stay in the processor's cache
ALIGNMENT_BYTES = 64  # of torch's own tensors


class Shelf(Protocol):
    """Where the matrices lie."""

    def expect(self, tensor: Tensor) -> None: ...

    def release(self, tensor: Tensor) -> None: ...


class Stream:
    """Multiplies by matrices that only pass through: the next one is called for while this one works, and this one is
    released when it is done.

    A processor computes in float32 whatever is stored, a graphics card in what is stored, where it is fast."""

    def __init__(self, shelf: Shelf, order: Sequence[Tensor]) -> None:
        self._shelf = shelf
        self._next = {id(each): after for each, after in zip(order, (*order[1:], order[0]), strict=True)}
        self._tile = torch.empty(0)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        self._shelf.expect(self._next[id(weight)])
        if x.device.type != "cpu":
            here = weight.to(x.device)
            product = F.linear(x.to(here.dtype), here).to(x.dtype)
        elif weight.dtype == x.dtype:
            product = F.linear(x, _aligned(weight))
        else:
            product = self._by_tiles(x, weight)
        self._shelf.release(weight)
        return product

    def _by_tiles(self, x: Tensor, weight: Tensor) -> Tensor:
        """Some rows at a time, upcast into one buffer: never a whole matrix twice."""
        rows, columns = weight.shape
        x_flat = x.reshape(-1, columns)
        product = x.new_empty(rows, x_flat.size(0))
        for first in range(0, rows, max(1, TILE_VALUES // columns)):
            stored = weight[first : first + max(1, TILE_VALUES // columns)]
            tile = self._room(stored.shape, x.dtype).copy_(stored)
            torch.mm(tile, x_flat.T, out=product[first : first + len(stored)])
        return product.T.reshape(*x.shape[:-1], rows)

    def _room(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if self._tile.numel() < shape.numel() or self._tile.dtype != dtype:
            self._tile = torch.empty(shape.numel(), dtype=dtype)
        return self._tile[: shape.numel()].view(shape)


class StreamedLayer(Layer):
    """A layer without memory of its own."""

    def __init__(self, heads: int, matrices: Mapping[str, Tensor], stream: Stream) -> None:
        nn.Module.__init__(self)
        self.heads = heads
        self.query, self.key, self.value, self.attention_out, self.up, self.down = map(matrices.__getitem__, MATRICES)
        self._stream = stream

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._stream.multiply(x, weight)


def streamed_block(spec: RunSpec, index: int, tensors: Mapping[str, Tensor], shelf: Shelf) -> Block:
    """A block over tensors that stay on their shelf. Embedding and read-out, which are small, are copied."""
    layers = [
        {name: tensors[f"layers.{real}.{name}"] for name in MATRICES}
        for real in range(spec.model.physical_layers_of(index))
    ]
    stream = Stream(shelf, [matrices[name] for matrices in layers for name in MATRICES])
    block = build_block(spec, index, [StreamedLayer(spec.model.heads, matrices, stream) for matrices in layers])
    tables = {name: tensor for name, tensor in tensors.items() if not name.startswith("layers.")}
    block.load_state_dict(tables)
    for table in tables.values():
        shelf.release(table)
    return block.requires_grad_(False).eval()


def _aligned(weight: Tensor) -> Tensor:
    """Placed as torch places its own, so that sums are taken in the same order, to the last bit."""
    return weight if weight.data_ptr() % ALIGNMENT_BYTES == 0 else weight.clone()
