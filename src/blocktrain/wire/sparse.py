"""The largest values alone: of each row so many, each a sign and, where there is more than one, one of a few levels
fitted to the row; their places as Elias-Fano. Pure: knows nothing of updates.
Next: codecs.py, which sends it; packing.py, its bits; docs/protocol.md, "Codecs", the same byte by byte."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.wire.packing import EliasFano, pack, unpack

_LLOYD_ROUNDS = 6


@dataclass(frozen=True)
class Largest:
    """Of rows of one length."""

    codes: Tensor  # uint8: level and sign of each value
    high: Tensor  # uint8: the places, as Elias-Fano
    levels: Tensor  # bfloat16, [rows, levels]
    low: Tensor  # uint8


@dataclass(frozen=True)
class Scattered:
    """Values that are zero but in some places of the whole vector, rising."""

    places: Tensor
    values: Tensor

    def slice(self, begin: int, end: int) -> Tensor:
        first, last = torch.searchsorted(self.places, torch.tensor([begin, end])).tolist()
        return torch.zeros(end - begin).index_copy_(0, self.places[first:last] - begin, self.values[first:last])


def largest(rows: Tensor, count: int, places: EliasFano, value_bits: int) -> Largest:
    """`count` of the values are meant; zeros fill the last row."""
    num_levels, length = 1 << value_bits - 1, rows.shape[1]
    chosen = rows.abs().topk(places.count, dim=1, sorted=False).indices.sort(dim=1).values
    kept = rows.gather(1, chosen)
    meant = chosen + length * torch.arange(len(rows)).unsqueeze(1) < count
    levels = _fit_levels(kept.abs(), meant.float(), num_levels).bfloat16()
    codes = (_nearest(kept.abs(), levels.float()) + num_levels * (kept < 0)).to(torch.uint8)
    low, high = places.pack(chosen.numpy())
    return Largest(
        codes=torch.from_numpy(pack(codes.numpy(), value_bits)),
        high=torch.from_numpy(high),
        levels=levels,
        low=torch.from_numpy(low),
    )


def scattered(parts: Largest, count: int, places: EliasFano, value_bits: int) -> Scattered:
    """The reverse; ValueError where places do not rise."""
    in_row = places.unpack(parts.low.numpy(), parts.high.numpy())
    in_vector: NDArray[np.int64] = (in_row + places.size * np.arange(len(in_row))[:, None]).ravel()
    codes, num_levels = (
        torch.from_numpy(unpack(parts.codes.numpy(), value_bits, places.count)).long(),
        1 << value_bits - 1,
    )
    magnitude = parts.levels.float().gather(1, codes % num_levels)
    values = torch.where(codes < num_levels, magnitude, -magnitude).flatten()
    within = int(np.searchsorted(in_vector, count))  # the rest lies in the zeros that filled the last row
    return Scattered(torch.from_numpy(in_vector[:within]), values[:within])


def _fit_levels(magnitude: Tensor, weight: Tensor, count: int) -> Tensor:
    """The levels of each row that lie nearest to its values in the mean square: Lloyd (1982), from the quantiles."""
    quantiles = [(2 * i + 1) * magnitude.shape[1] // (2 * count) for i in range(count)]
    levels = magnitude.sort(dim=1).values[:, quantiles]
    for _ in range(_LLOYD_ROUNDS):
        nearest = _nearest(magnitude, levels)
        totals = torch.zeros_like(levels).scatter_add_(1, nearest, magnitude)
        members = torch.zeros_like(levels).scatter_add_(1, nearest, weight)
        levels = torch.where(members > 0, totals / members.clamp(min=1), levels)
    return levels


def _nearest(magnitude: Tensor, levels: Tensor) -> Tensor:
    return (magnitude.unsqueeze(2) - levels.unsqueeze(1)).abs().argmin(dim=2)
