"""The first reading of the documents: which are held out, and what train documents are compared with. The split of a
document depends on its text alone, so no text is in two splits. Next: prepare.py, which reads them again and writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self
from zipfile import BadZipFile

import numpy as np

from blocktrain.data.documents import Document
from blocktrain.data.duplicates import Hashes, HeldOutSketches, content_hash, sketch
from blocktrain.data.shards import Split
from blocktrain.io.files import write_whole, written_whole

MAX_HELD_OUT_BYTES = 64 * 2**20  # of one split: more would measure nothing better, and its sketches need memory
REPORT_EVERY_BYTES = 4 * 2**20
SCAN_FILE, SKETCHES_FILE = "scan.json", "sketches.npz"
UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile)  # what cut .json and .npz files raise


@dataclass(frozen=True)
class Shares:
    """The shares of held-out text. They fall once the text is so long that a split would exceed its largest size."""

    valid: float
    test: float

    def of(self, total_bytes: int) -> Shares:
        most = MAX_HELD_OUT_BYTES / max(1, total_bytes)
        return Shares(min(self.valid, most), min(self.test, most))

    def split_of(self, text_hash: int) -> Split:
        place = text_hash / 2**64
        return "valid" if place < self.valid else "test" if place >= 1 - self.test else "train"


@dataclass(frozen=True)
class Scan:
    """What the first reading found."""

    shares: Shares
    text_bytes: dict[Split, int]
    sketches: list[Hashes]

    @cached_property
    def _held_out(self) -> HeldOutSketches:
        return HeldOutSketches(self.sketches)

    def split_of(self, document: Document, text: bytes) -> Split | None:
        """The split of a document; None for a near-duplicate of a held-out one."""
        split = document.split or self.shares.split_of(content_hash(text))
        return None if split == "train" and self._held_out.near_duplicate(text) else split

    def save(self, folder: Path) -> None:
        sizes = np.array([len(each) for each in self.sketches], dtype=np.int64)
        hashes = np.concatenate(self.sketches) if self.sketches else np.empty(0, dtype=np.uint64)
        with written_whole(folder / SKETCHES_FILE) as file:
            np.savez(file, sizes=sizes, hashes=hashes)
        facts = {"valid": self.shares.valid, "test": self.shares.test, "text_bytes": self.text_bytes}
        write_whole(folder / SCAN_FILE, json.dumps(facts).encode())

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """None if it was not saved, or cannot be read any more."""
        try:
            facts = json.loads((folder / SCAN_FILE).read_text())
            with (folder / SKETCHES_FILE).open("rb") as file, np.load(file) as arrays:
                sketches = np.split(arrays["hashes"], np.cumsum(arrays["sizes"])[:-1])
            return cls(Shares(facts["valid"], facts["test"]), facts["text_bytes"], sketches)
        except UNREADABLE:
            return None


@dataclass(frozen=True)
class _HeldOut:
    text_hash: int
    own_split: Split | None
    num_bytes: int
    sketch: Hashes

    def split(self, shares: Shares) -> Split:
        return self.own_split or shares.split_of(self.text_hash)


def scan(
    found: Iterable[Document], valid_share: float, test_share: float, report: Callable[[int], None] = lambda done: None
) -> Scan:
    wanted, total, held = Shares(valid_share, test_share), 0, list[_HeldOut]()
    reported = pruned = 0
    for document in found:
        text = document.text.encode()
        total += len(text)
        text_hash = content_hash(text)
        if text and (document.split or wanted.of(total).split_of(text_hash)) != "train":
            held.append(_HeldOut(text_hash, document.split, len(text), sketch(text)))
        if total - reported >= REPORT_EVERY_BYTES:
            reported = total
            report(total)
        if total > 2 * max(pruned, MAX_HELD_OUT_BYTES):  # the shares only fall: what is train now stays train
            held, pruned = [each for each in held if each.split(wanted.of(total)) != "train"], total
    shares = wanted.of(total)
    held = [each for each in held if each.split(shares) != "train"]
    sizes: dict[Split, int] = {"train": total, "valid": 0, "test": 0}
    for each in held:
        sizes[each.split(shares)] += each.num_bytes
        sizes["train"] -= each.num_bytes
    return Scan(shares, sizes, [each.sketch for each in held])
