"""sparse: the `kept` largest of every `chunk` values (as SparseLoCo, arXiv 2603.08163) and zero for the others. Each
kept value is a sign and one of a few levels that are fitted to its chunk. The places are stored as Elias-Fano.
Next: base.py, what a codec is; packing.py, places as bits; docs/protocol.md, "Codecs", the same byte by byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from blocktrain.wire.codecs.base import (
    LARGE_PIECE,
    MAX_MAGNITUDE,
    UINT8,
    Codec,
    PartType,
    Values,
    as_rows,
    damaged,
    encode_pieces,
    require_between,
    require_within,
)
from blocktrain.wire.codecs.packing import EliasFano, ceil_div, pack, unpack
from blocktrain.wire.safetensors import BFLOAT16, Array, Floats

CHUNK = 4096
MAX_CHUNK = 2**16

_LLOYD_ROUNDS = 6


@dataclass(frozen=True)
class Sparse(Codec):
    name, uses_course = "sparse", True

    chunk: int = CHUNK
    kept: int = 64
    value_bits: int = 1  # of a kept value: its sign, and its level if there are several

    def __post_init__(self) -> None:
        require_between("chunk", self.chunk, 1, MAX_CHUNK)
        require_between("kept", self.kept, 1, self.chunk)
        require_between("value_bits", self.value_bits, 1, 4)

    @property
    def levels(self) -> int:
        return 1 << self.value_bits - 1

    @property
    def places(self) -> EliasFano:
        return EliasFano(self.kept, self.chunk)

    @classmethod
    def for_budget(cls, bits_per_value: float) -> Self:
        """The most kept values, a multiple of eight, that the bits of a chunk hold: from eight to half of the chunk."""
        codecs = (cls(kept=kept) for kept in range(8, CHUNK // 2 + 1, 8))
        fitting = [codec.kept for codec in codecs if 8 * codec.num_bytes(CHUNK) <= bits_per_value * CHUNK]
        return cls(kept=max(fitting, default=8))

    def covers(self, other: Codec) -> bool:
        return isinstance(other, Sparse) and other.kept <= self.kept and replace(other, kept=self.kept) == self

    def parts(self, size: int) -> dict[str, PartType]:
        rows, places = ceil_div(size, self.chunk), self.places
        return {
            "codes": (UINT8, (rows, ceil_div(self.kept, 8) * self.value_bits)),
            "high": (UINT8, (rows, places.high_bytes)),
            "levels": (BFLOAT16, (rows, self.levels)),
            "low": (UINT8, (rows, places.low_bytes)),
        }

    def encode(self, values: Values, size: int) -> dict[str, Array]:
        return encode_pieces(self, values, size, self.chunk, self._encode_piece, LARGE_PIECE)

    def _encode_piece(self, piece: Floats) -> dict[str, Array]:
        rows = as_rows(piece, self.chunk)
        chosen = _largest_places(rows, self.kept)
        kept = np.take_along_axis(rows, chosen, axis=1)
        magnitude = np.abs(kept)
        codes = (kept < 0).view(np.uint8) * np.uint8(self.levels)
        places = chosen + self.chunk * np.arange(len(rows))[:, None]
        is_value = places < len(piece)  # not a zero that fills the last row
        if self.levels == 1:
            members = np.maximum(is_value.sum(axis=1, keepdims=True, dtype=np.float32), 1)
            levels = (magnitude.sum(axis=1, keepdims=True, dtype=np.float32) / members).astype(BFLOAT16)
        else:
            levels = _fit_levels(magnitude, is_value, self.levels).astype(BFLOAT16)
            codes += _nearest(magnitude, levels.astype(np.float32)).astype(np.uint8)
        low, high = self.places.pack(chosen)
        return {"codes": pack(codes, self.value_bits), "high": high, "levels": levels, "low": low}

    def decode(self, parts: Mapping[str, Array], size: int) -> Values:
        require_within(parts["levels"], MAX_MAGNITUDE, "levels")
        try:
            in_row = self.places.unpack(parts["low"], parts["high"])
        except ValueError as error:
            raise damaged(str(error)) from None
        codes = unpack(parts["codes"], self.value_bits, self.kept)
        signed = np.concatenate([parts["levels"], -parts["levels"]], axis=1).astype(np.float32)
        signed_at = codes + (2 * self.levels * np.arange(len(codes)))[:, None]
        in_vector = (in_row + self.chunk * np.arange(len(in_row))[:, None]).reshape(-1)
        num_values = int(np.searchsorted(in_vector, size))  # the others are zeros that filled the last row
        return _SparseValues(in_vector[:num_values], signed.reshape(-1).take(signed_at.reshape(-1)[:num_values]))


@dataclass(frozen=True)
class _SparseValues:
    """Zero except at some places of the vector. The places rise."""

    places: NDArray[np.int64]
    values: Floats

    def slice(self, begin: int, end: int) -> Floats:
        first, last = np.searchsorted(self.places, [begin, end])
        values = np.zeros(end - begin, np.float32)
        values[self.places[first:last] - begin] = self.values[first:last]
        return values


def _largest_places(rows: Floats, kept: int) -> NDArray[np.int64]:
    """The rising places of the `kept` largest magnitudes of each row."""
    magnitude = np.abs(rows)
    smallest = np.partition(magnitude, rows.shape[1] - kept, axis=1)[:, -kept, None]
    places: NDArray[np.int64] = np.flatnonzero(magnitude >= smallest)
    if len(places) > kept * len(rows):  # some are equal
        places = np.sort(np.argpartition(magnitude, rows.shape[1] - kept, axis=1)[:, -kept:], axis=1)
    in_row: NDArray[np.int64] = places.reshape(len(rows), kept) % rows.shape[1]
    return in_row


def _fit_levels(magnitude: Floats, is_value: NDArray[np.bool], count: int) -> Floats:
    """The levels of each row with the least squared distance to its values: Lloyd (1982), starting at the quantiles."""
    quantiles = [(2 * i + 1) * magnitude.shape[1] // (2 * count) for i in range(count)]
    levels = np.sort(magnitude, axis=1)[:, quantiles]
    for _ in range(_LLOYD_ROUNDS):
        mine = _nearest(magnitude, levels)[:, :, None] == np.arange(count)
        totals = np.where(mine, magnitude[:, :, None], 0).sum(axis=1, dtype=np.float32)
        members = (mine & is_value[:, :, None]).sum(axis=1, dtype=np.float32)
        levels = np.where(members > 0, totals / np.maximum(members, 1), levels)
    return levels


def _nearest(magnitude: Floats, levels: Floats) -> NDArray[np.intp]:
    nearest: NDArray[np.intp] = np.abs(magnitude[:, :, None] - levels[:, None, :]).argmin(axis=2)
    return nearest
