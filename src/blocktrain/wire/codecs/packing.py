"""Numbers of a few bits, and rising places, to bytes and back. Pure numpy, many rows at once; knows no codec.
Next: integers.py, sparse.py and vector.py, which use it; docs/protocol.md, "Codecs", the same byte by byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def pack(codes: Bytes, bits: int) -> Bytes:
    """Codes of at most eight bits. Every eight codes of a row become `bits` whole bytes; zeros fill the last eight."""
    rows, groups = len(codes), ceil_div(codes.shape[1], 8)
    if bits == 8 and codes.shape[1] == 8 * groups:
        return codes
    if bits == 1:
        return np.packbits(codes, axis=1, bitorder="little")
    if missing := groups * 8 - codes.shape[1]:
        codes = np.concatenate([codes, np.zeros((rows, missing), np.uint8)], axis=1)
    if bits == 4:
        return codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    eights = codes.reshape(rows, groups, 8)
    words = np.zeros((rows, groups, 1), "<u8")
    for i in range(8):
        words[..., 0] |= eights[..., i].astype(np.uint64) << np.uint64(i * bits)
    return words.view(np.uint8)[..., :bits].reshape(rows, groups * bits)


def unpack(packed: Bytes, bits: int, count: int) -> Bytes:
    """The first `count` codes of each row."""
    rows, groups = len(packed), ceil_div(count, 8)
    if bits == 8:
        return packed[:, :count]
    if bits == 1:
        return np.unpackbits(packed, axis=1, count=count, bitorder="little")
    if bits == 4:
        return np.stack([packed & 15, packed >> 4], axis=2).reshape(rows, groups * 8)[:, :count]
    padded = np.zeros((rows, groups, 8), np.uint8)
    padded[..., :bits] = packed.reshape(rows, groups, bits)
    words = padded.view("<u8")[..., 0]
    codes = np.empty((rows, groups, 8), np.uint8)
    for i in range(8):
        codes[..., i] = words >> np.uint64(i * bits) & np.uint64(2**bits - 1)
    return codes.reshape(rows, groups * 8)[:, :count]


@dataclass(frozen=True)
class EliasFano:
    """Rising places of each row (Elias 1974, Fano 1971): `count` different numbers below `size`. The low bits of each
    place are stored as they are. The high bits go into a bitmap, where place i sets bit (place >> low_bits) + i."""

    count: int
    size: int

    @property
    def low_bits(self) -> int:
        return min(8, (self.size // self.count).bit_length() - 1)

    @property
    def high_bits(self) -> int:
        """The length of the bitmap: one bit per place and one bit per step of the high bits."""
        return self.count + ((self.size - 1) >> self.low_bits)

    @property
    def low_bytes(self) -> int:
        return ceil_div(self.count, 8) * self.low_bits

    @property
    def high_bytes(self) -> int:
        return ceil_div(self.high_bits, 8)

    def pack(self, places: NDArray[np.int64]) -> tuple[Bytes, Bytes]:
        low = (places & (2**self.low_bits - 1)).astype(np.uint8)
        bitmap = np.zeros((len(places), self.high_bits), np.uint8)
        starts = self.high_bits * np.arange(len(places))[:, None]
        bitmap.reshape(-1)[(places >> self.low_bits) + np.arange(self.count) + starts] = 1
        return pack(low, self.low_bits), np.packbits(bitmap, axis=1, bitorder="little")

    def unpack(self, low: Bytes, high: Bytes) -> NDArray[np.int64]:
        """ValueError if a row does not hold exactly `count` rising places below `size`."""
        bitmap = np.unpackbits(high, axis=1, bitorder="little")
        counts = bitmap.sum(axis=1, dtype=np.int64)
        if (wrong := counts != self.count).any():
            raise ValueError(f"a chunk holds {counts[wrong][0]} places and {self.count} are expected")
        flat = np.flatnonzero(bitmap.view(np.bool)).reshape(len(low), self.count)
        upper = flat - (bitmap.shape[1] * np.arange(len(low))[:, None] + np.arange(self.count))
        places: NDArray[np.int64] = (upper << self.low_bits) | unpack(low, self.low_bits, self.count)
        if (places >= self.size).any():
            raise ValueError(f"a place is {places.max()} in a chunk of {self.size} values")
        if (places[:, 1:] <= places[:, :-1]).any():
            raise ValueError("the places of a chunk repeat or do not rise")
        return places
