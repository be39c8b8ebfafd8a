"""Vectors of signs: rows of values <-> for every 32 of them the nearest of 1024 sign vectors, times a gain of the row.
What a row still lacks is coded again, stage after stage, with other vectors; the stages go to the rows that lack most.
Before, a row is turned in its 1024 dimensions at random, which makes any values normal: a few large ones among many
small, which no sign vector is near, would never be sent, and what is left over soon consists of them.
Every update draws vectors and turns of its own, so that the errors of many do not add up.
Near what theory allows at a third of a bit a value, where the largest values alone hold about half as much.
Pure: knows nothing of updates. Next: codecs.py, which sends it; docs/protocol.md, "Codecs", the same byte by byte.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blocktrain.wire.codecs.packing import Bytes, pack, unpack
from blocktrain.wire.safetensors import BFLOAT16, Array, Floats

GROUP = 32  # values that one sign vector stands for
ROW = 1024  # values that share their stages' gains
WORDS = 512  # sign vectors of a stage; each also stands for its negative
MAX_STAGES = 32  # of a row
BOOK_BYTES = 4
LOW_BYTES = ROW // GROUP  # of a stage: eight bits of each word
HIGH_BYTES = LOW_BYTES // 4  # its ninth bit and the sign
STAGE_BITS = 8 * (LOW_BYTES + HIGH_BYTES) + 16  # with the gain

_KEPT = 0.714  # of a row's energy that a stage leaves, measured on normal values
_TINY = 2.0**-120
_HUGE = 2.0**100  # what is larger is sent as this much, so that no sum overflows
_ROWS_AT_ONCE = 64  # their products stay in a processor's cache
_HADAMARD = np.array([[(-1) ** (i & j).bit_count() for j in range(GROUP)] for i in range(GROUP)], np.float32)


@dataclass(frozen=True)
class Stages:
    """`counts` says how many stages each row has; those of one row follow each other."""

    book: Bytes  # [BOOK_BYTES]: which sign vectors
    counts: Bytes  # [rows]
    gains: Array  # bfloat16, [stages, 1]
    high: Bytes  # [stages, HIGH_BYTES]
    low: Bytes  # [stages, LOW_BYTES]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The first stage of each row."""
        return _starts(self.counts)


def encode_rows(rows: Floats, num_stages: int) -> Stages:
    """Of rows that are used up: what they still lack stands in their place then."""
    norms = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    book = hashlib.sha256(norms.tobytes()).digest()[:BOOK_BYTES]  # another one for other values
    counts, flips = _shares(norms, num_stages), flips_of(book)
    starts = _starts(counts)
    words = np.zeros((num_stages, LOW_BYTES), np.uint16)
    gains = np.zeros((num_stages, 1), BFLOAT16)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        rows[some] = _turned(_turned_groups(np.clip(rows[some], -_HUGE, _HUGE) * flips)) / math.isqrt(ROW)
    for stage in range(int(counts.max(initial=0))):
        signs = sign_vectors(book, stage)
        for chosen in _few(np.flatnonzero(counts > stage)):
            left = rows[chosen]
            codes, gain = _nearest(left, signs)
            rows[chosen] = left - signs.take(codes, axis=0).reshape(left.shape) * gain.astype(np.float32)
            words[starts[chosen] + stage] = codes
            gains[starts[chosen] + stage] = gain
    return Stages(
        book=np.frombuffer(book, np.uint8),
        counts=counts.astype(np.uint8),
        gains=gains,
        high=pack((words >> 8).astype(np.uint8), 2),
        low=(words & 255).astype(np.uint8),
    )


