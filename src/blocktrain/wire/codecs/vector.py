"""vector: the nearest sign vector of every 32 values, times a gain per row of 1024 values. The rest of a row is coded
again with other sign vectors, stage after stage; the stages go to the rows with the most left. `spent` is the number of
stages per 1000 rows.

A random rotation of each row (signs and a Hadamard transform) comes first and makes its values normally distributed.
Sign vectors are near normal values, but far from a few large values among many small ones, which is what remains unsent
after some rounds. Every update draws its own rotation, and the signs of its stages, so that the errors of many updates
do not add up. At a third of a bit per value this is near the theoretical limit; `sparse` holds about half as much.
Next: nearest_words.py, the sign vectors; base.py, what a codec is; docs/protocol.md, "Codecs", the same byte by byte.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Self

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
    require_between,
    require_within,
)
from blocktrain.wire.codecs.nearest_words import (
    BLOCK_VALUES,
    BLOCKS,
    MAX_NORM,
    PAIRS,
    Shorts,
    by_block,
    join,
    nearest_words,
    sign_words,
)
from blocktrain.wire.codecs.packing import Bytes, ceil_div
from blocktrain.wire.codecs.scratch import Scratch
from blocktrain.wire.safetensors import BFLOAT16, Array, Floats

ROW = BLOCKS * BLOCK_VALUES  # 1024 values share the gains of their stages
MAX_STAGES = 32  # of a row
MAX_SPENT = 500 * MAX_STAGES
BOOK_BYTES = 4  # they choose the rotation and the signs of an update
WORD_BYTES = BLOCKS // 2  # of a stage: four bits per block
PATTERN_BYTES = 3 * PAIRS // 8  # of a stage: three bits per pair of blocks
STAGE_BITS = 8 * (WORD_BYTES + PATTERN_BYTES) + 16  # with the gain

LEFT_BY_STAGE = 0.693  # share of a row's energy that a stage leaves, measured on normal values
_SHIFT = 3  # bits that a rotated row loses, so that 16 bits hold it
_GROWTH = math.isqrt(ROW) >> _SHIFT  # of a row's norm by the rotation in whole numbers
_TINY, _HUGE = 2.0**-100, 2.0**100  # rows with a larger norm are sent as this, so that no sum overflows
_SAFE_SQUARES = 2.0**-100, 2.0**100  # for float32
_STAGES_AT_ONCE = 8  # then whole numbers are too coarse for what is left
_PIECE_ROWS = LARGE_PIECE // ROW
_CACHED_PIECES = 2

_TURNED = np.arange(BLOCKS).reshape(8, 8).T.reshape(-1)  # the low bits of a block's number before the high bits

_scratch = Scratch()


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
            "patterns": (UINT8, (stages, PATTERN_BYTES)),
            "words": (UINT8, (stages, WORD_BYTES)),
            "counts": (UINT8, (ceil_div(size, ROW),)),
        }

    def encode(self, values: Values, size: int) -> dict[str, Array]:
        """Reads the values twice, piece by piece: how the stages are divided depends on all of them."""
        spans = [(start, min(start + LARGE_PIECE, size)) for start in range(0, size, LARGE_PIECE)]
        norms = np.concatenate([np.empty(0), *(_norms(as_rows(values.slice(*span), ROW)) for span in spans)])
        book = hashlib.sha256(norms.tobytes()).digest()[:BOOK_BYTES]  # other values get another book
        counts = _stages_per_row(norms, self.num_stages(size))
        parts = {name: np.zeros(shape, dtype) for name, (dtype, shape) in self.parts(size).items()}
        parts["book"], parts["counts"] = np.frombuffer(book, np.uint8), counts.astype(np.uint8)
        codes = np.empty((len(parts["gains"]), 2, PAIRS), np.uint8)
        stages = _Stages(book, counts, _first_stages(counts), codes, parts["gains"])
        for first, span in zip(range(0, len(counts), _PIECE_ROWS), spans, strict=True):
            if counts[first : first + _PIECE_ROWS].any():
                stages.encode(first, as_rows(values.slice(*span), ROW), norms[first : first + _PIECE_ROWS])
        parts["words"], parts["patterns"] = _pack_codes(codes)
        return parts

    def decode(self, parts: Mapping[str, Array], size: int) -> Values:
        # So that no sum of stages is too large.
        require_within(parts["gains"], MAX_MAGNITUDE / (MAX_STAGES * ROW), "gains")
        counts, num_stages = parts["counts"], len(parts["gains"])
        if (named := int(counts.sum(dtype=np.int64))) != num_stages or (counts > MAX_STAGES).any():
            raise damaged(
                f"its rows name {named} stages where {num_stages} are expected, and at most {MAX_STAGES} per row"
            )
        return _VectorValues(parts)


def _stages_per_row(norms: NDArray[np.float64], num_stages: int) -> NDArray[np.int64]:
    """Each stage goes to the row where it removes the most energy."""
    left = (np.square(norms)[:, None] * LEFT_BY_STAGE ** np.arange(MAX_STAGES)).ravel()
    rows = np.argpartition(left, len(left) - num_stages)[len(left) - num_stages :] if num_stages else np.arange(0)
    return np.bincount(rows // MAX_STAGES, minlength=len(norms))


def _first_stages(counts: NDArray[Any]) -> NDArray[np.int64]:
    """The stages of a row follow each other; this is the number of the first one of each row."""
    starts: NDArray[np.int64] = counts.cumsum(dtype=np.int64) - counts
    return starts


def _norms(rows: Floats) -> NDArray[np.float64]:
    """In float32 where that is safe: it is much faster."""
    with np.errstate(over="ignore", under="ignore"):
        squares = np.einsum("ij,ij->i", rows, rows)
    if not all(_SAFE_SQUARES[0] < square < _SAFE_SQUARES[1] for square in (squares.min(), squares.max())):
        squares = np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
    norms: NDArray[np.float64] = np.sqrt(squares, dtype=np.float64)
    return norms


# Encoding


@dataclass(frozen=True)
class _Stages:
    """The stages of an update, written piece by piece."""

    book: bytes
    counts: NDArray[np.int64]  # of each row
    starts: NDArray[np.int64]
    codes: Bytes
    gains: Array

    def encode(self, first_row: int, rows: Floats, norms: NDArray[np.float64]) -> None:
        """Codes as many stages at once as whole numbers are precise enough for, and then what they have left."""
        counts = self.counts[first_row : first_row + len(rows)]
        for first in range(0, int(counts.max()), _STAGES_AT_ONCE):
            order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts > first)]  # most stages first
            last = min(first + _STAGES_AT_ONCE, int(counts.max()))
            self._encode(rows, first_row, order, norms, range(first, last))
            if last < counts.max():
                rows = rows.copy() if not first else rows
                for stage in range(first, last):
                    chosen = np.flatnonzero(counts > stage)
                    places = self.starts[first_row + chosen] + stage
                    added = _scratch.array("added", (len(chosen), ROW), np.float32)
                    _write_stage(self.book, stage, self.codes[places].transpose(1, 2, 0), self.gains[places], added)
                    rows[chosen] -= added
                norms = _norms(rows)

    def _encode(
        self, rows: Floats, first_row: int, order: NDArray[np.int64], norms: NDArray[np.float64], stages: range
    ) -> None:
        """Each row is scaled to the same norm in whole numbers, so that all are coded with the same precision."""
        norms = np.maximum(norms, _TINY)
        left = _rotate(rows, order, _flips(self.book), (MAX_NORM / _GROWTH / norms).astype(np.float32))
        units = MAX_NORM / np.minimum(norms, _HUGE)[order]
        for stage in stages:
            chosen = first_row + order[: np.count_nonzero(self.counts[first_row + order] > stage)]
            left = left[..., : len(chosen)]
            signed = _scratch.array("signed", left.shape, np.int16)
            np.multiply(left, _stage_signs(self.book, stage)[:, None, None], out=signed)
            codes, products = nearest_words(signed, stage)
            units = units[: len(chosen)]
            gains = (products / (ROW * units)).astype(BFLOAT16)
            places = self.starts[chosen] + stage
            self.codes[places], self.gains[places] = codes.transpose(2, 0, 1), gains[:, None]
            if stage + 1 < stages.stop:
                words = _stage_words(self.book, stage).T.take(by_block(codes, stage), axis=1)
                words *= np.rint(gains.astype(np.float64) * units).astype(np.int16)
                left = left - words


# Decoding


class _VectorValues:
    """Decodes one piece at a time and caches the last few: tensors smaller than a piece share it."""

    def __init__(self, parts: Mapping[str, Array]) -> None:
        self._piece = lru_cache(_CACHED_PIECES)(partial(_decode_piece, parts, _first_stages(parts["counts"])))

    def slice(self, begin: int, end: int) -> Floats:
        first, last = begin // LARGE_PIECE, ceil_div(end, LARGE_PIECE)
        pieces = [self._piece(number) for number in range(first, last)]
        whole = pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.float32), *pieces])
        return whole[begin - first * LARGE_PIECE : end - first * LARGE_PIECE]


def _decode_piece(parts: Mapping[str, Array], starts: NDArray[np.int64], number: int) -> Floats:
    """The sum of each row's stages, in their order."""
    here = slice(number * _PIECE_ROWS, (number + 1) * _PIECE_ROWS)
    book, counts, starts = parts["book"].tobytes(), parts["counts"][here], starts[here]
    values = np.empty((len(counts), ROW), np.float32)
    values[counts == 0] = 0
    for stage in range(int(counts.max(initial=0))):
        chosen = np.flatnonzero(counts > stage)
        places = starts[chosen] + stage
        codes = _unpack_codes(parts["words"][places], parts["patterns"][places])
        all_new = not stage and len(chosen) == len(values)
        added = values if all_new else _scratch.array("added", (len(chosen), ROW), np.float32)
        _write_stage(book, stage, codes, parts["gains"][places], added)
        if stage:
            values[chosen] += added
        elif not all_new:
            values[chosen] = added
    return values.reshape(-1)


