"""vector: for every 32 values the nearest of 1024 sign vectors, times a gain per row of 1024 values. The rest of a row
is coded again with other sign vectors, stage after stage; the stages go to the rows with the most left. `spent` is the
number of stages per 1000 rows.

A random rotation of each row (signs and a Hadamard transform) comes first and makes its values normally distributed.
Sign vectors are near normal values, but far from a few large values among many small ones, which is what remains unsent
after some rounds. Every update draws its own sign vectors and rotation, so that the errors of many updates do not add
up. At a third of a bit per value this is near the theoretical limit; `sparse` holds about half as much.
Next: base.py, what a codec is; packing.py, words as bits; docs/protocol.md, "Codecs", the same byte by byte.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from blocktrain.wire.codecs.base import (
    MAX_MAGNITUDE,
    PIECE,
    UINT8,
    Codec,
    PartType,
    Values,
    as_rows,
    damaged,
    require_between,
    require_within,
)
from blocktrain.wire.codecs.packing import ceil_div, pack, unpack
from blocktrain.wire.safetensors import BFLOAT16, Array, Floats

GROUP = 32  # values that one sign vector stands for
ROW = 1024  # values that share the gains of their stages
WORDS = 512  # sign vectors of a stage; each also stands for its negative
MAX_STAGES = 32  # of a row
MAX_SPENT = 500 * MAX_STAGES
BOOK_BYTES = 4  # they choose the sign vectors and the rotation of an update
LOW_BYTES = ROW // GROUP  # of a stage: eight bits of each word
HIGH_BYTES = LOW_BYTES // 4  # of a stage: the ninth bit of each word and its sign
STAGE_BITS = 8 * (LOW_BYTES + HIGH_BYTES) + 16  # with the gain

_LEFT_BY_STAGE = 0.714  # share of a row's energy that a stage leaves, measured on normal values
_TINY = 2.0**-120
_HUGE = 2.0**100  # larger values are sent as this, so that no sum overflows
_ROWS_AT_ONCE = 64  # their products stay in a processor's cache
_CACHED_PIECES = 8
_HADAMARD = np.array([[(-1) ** (i & j).bit_count() for j in range(GROUP)] for i in range(GROUP)], np.float32)


@dataclass(frozen=True)
class Vector(Codec):
    name, uses_course = "vector", True

    spent: int = 1000

    def __post_init__(self) -> None:
        require_between("spent", self.spent, 1, MAX_SPENT)

    @classmethod
    def for_budget(cls, bits_per_value: float) -> Self:
        spent = int(1000 * (bits_per_value * ROW - 8) / STAGE_BITS)  # a row's count of stages takes eight bits
        return cls(min(max(1, spent), MAX_SPENT))

    def covers(self, other: Codec) -> bool:
        return isinstance(other, Vector) and other.spent <= self.spent

    def num_stages(self, size: int) -> int:
        return ceil_div(ceil_div(size, ROW) * self.spent, 1000)

    def parts(self, size: int) -> dict[str, PartType]:
        stages = self.num_stages(size)
        return {
            "book": (UINT8, (BOOK_BYTES,)),
            "gains": (BFLOAT16, (stages, 1)),
            "high": (UINT8, (stages, HIGH_BYTES)),
            "low": (UINT8, (stages, LOW_BYTES)),
            "counts": (UINT8, (ceil_div(size, ROW),)),
        }

    def encode(self, values: Values, size: int) -> dict[str, Array]:
        rows, num_stages = as_rows(values.slice(0, size), ROW), self.num_stages(size)
        norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
        book = hashlib.sha256(norms.tobytes()).digest()[:BOOK_BYTES]  # other values get another book
        counts = _stages_per_row(norms, num_stages)
        starts = _first_stages(counts)
        words = np.zeros((num_stages, LOW_BYTES), np.uint16)
        gains = np.zeros((num_stages, 1), BFLOAT16)
        _rotate(rows, book)  # in place, and from here on `rows` is what is still left to code
        for stage in range(int(counts.max(initial=0))):
            signs = _sign_vectors(book, stage)
            for chosen in _some_at_once(np.flatnonzero(counts > stage)):
                left = rows[chosen]
                codes, gain = _nearest(left, signs)
                rows[chosen] = left - signs.take(codes, axis=0).reshape(left.shape) * gain.astype(np.float32)
                words[starts[chosen] + stage] = codes
                gains[starts[chosen] + stage] = gain
        return {
            "book": np.frombuffer(book, np.uint8),
            "counts": counts.astype(np.uint8),
            "gains": gains,
            "high": pack((words >> 8).astype(np.uint8), 2),
            "low": (words & 255).astype(np.uint8),
        }

    def decode(self, parts: Mapping[str, Array], size: int) -> Values:
        require_within(
            parts["gains"], MAX_MAGNITUDE / (MAX_STAGES * ROW), "gains"
        )  # so that no sum of stages is too large
        counts, num_stages = parts["counts"], len(parts["gains"])
        if (named := int(counts.sum(dtype=np.int64))) != num_stages or (counts > MAX_STAGES).any():
            raise damaged(
                f"its rows name {named} stages where {num_stages} are expected, and at most {MAX_STAGES} per row"
            )
        return _VectorValues(parts)


class _VectorValues:
    """Decodes one piece at a time and caches the last few: tensors smaller than a piece share it."""

    def __init__(self, parts: Mapping[str, Array]) -> None:
        self._piece = lru_cache(_CACHED_PIECES)(partial(_decode_piece, parts, _first_stages(parts["counts"])))

    def slice(self, begin: int, end: int) -> Floats:
        first, last = begin // PIECE, ceil_div(end, PIECE)
        pieces = [self._piece(number) for number in range(first, last)]
        whole = pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.float32), *pieces])
        return whole[begin - first * PIECE : end - first * PIECE]


def _decode_piece(parts: Mapping[str, Array], starts: NDArray[np.int64], number: int) -> Floats:
    """The sum of each row's stages, in their order. The signs of a stage are rotated back as whole numbers and stay
    exact when they are multiplied by a gain of eight binary digits. Every machine therefore gets the same bits, in
    whatever order it computes a stage."""
    rows = slice(number * PIECE // ROW, (number + 1) * PIECE // ROW)
    book, counts, starts = parts["book"].tobytes(), parts["counts"][rows], starts[rows]
    values, flips = np.zeros((len(counts), ROW), np.float32), _flips(book) / math.isqrt(ROW)
    for stage in range(int(counts.max(initial=0))):
        words = _transformed_words(book, stage)
        for chosen in _some_at_once(np.flatnonzero(counts > stage)):
            places = starts[chosen] + stage
            codes = parts["low"][places] + unpack(parts["high"][places], 2, LOW_BYTES).astype(np.intp) * 256
            rotated = _transform_columns(words.take(codes, axis=0).reshape(len(codes), ROW))
            values[chosen] += rotated * flips * parts["gains"][places].astype(np.float32)
    return values.reshape(-1)


def _stages_per_row(norms: NDArray[np.float64], num_stages: int) -> NDArray[np.int64]:
    """Each stage goes to the row where it removes the most energy."""
    left = (np.square(norms)[:, None] * _LEFT_BY_STAGE ** np.arange(MAX_STAGES)).ravel()
    rows = np.argpartition(left, len(left) - num_stages)[len(left) - num_stages :] if num_stages else np.arange(0)
    return np.bincount(rows // MAX_STAGES, minlength=len(norms))


def _first_stages(counts: NDArray[Any]) -> NDArray[np.int64]:
    """The stages of a row follow each other; this is the number of the first one of each row."""
    starts: NDArray[np.int64] = counts.cumsum(dtype=np.int64) - counts
    return starts


def _some_at_once(rows: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    return (rows[start : start + _ROWS_AT_ONCE] for start in range(0, len(rows), _ROWS_AT_ONCE))


def _nearest(rows: Floats, signs: Floats) -> tuple[NDArray[np.int64], Array]:
    """The word of each group with the largest product, plus WORDS if the product is negative; and the gain of each row
    that fits all of its groups best."""
    peak = np.maximum(np.abs(rows).max(axis=1, keepdims=True), np.float32(_TINY))  # so that no sum overflows
    products = (rows / peak).reshape(-1, GROUP) @ signs[:WORDS].T
    most, least = products.argmax(axis=1), products.argmin(axis=1)
    every = np.arange(len(products))
    high, low = products[every, most], products[every, least]
    codes = np.where(high >= -low, most, least + WORDS)
    gain = np.maximum(high, -low).reshape(-1, LOW_BYTES).mean(axis=1, keepdims=True) / np.float32(GROUP)
    return codes.reshape(-1, LOW_BYTES), (gain * peak).astype(BFLOAT16)


# The rotation. A row is a matrix of 32 groups of 32 values. Its Hadamard transform is that of the groups, then that of
# the columns. To decode a stage, its sign vectors are transformed as groups once, and then every row as columns.


def _rotate(rows: Floats, book: bytes) -> None:
    flips = _flips(book)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        flipped = np.clip(rows[some], -_HUGE, _HUGE) * flips
        rows[some] = _transform_columns(_transform_groups(flipped)) / math.isqrt(ROW)


def _transform_groups(rows: Floats) -> Floats:
    return (rows.reshape(-1, GROUP) @ _HADAMARD).reshape(rows.shape)


def _transform_columns(rows: Floats) -> Floats:
    transformed: Floats = np.matmul(_HADAMARD, rows.reshape(-1, GROUP, GROUP)).reshape(rows.shape)
    return transformed


@lru_cache(maxsize=2 * MAX_STAGES)
def _transformed_words(book: bytes, stage: int) -> Floats:
    return _transform_groups(_sign_vectors(book, stage))


@lru_cache(maxsize=2 * MAX_STAGES)
def _sign_vectors(book: bytes, stage: int) -> Floats:
    """The WORDS sign vectors of a stage, followed by their negatives. The signs are the first 32 bits of SHA-256 of the
    book and "stage word", least significant bit first; a set bit is -1."""
    digests = b"".join(hashlib.sha256(book + f"{stage} {word}".encode()).digest()[:4] for word in range(WORDS))
    words = _signs(digests).reshape(WORDS, GROUP)
    return np.concatenate([words, -words])


@lru_cache(maxsize=2 * MAX_STAGES)  # the updates of a round are read side by side, one piece of each in turn
def _flips(book: bytes) -> Floats:
    """The signs of the values of a row: the bits of SHA-256 of the book and "flip 0" to "flip 3", one digest after the
    other; a set bit is -1."""
    digests = b"".join(hashlib.sha256(book + f"flip {part}".encode()).digest() for part in range(ROW // 256))
    return _signs(digests)


def _signs(digests: bytes) -> Floats:
    bits = np.unpackbits(np.frombuffer(digests, np.uint8), bitorder="little")
    return 1 - 2 * bits.astype(np.float32)
