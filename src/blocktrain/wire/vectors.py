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
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from blocktrain.wire.packing import pack, unpack

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


@dataclass(frozen=True)
class Stages:
    """`counts` says how many stages each row has; those of one row follow each other."""

    book: Tensor  # uint8, [BOOK_BYTES]: which sign vectors
    counts: Tensor  # uint8, [rows]
    gains: Tensor  # bfloat16, [stages, 1]
    high: Tensor  # uint8, [stages, HIGH_BYTES]
    low: Tensor  # uint8, [stages, LOW_BYTES]


def encode_rows(rows: Tensor, num_stages: int) -> Stages:
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    book = hashlib.sha256(norms.numpy().tobytes()).digest()[:BOOK_BYTES]  # another one for other values
    counts, flips = _shares(norms, num_stages), flips_of(book)
    starts = _starts(counts)
    words = np.zeros((num_stages, LOW_BYTES), np.uint16)
    gains = torch.zeros(num_stages, 1, dtype=torch.bfloat16)
    rest = torch.empty_like(rows)
    for some, place in zip(torch.split(rows, _ROWS_AT_ONCE), torch.split(rest, _ROWS_AT_ONCE), strict=True):
        place.copy_(turned(some.clamp(-_HUGE, _HUGE) * flips))
    for stage in range(int(counts.max()) if len(counts) else 0):
        signs = sign_vectors(book, stage)
        for chosen in torch.split((counts > stage).nonzero()[:, 0], _ROWS_AT_ONCE):
            codes, gain = _nearest(rest[chosen], signs)
            rest[chosen] -= _values(codes, gain, signs)
            words[starts[chosen] + stage] = codes.numpy()
            gains[starts[chosen] + stage] = gain
    low, high = (words & 255).astype(np.uint8), pack((words >> 8).astype(np.uint8), 2)
    return Stages(
        book=torch.tensor(list(book), dtype=torch.uint8),
        counts=counts.to(torch.uint8),
        gains=gains,
        high=torch.from_numpy(high),
        low=torch.from_numpy(low),
    )


def decode_rows(stages: Stages, first: int, last: int) -> Tensor:
    """The values of some rows: the sum of their stages, in their order."""
    book, counts = bytes(stages.book.tolist()), stages.counts.long()
    starts = _starts(counts)[first:last]
    counts = counts[first:last]
    values = torch.zeros(len(counts), ROW)
    for stage in range(int(counts.max()) if len(counts) else 0):
        for chosen in torch.split((counts > stage).nonzero()[:, 0], _ROWS_AT_ONCE):
            places = starts[chosen] + stage
            high = unpack(stages.high[places].numpy(), 2, LOW_BYTES).astype(np.int64)
            codes = stages.low[places].long() + 256 * torch.from_numpy(high)
            values[chosen] += _values(codes, stages.gains[places], sign_vectors(book, stage))
    flips = flips_of(book)
    return torch.cat([values[:0], *(turned(some) * flips for some in torch.split(values, _ROWS_AT_ONCE))])


def turned(rows: Tensor) -> Tensor:
    """The Hadamard transform of each row, over the root of its length: its own inverse. Sums of two in one order, so
    that every machine gets the same bits."""
    columns = rows.T.contiguous()  # neighbours in memory are of other rows: all that is added lies in long stretches
    others = torch.empty_like(columns)
    for step in range(ROW.bit_length() - 1):
        pairs, combined = (x.view(ROW >> step + 1, 2, len(rows) << step) for x in (columns, others))
        torch.add(pairs[:, 0], pairs[:, 1], out=combined[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=combined[:, 1])
        columns, others = others, columns
    return columns.T / math.isqrt(ROW)


@lru_cache(maxsize=2 * MAX_STAGES)
def sign_vectors(book: bytes, stage: int) -> Tensor:
    """The first 32 bits of SHA-256 of the book and "stage word", least significant first: a set bit is -1. Behind them
    their negatives."""
    digests = b"".join(hashlib.sha256(book + f"{stage} {word}".encode()).digest()[:4] for word in range(WORDS))
    words = _signs(digests).view(WORDS, GROUP)
    return torch.cat([words, -words])


@lru_cache(maxsize=2)
def flips_of(book: bytes) -> Tensor:
    """Of the values of a row: bit i of SHA-256 of the book and "flip 0" to "flip 3", one after the other; set is -1."""
    digests = b"".join(hashlib.sha256(book + f"flip {part}".encode()).digest() for part in range(ROW // 256))
    return _signs(digests)


def _signs(digests: bytes) -> Tensor:
    bits = np.unpackbits(np.frombuffer(digests, np.uint8), bitorder="little")
    return torch.from_numpy(1 - 2 * bits.astype(np.float32))


def _nearest(rows: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Of each group the word with the largest product, plus WORDS where it is negative; and the gain of each row that
    fits all of its groups best."""
    peak = rows.abs().amax(dim=1, keepdim=True).clamp(min=_TINY)  # so that no sum overflows, whatever the scale
    products = (rows / peak).view(-1, GROUP) @ signs[:WORDS].T
    most, least = (torch.from_numpy(find(products.numpy(), 1)) for find in (np.argmax, np.argmin))  # torch's are slow
    high, low = (products.gather(1, word.unsqueeze(1))[:, 0] for word in (most, least))
    codes = torch.where(high >= -low, most, least + WORDS)
    gain = torch.maximum(high, -low).view(-1, LOW_BYTES).mean(1, keepdim=True) / GROUP
    return codes.view(-1, LOW_BYTES), (gain * peak).bfloat16()


def _values(codes: Tensor, gain: Tensor, signs: Tensor) -> Tensor:
    return functional.embedding(codes, signs).view(len(codes), ROW) * gain.float()


def _shares(norms: Tensor, num_stages: int) -> Tensor:
    """How many of the stages each row gets: each goes where it takes most away."""
    left = norms.square().unsqueeze(1) * _KEPT ** torch.arange(MAX_STAGES)
    rows = left.flatten().topk(num_stages).indices // MAX_STAGES
    return torch.bincount(rows, minlength=len(norms))


def _starts(counts: Tensor) -> Tensor:
    return counts.cumsum(0) - counts