def _write_stage(book: bytes, stage: int, codes: Bytes, gains: Array, added: Floats) -> None:
    """Writes what a stage adds to some rows, from codes [2, pair, row]. Its signs are rotated back as whole numbers and
    stay exact when they are multiplied by a gain of eight binary digits. Every machine therefore gets the same bits, in
    whatever order it computes them."""
    added[:] = _rotate_back(codes, book, stage)
    added *= gains.astype(np.float32) / np.float32(math.isqrt(ROW))


# Codes as bytes: one byte per pair for bits 0 to 3 of its two codes, and three bits per pair for bits 4 to 6, which are
# the same in both (nearest_words.py)


def _pack_codes(codes: Bytes) -> tuple[Bytes, Bytes]:
    """The words and the patterns of [stage, 2, pair]."""
    first, second = codes[:, 0], codes[:, 1]
    bits = np.unpackbits(first[:, :, None] >> np.uint8(4), axis=2, count=3, bitorder="little")
    patterns = np.packbits(bits.reshape(len(codes), 3 * PAIRS), axis=1, bitorder="little")
    return first & np.uint8(15) | second << np.uint8(4), patterns


def _unpack_codes(words: Bytes, patterns: Bytes) -> Bytes:
    """The codes, [2, pair, stage]."""
    bits = np.unpackbits(patterns, axis=1, bitorder="little").reshape(len(patterns), PAIRS, 3).T
    shared = bits[0] << 4 | bits[1] << 5 | bits[2] << 6
    return np.stack([words.T & 15 | shared, words.T >> 4 | shared])


