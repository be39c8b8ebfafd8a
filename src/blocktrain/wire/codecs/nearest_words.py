"""The sign vectors of the codec `vector`, and the search for the nearest ones. Pure numpy; knows no updates.
Next: vector.py, which codes rows with them; docs/protocol.md, "Codecs", the same sign vectors byte by byte.

A row of 1024 values is 64 blocks of 16. A block is coded as a word, one of 128 sign vectors. At position c a word is
(-1)^(form(c) + popcount(pattern & c)), or the negative of that. There are 4 forms and 16 patterns. The forms are
quadratic in the bits of c and any two of them differ by a bent function, as in the code of Kerdock (1972). The two
blocks of a pair have the same low three bits of the pattern, so that 32 values take 11 bits.

For one form, the products of a block with all patterns are a Hadamard transform, and its first steps are the same for
all forms. For the last step, |a + b| and |a - b|, the larger one is |a| + |b|. The nearest of 2^11 sign vectors is
therefore found with about 14 operations per value. Whole numbers of 16 bits are precise enough for the choice."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blocktrain.wire.codecs.packing import Bytes
from blocktrain.wire.codecs.scratch import Scratch

BLOCK_VALUES = 16
BLOCKS = 64  # of a row
PAIRS = BLOCKS // 2
FORMS = ("", "03 12", "02 03 13", "02 12 13 23")  # a term "ab" is the product of bits a and b
MAX_NORM = 4000  # of a row: the sums below are at most sqrt(32) * 4000, which int16 holds

Shorts: TypeAlias = NDArray[np.int16]

_scratch = Scratch()


@lru_cache(maxsize=1)
def sign_words() -> Shorts:
    """The 128 words. The code of a word is: bits 0 and 1 the form, bit 2 the highest bit of the pattern, bit 3 set if
    it is negative, bits 4 to 6 the other bits of the pattern."""
    position = np.arange(BLOCK_VALUES)
    bits = position[:, None] >> np.arange(4) & 1
    forms = [
        sum((bits[:, int(term[0])] & bits[:, int(term[1])] for term in form.split()), 0 * position) for form in FORMS
    ]
    highest, negative = bits[:, 3], np.ones(BLOCK_VALUES, np.intp)
    low = np.bitwise_count(np.arange(8)[:, None] & position).astype(np.intp)
    choices = [form + a * highest + b * negative for b in range(2) for a in range(2) for form in forms]
    odd = (low[:, None] + np.array(choices)) & 1
    words: Shorts = (1 - 2 * odd).reshape(-1, BLOCK_VALUES).astype(np.int16)
    return words


def nearest_words(rows: Shorts, stage: int) -> tuple[Bytes, NDArray[np.int64]]:
    """The codes of the nearest words, [2, pair, row], and about the product of each row with its words. `rows` is
    [position in the block, block, row]; the norm of a row is at most MAX_NORM."""
    num_rows, count = rows.shape[2], BLOCKS * rows.shape[2]
    halves, sums = _sums(rows.reshape(BLOCK_VALUES, count))
    best = _scratch.array("best", (8, count), np.int16)
    np.maximum(np.maximum(sums[0], sums[1], out=best), sums[2], out=best)
    first, second = np.split(np.maximum(best, sums[3], out=best).reshape(8, BLOCKS, num_rows), 2, axis=1)
    of_pairs = _largest(first + _turned(second, -stage)).astype(np.uint8) & np.uint8(7)
    pattern = by_block(np.stack([of_pairs, of_pairs]), stage).reshape(count)
    block = np.arange(count)
    keys = _largest(sums.reshape(len(FORMS), -1).take(_at(pattern, count, block), axis=1))
    form = keys.astype(np.uint8) & np.uint8(len(FORMS) - 1)
    lower = np.uint8(16) * form + pattern
    negative = halves.reshape(-1).take(_at(lower, count, block)) < 0
    differ = (halves.reshape(-1).take(_at(lower ^ _UPPER.take(form), count, block)) < 0) ^ negative
    codes = form | differ.view(np.uint8) << 2 | negative.view(np.uint8) << 3 | pattern << 4
    first, second = codes.reshape(2, PAIRS, num_rows)
    products = (keys & -len(FORMS)).reshape(BLOCKS, num_rows).sum(axis=0)
    return np.stack([first, _turned(second, -stage)]), products


def by_block(of_pairs: Bytes, stage: int) -> Bytes:
    """[block, row] of [2, pair, row]. Pair p is block p and block 32 + (p + stage) mod 32, so that every stage has
    other pairs."""
    return np.concatenate([of_pairs[0], _turned(of_pairs[1], stage)])


def _turned(values: NDArray[Any], by: int) -> NDArray[Any]:
    """What is at place i of the second last axis comes to place i + by."""
    by %= PAIRS
    return values if not by else np.concatenate([values[..., -by:, :], values[..., :-by, :]], axis=-2)


def _at(plane: Bytes, count: int, block: NDArray[np.intp]) -> NDArray[np.intp]:
    at = plane.astype(np.intp)
    at *= count
    at += block
    return at


def _largest(numbers: Shorts) -> Shorts:
    """The largest along the first axis. Its lowest bits are replaced by its place. numpy's argmax would be slow."""
    count = len(numbers)
    keys = numbers & -count
    keys += np.arange(count, dtype=np.int16).reshape(-1, *[1] * (numbers.ndim - 1))
    largest: Shorts = keys.max(axis=0)
    return largest


def _sums(blocks: Shorts) -> tuple[Shorts, Shorts]:
    """For each block, a column: the transforms of its two halves, [form, half, low bits of the pattern, block]; and
    the larger magnitude of their sum and their difference, [form, low bits, block].

    Each step takes one bit of the position and makes it a bit of the pattern. A term "ab" of a form negates the values
    that have bits a and b: in the step of bit b it swaps the two halves of bit a of the pattern."""
    shape = (2, 2, 2, 2, blocks.shape[1])  # bits 3, 2, 1, 0 of the position
    ones, twos = blocks.reshape(shape), _scratch.array("twos", shape, np.int16)
    fours = _scratch.array("fours", shape, np.int16)
    join(ones[:, :, :, 0], ones[:, :, :, 1], twos[:, :, :, 0], twos[:, :, :, 1])
    join(twos[:, :, 0], twos[:, :, 1], fours[:, :, 0], fours[:, :, 1])
    halves = _scratch.array("halves", (len(FORMS), *shape), np.int16)
    sums = _scratch.array("sums", (len(FORMS), *shape[1:]), np.int16)
    magnitude = twos
    for form, eights, total in zip(FORMS, halves, sums, strict=True):
        join(fours[:, 0], fours[:, 1, :: _step("12", form), :: _step("02", form)], eights[:, 0], eights[:, 1])
        np.abs(eights, out=magnitude)
        upper = magnitude[1, :: _step("23", form), :: _step("13", form), :: _step("03", form)]
        np.add(magnitude[0], upper, out=total)
    return halves, sums.reshape(len(FORMS), 8, -1)


def join(lower: Shorts, upper: Shorts, sums: Shorts, differences: Shorts) -> None:
    """One step of a Hadamard transform."""
    np.add(lower, upper, out=sums)
    np.subtract(lower, upper, out=differences)


def _step(term: str, form: str) -> int:
    return -1 if term in form else 1


# Where the upper half of a word's product is, beside the lower half: in the other half, with some bits swapped
_UPPER = np.array([8 + sum(2**bit for bit in range(3) if f"{bit}3" in form) for form in FORMS], np.uint8)
