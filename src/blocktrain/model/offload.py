"""Offloading: blocks whose matrices stay in a mapped file and pass through memory one by one, so that a block may be
larger than the memory. For inference, not for training. Next: io/tensor_file.py maps the files."""

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
TILE_VALUES = 2**20  # upcast at once: 4 MiB stay in the processor's cache
ALIGNMENT_BYTES = 64  # of torch's own tensors


class TensorStore(Protocol):
    """Holds the matrices outside of the memory (io/tensor_file.py)."""

    def expect(self, tensor: Tensor) -> None: ...

    def release(self, tensor: Tensor) -> None: ...


class WeightStream:
    """Multiplies by matrices of a store, in a fixed order. It prefetches the next matrix during a product and releases
    the present one after it.

    A CPU computes in float32, whatever is stored; a GPU computes in the stored precision."""

    def __init__(self, store: TensorStore, order: Sequence[Tensor]) -> None:
        self._store = store
        self._next = {id(each): after for each, after in zip(order, (*order[1:], order[0]), strict=True)}
        self._tile = torch.empty(0)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        self._store.expect(self._next[id(weight)])
        if x.device.type != "cpu":
            here = weight.to(x.device)
            product = F.linear(x.to(here.dtype), here).to(x.dtype)
        elif weight.dtype == x.dtype:
            product = F.linear(x, _aligned(weight))
        else:
            product = self._by_tiles(x, weight)
        self._store.release(weight)
        return product

    def _by_tiles(self, x: Tensor, weight: Tensor) -> Tensor:
        """Upcasts some rows at a time into one buffer, so that there is never a second copy of the matrix."""
        rows, columns = weight.shape
        x_flat = x.reshape(-1, columns)
        product = x.new_empty(rows, x_flat.size(0))
        for first in range(0, rows, max(1, TILE_VALUES // columns)):
            stored = weight[first : first + max(1, TILE_VALUES // columns)]
            tile = self._buffer(stored.shape, x.dtype).copy_(stored)
            torch.mm(tile, x_flat.T, out=product[first : first + len(stored)])
        return product.T.reshape(*x.shape[:-1], rows)

    def _buffer(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if self._tile.numel() < shape.numel() or self._tile.dtype != dtype:
            self._tile = torch.empty(shape.numel(), dtype=dtype)
        return self._tile[: shape.numel()].view(shape)


class OffloadedLayer(Layer):
    """A layer whose matrices stay in the store."""

    def __init__(self, heads: int, matrices: Mapping[str, Tensor], stream: WeightStream) -> None:
        nn.Module.__init__(self)
        self.heads = heads
        self.query, self.key, self.value, self.attention_out, self.up, self.down = map(matrices.__getitem__, MATRICES)
        self._stream = stream

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._stream.multiply(x, weight)


def offloaded_block(spec: RunSpec, index: int, tensors: Mapping[str, Tensor], store: TensorStore) -> Block:
    """A block whose matrices stay in the store. Embedding and read-out are small and are copied."""
    layers = [
        {name: tensors[f"layers.{real}.{name}"] for name in MATRICES}
        for real in range(spec.model.physical_layers_of(index))
    ]
    stream = WeightStream(store, [matrices[name] for matrices in layers for name in MATRICES])
    block = build_block(spec, index, [OffloadedLayer(spec.model.heads, matrices, stream) for matrices in layers])
    tables = {name: tensor for name, tensor in tensors.items() if not name.startswith("layers.")}
    block.load_state_dict(tables)
    for table in tables.values():
        store.release(table)
    return block.requires_grad_(False).eval()


def _aligned(weight: Tensor) -> Tensor:
    """Aligned as torch aligns its own tensors, so that sums have the same order and the same bits."""
    return weight if weight.data_ptr() % ALIGNMENT_BYTES == 0 else weight.clone()