# The rotation: signs, then the Hadamard transform of the columns of a row, a matrix of 64 blocks, and that of the
# blocks. To decode a stage, its words are transformed as blocks once, and then the columns of every row.


def _rotate(rows: Floats, order: NDArray[np.int64], flips: Floats, scales: Floats) -> Shorts:
    """Some rows times the flips and their scales, in whole numbers and rotated: [position in the block, block, row].
    Their norms grow _GROWTH times."""
    scaled = np.multiply(rows, scales[:, None], out=_scratch.array("scaled", rows.shape, np.float32))
    flipped = _scratch.array("flipped", rows.shape, np.int16)
    np.multiply(scaled, flips, out=flipped, casting="unsafe")
    columns = _transform_columns(flipped, _TURNED[:, None] + BLOCKS * order)
    columns >>= _SHIFT
    blocks = _scratch.array("flipped", (BLOCK_VALUES, BLOCKS, len(order)), np.int16)
    blocks[:] = columns.transpose(2, 0, 1)
    return _transform(blocks, _scratch.array("transformed", blocks.shape, np.int16), BLOCK_VALUES)[0]


def _rotate_back(codes: Bytes, book: bytes, stage: int) -> Shorts:
    """The words with these codes, [2, pair, row], as 32 times the values of rows."""
    columns = _transform_columns(_transformed_words(book, stage), by_block(codes, stage)[_TURNED].astype(np.intp))
    num_rows = codes.shape[2]
    rows = _scratch.array("flipped", (num_rows, ROW), np.int16)
    blocks = rows.reshape(-1, BLOCK_VALUES)
    columns.reshape(-1, BLOCK_VALUES).take(_by_row(num_rows), axis=0, out=blocks, mode="clip")
    rows *= _short_flips(book)
    return rows


