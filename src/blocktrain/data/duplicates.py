"""Near-duplicates of held-out documents: found by the shingles that two texts share. Pure; bounded memory.

A shingle is 32 consecutive bytes. Of all shingles only those are compared whose hash is divisible by 64, which depends
on their text alone. A document is a near-duplicate if half of its compared shingles occur in held-out text, or if it
holds half of those of one held-out document. Next: prepare.py, which leaves such documents out of train."""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Hashes: TypeAlias = NDArray[np.uint64]

SHINGLE_BYTES = 32
ONE_OF = 64  # shingles is compared
DUPLICATE_SHARE = 0.5
FEWEST = 4  # compared shingles, for a text to be called the container of another
_BASE = 0x9E3779B97F4A7C15  # odd: every byte of a shingle changes its hash


def sketch(text: bytes) -> Hashes:
    """The distinct hashes of the compared shingles. A text that has none is compared as a whole."""
    values = np.frombuffer(text, dtype=np.uint8).astype(np.uint64)
    if len(values) >= SHINGLE_BYTES:
        width = 1
        while width < SHINGLE_BYTES:  # the hash of 2n bytes from two hashes of n bytes
            values = values[:-width] * np.uint64(pow(_BASE, width, 2**64)) + values[width:]
            width *= 2
        mixed = _mix(values)
        compared = mixed[mixed % np.uint64(ONE_OF) == 0]
        if len(compared):
            return np.unique(compared)
    return np.array([content_hash(text)], dtype=np.uint64)


def content_hash(text: bytes) -> int:
    """64 bits that say which split a document belongs to. Equal texts belong to the same."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _mix(values: Hashes) -> Hashes:
    """SplitMix64's finisher: the low bits depend on all bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class HeldOutSketches:
    """All held-out documents' sketches, to compare train documents with."""

    def __init__(self, sketches: list[Hashes]) -> None:
        self._sizes = np.array([len(each) for each in sketches], dtype=np.int64)
        hashes = np.concatenate(sketches) if sketches else np.empty(0, dtype=np.uint64)
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]
        self._documents = np.repeat(np.arange(len(sketches)), self._sizes)[order]

    def near_duplicate(self, text: bytes) -> bool:
        if not text or not len(self._hashes):
            return False
        own = sketch(text)
        first = np.searchsorted(self._hashes, own, side="left")
        last = np.searchsorted(self._hashes, own, side="right")
        if (last > first).mean() >= DUPLICATE_SHARE:
            return True
        shared = [self._documents[a:b] for a, b in zip(first, last, strict=True) if b > a]
        if not shared:
            return False
        documents, counts = np.unique(np.concatenate(shared), return_counts=True)
        sizes = self._sizes[documents]
        return bool(((counts >= DUPLICATE_SHARE * sizes) & (sizes >= FEWEST)).any())
