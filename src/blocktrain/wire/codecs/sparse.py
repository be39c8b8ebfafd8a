"""The largest values alone: of each row so many, each a sign and, where there is more than one, one of a few levels
fitted to the row; their places as Elias-Fano. Pure: knows nothing of updates.
Next: codecs.py, which sends it; packing.py, its bits; docs/protocol.md, "Codecs", the same byte by byte."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blocktrain.wire.codecs.packing import Bytes, EliasFano, pack, unpack
from blocktrain.wire.safetensors import BFLOAT16, Array, Floats

_LLOYD_ROUNDS = 6


@dataclass(frozen=True)
class Largest:
    """Of rows of one length."""

    codes: Bytes  # level and sign of each value
    high: Bytes  # the places, as Elias-Fano
    levels: Array  # bfloat16, [rows, levels]
    low: Bytes


@dataclass(frozen=True)
class Scattered:
    """Values that are zero but in some places of the whole vector, rising."""

    places: NDArray[np.int64]
    values: Floats

    def slice(self, begin: int, end: int) -> Floats:
        first, last = np.searchsorted(self.places, [begin, end])
        values = np.zeros(end - begin, np.float32)
        values[self.places[first:last] - begin] = self.values[first:last]
        return values


def largest(rows: Floats, count: int, places: EliasFano, value_bits: int) -> Largest:
    """`count` of the values are meant; zeros fill the last row."""
    num_levels, length = 1 << value_bits - 1, rows.shape[1]
    chosen = np.sort(np.argpartition(np.abs(rows), length - places.count, axis=1)[:, -places.count :], axis=1)
    kept = np.take_along_axis(rows, chosen, axis=1)
    meant = chosen + length * np.arange(len(rows))[:, None] < count
    levels = _fit_levels(np.abs(kept), meant, num_levels).astype(BFLOAT16)
    codes = (_nearest(np.abs(kept), levels.astype(np.float32)) + num_levels * (kept < 0)).astype(np.uint8)
    low, high = places.pack(chosen)
    return Largest(codes=pack(codes, value_bits), high=high, levels=levels, low=low)


def scattered(parts: Largest, count: int, places: EliasFano, value_bits: int) -> Scattered:
    """The reverse; ValueError where places do not rise."""
    in_row = places.unpack(parts.low, parts.high)
    in_vector: NDArray[np.int64] = (in_row + places.size * np.arange(len(in_row))[:, None]).ravel()
    codes, num_levels = unpack(parts.codes, value_bits, places.count), 1 << value_bits - 1
    magnitude = np.take_along_axis(parts.levels.astype(np.float32), codes.astype(np.intp) % num_levels, axis=1)
    values = np.where(codes < num_levels, magnitude, -magnitude).ravel()
    within = int(np.searchsorted(in_vector, count))  # the rest lies in the zeros that filled the last row
    return Scattered(in_vector[:within], values[:within])


def _fit_levels(magnitude: Floats, meant: NDArray[np.bool], count: int) -> Floats:
    """The levels of each row that lie nearest to its values in the mean square: Lloyd (1982), from the quantiles."""
    quantiles = [(2 * i + 1) * magnitude.shape[1] // (2 * count) for i in range(count)]
    levels = np.sort(magnitude, axis=1)[:, quantiles]
    for _ in range(_LLOYD_ROUNDS):
        mine = _nearest(magnitude, levels)[:, :, None] == np.arange(count)
        totals = np.where(mine, magnitude[:, :, None], 0).sum(axis=1, dtype=np.float32)
        members = (mine & meant[:, :, None]).sum(axis=1, dtype=np.float32)
        levels = np.where(members > 0, totals / np.maximum(members, 1), levels)
    return levels


def _nearest(magnitude: Floats, levels: Floats) -> NDArray[np.intp]:
    nearest: NDArray[np.intp] = np.abs(magnitude[:, :, None] - levels[:, None, :]).argmin(axis=2)
    return nearest