def _transform_columns(blocks: Shorts, places: NDArray[np.intp]) -> Shorts:
    """The transform of some rows over their blocks, which are taken from these places, [turned block, row]: to [block,
    row, position in the block]. Three steps run over the low bits of the block's number and three over the high bits.
    The blocks are turned between them, because numpy is slow if the halves of a step are many small pieces."""
    columns = _scratch.array("columns", (*places.shape, BLOCK_VALUES), np.int16)
    other = _scratch.array("transformed", columns.shape, np.int16)
    blocks.reshape(-1, BLOCK_VALUES).take(places, axis=0, out=columns, mode="clip")
    low, turned = _transform(columns, other, 8)
    low.reshape(BLOCKS, -1).take(_TURNED, axis=0, out=turned.reshape(BLOCKS, -1), mode="clip")
    return _transform(turned, low, 8)[0]


def _transform(values: Shorts, other: Shorts, size: int) -> tuple[Shorts, Shorts]:
    """The Hadamard transform over `size` equal parts of the first axis; it is in the first array that is returned. The
    values are lost."""
    one, step = values, values.size
    while step > values.size // size:
        step //= 2
        lower, upper = one.reshape(-1, 2, step).swapaxes(0, 1)
        sums, differences = other.reshape(-1, 2, step).swapaxes(0, 1)
        join(lower, upper, sums, differences)
        one, other = other, one
    return one, other


@lru_cache(maxsize=2 * _PIECE_ROWS)
def _by_row(num_rows: int) -> NDArray[np.intp]:
    """The places of [row, block] in [block, row]."""
    return np.arange(BLOCKS * num_rows).reshape(BLOCKS, num_rows).T.reshape(-1)


# The signs of an update


@lru_cache(maxsize=2 * MAX_STAGES)
def _transformed_words(book: bytes, stage: int) -> Shorts:
    words = np.ascontiguousarray(_stage_words(book, stage).T)
    return np.ascontiguousarray(_transform(words, np.empty_like(words), BLOCK_VALUES)[0].T)


@lru_cache(maxsize=2 * MAX_STAGES)
def _stage_words(book: bytes, stage: int) -> Shorts:
    return sign_words() * _stage_signs(book, stage)


def _stage_signs(book: bytes, stage: int) -> Shorts:
    """For the positions of a block: the first 16 bits of SHA-256 of the book and "stage NUMBER"."""
    return _signs(hashlib.sha256(book + f"stage {stage}".encode()).digest()[:2]).astype(np.int16)


@lru_cache(maxsize=2 * MAX_STAGES)
def _short_flips(book: bytes) -> Shorts:
    return _flips(book).astype(np.int16)


@lru_cache(maxsize=2 * MAX_STAGES)  # the updates of a round are read side by side, one piece of each in turn
def _flips(book: bytes) -> Floats:
    """For the values of a row: the bits of SHA-256 of the book and "flip 0" to "flip 3", one digest after the other."""
    return _signs(b"".join(hashlib.sha256(book + f"flip {part}".encode()).digest() for part in range(ROW // 256)))


def _signs(digests: bytes) -> Floats:
    """One per bit, the least significant first; a set bit is -1."""
    bits = np.unpackbits(np.frombuffer(digests, np.uint8), bitorder="little")
    return 1 - 2 * bits.astype(np.float32)