def decode_rows(stages: Stages, first: int, last: int) -> Floats:
    """The values of some rows: the sum of their stages, in their order. A stage's signs are turned back as whole
    numbers, and times a gain of eight digits they are still exact: every machine gets the same bits, in whatever order
    it computes a stage."""
    book, counts, starts = stages.book.tobytes(), stages.counts[first:last], stages.starts[first:last]
    values, flips = np.zeros((len(counts), ROW), np.float32), flips_of(book) / math.isqrt(ROW)
    for stage in range(int(counts.max(initial=0))):
        words = _turned_words(book, stage)
        for chosen in _few(np.flatnonzero(counts > stage)):
            places = starts[chosen] + stage
            codes = stages.low[places] + unpack(stages.high[places], 2, LOW_BYTES).astype(np.intp) * 256
            turned = _turned(words.take(codes, axis=0).reshape(len(codes), ROW))
            values[chosen] += turned * flips * stages.gains[places].astype(np.float32)
    return values


def _few(numbers: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    return (numbers[start : start + _ROWS_AT_ONCE] for start in range(0, len(numbers), _ROWS_AT_ONCE))


# The Hadamard transform of a row, a matrix of 32 groups of 32 values, is that of its groups and then of its columns.


def _turned_groups(rows: Floats) -> Floats:
    return (rows.reshape(-1, GROUP) @ _HADAMARD).reshape(rows.shape)


def _turned(rows: Floats) -> Floats:
    turned: Floats = np.matmul(_HADAMARD, rows.reshape(-1, GROUP, GROUP)).reshape(rows.shape)
    return turned


@lru_cache(maxsize=2 * MAX_STAGES)
def _turned_words(book: bytes, stage: int) -> Floats:
    return _turned_groups(sign_vectors(book, stage))


@lru_cache(maxsize=2 * MAX_STAGES)
def sign_vectors(book: bytes, stage: int) -> Floats:
    """The first 32 bits of SHA-256 of the book and "stage word", least significant first: a set bit is -1. Behind them
    their negatives."""
    digests = b"".join(hashlib.sha256(book + f"{stage} {word}".encode()).digest()[:4] for word in range(WORDS))
    words = _signs(digests).reshape(WORDS, GROUP)
    return np.concatenate([words, -words])


@lru_cache(maxsize=2 * MAX_STAGES)  # the updates of a round are read side by side, a piece of each in turn
def flips_of(book: bytes) -> Floats:
    """Of the values of a row: bit i of SHA-256 of the book and "flip 0" to "flip 3", one after the other; set is -1."""
    digests = b"".join(hashlib.sha256(book + f"flip {part}".encode()).digest() for part in range(ROW // 256))
    return _signs(digests)


def _signs(digests: bytes) -> Floats:
    bits = np.unpackbits(np.frombuffer(digests, np.uint8), bitorder="little")
    return 1 - 2 * bits.astype(np.float32)


def _nearest(rows: Floats, signs: Floats) -> tuple[NDArray[np.int64], Array]:
    """Of each group the word with the largest product, plus WORDS where it is negative; and the gain of each row that
    fits all of its groups best."""
    peak = np.maximum(np.abs(rows).max(axis=1, keepdims=True), np.float32(_TINY))  # so that no sum overflows
    products = (rows / peak).reshape(-1, GROUP) @ signs[:WORDS].T
    most, least = products.argmax(axis=1), products.argmin(axis=1)
    every = np.arange(len(products))
    high, low = products[every, most], products[every, least]
    codes = np.where(high >= -low, most, least + WORDS)
    gain = np.maximum(high, -low).reshape(-1, LOW_BYTES).mean(axis=1, keepdims=True) / np.float32(GROUP)
    return codes.reshape(-1, LOW_BYTES), (gain * peak).astype(BFLOAT16)


def _shares(norms: NDArray[np.float64], num_stages: int) -> NDArray[np.int64]:
    """How many of the stages each row gets: each goes where it takes most away."""
    left = (np.square(norms)[:, None] * _KEPT ** np.arange(MAX_STAGES)).ravel()
    rows = np.argpartition(left, len(left) - num_stages)[len(left) - num_stages :] if num_stages else np.arange(0)
    return np.bincount(rows // MAX_STAGES, minlength=len(norms))


def _starts(counts: NDArray[Any]) -> NDArray[np.int64]:
    starts: NDArray[np.int64] = counts.cumsum(dtype=np.int64) - counts
    return starts
