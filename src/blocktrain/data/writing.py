"""The second reading of the documents: each is tokenized and added to the shards of its split. After each shard the
place is saved where a killed process continues. Next: prepare.py, which calls it; shards.py, what is written."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from blocktrain.data.documents import LONGEST_SECTION, Document, sections
from blocktrain.data.raw import BETWEEN_DOCUMENTS
from blocktrain.data.scan import UNREADABLE, Scan
from blocktrain.data.shards import SPLITS, DocumentEntry, ShardEntry, ShardWriter, Split
from blocktrain.data.tokenizer import Ids, Tokenizer
from blocktrain.errors import ConfigError
from blocktrain.io.files import written_whole

PROGRESS_FILE = "progress.npz"
BATCH_BYTES = 4 * 2**20  # of text that is tokenized at once, on all cores
LONGEST_DOCUMENTS = 5


@dataclass(frozen=True)
class Borders:
    """Where the documents so far end: the split of the last one, and the splits that end within a line."""

    last: Split | None = None
    within_line: tuple[Split, ...] = ()

    def after(self, split: Split | None, text: str) -> Borders:
        if split is None or not text:
            return Borders(split, self.within_line)
        others = tuple(each for each in self.within_line if each != split)
        return Borders(split, others if text.endswith("\n") else (*others, split))

    def joins(self, document: Document, split: Split) -> bool:
        """Whether a document may follow the last one of its split without a break: it is its other half, or a section
        that follows whole lines."""
        return document.continues and (self.last == split or split not in self.within_line)


@dataclass
class Progress:
    """Counts of the documents that are written."""

    num_documents: int = 0
    text_bytes: int = 0
    documents: dict[Split, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    duplicates: int = 0
    duplicate_bytes: int = 0
    longest: list[DocumentEntry] = field(default_factory=list)
    borders: Borders = Borders()

    def count(self, batch: Batch) -> None:
        self.num_documents += batch.num_documents
        self.text_bytes += batch.text_bytes
        self.duplicates += batch.duplicates
        self.duplicate_bytes += batch.duplicate_bytes
        for entry in batch.entries:
            self.documents[entry.split] += 1
        self.borders = batch.borders
        self.longest = heapq.nlargest(LONGEST_DOCUMENTS, [*self.longest, *batch.entries], key=lambda e: e.text_bytes)

    def save(self, folder: Path, writers: Mapping[Split, ShardWriter]) -> None:
        facts = {
            "counts": [self.num_documents, self.text_bytes, self.duplicates, self.duplicate_bytes],
            "documents": self.documents,
            "longest": [entry.model_dump() for entry in self.longest],
            "borders": asdict(self.borders),
            "shards": {split: [entry.model_dump() for entry in writer.entries] for split, writer in writers.items()},
        }
        pending: dict[str, Any] = {split: writer.pending for split, writer in writers.items()}
        with written_whole(folder / PROGRESS_FILE) as file:
            np.savez(file, facts=np.frombuffer(json.dumps(facts).encode(), dtype=np.uint8), **pending)

    @classmethod
    def load(cls, folder: Path, writers: Mapping[Split, ShardWriter]) -> Self:
        """Also puts the writers where they were. Begins anew if the file cannot be read, or if a shard is gone."""
        try:
            with (folder / PROGRESS_FILE).open("rb") as file, np.load(file) as arrays:
                facts = json.loads(arrays["facts"].tobytes())
                pending = {split: arrays[split] for split in writers}
            shards = {split: [ShardEntry(**entry) for entry in facts["shards"][split]] for split in writers}
            num_documents, text_bytes, duplicates, duplicate_bytes = facts["counts"]
            longest = [DocumentEntry(**entry) for entry in facts["longest"]]
            borders = Borders(**facts["borders"])
            progress = cls(num_documents, text_bytes, facts["documents"], duplicates, duplicate_bytes, longest, borders)
        except UNREADABLE:
            return cls()
        if not all(writer.has(entry) for split, writer in writers.items() for entry in shards[split]):
            return cls()
        for split, writer in writers.items():
            writer.restore(shards[split], pending[split])
        return progress


@dataclass
class Batch:
    """Some consecutive documents, in pieces that are tokenized separately."""

    pieces: list[tuple[Split, str]] = field(default_factory=list)
    entries: list[DocumentEntry] = field(default_factory=list)  # without duplicates and empty documents
    num_documents: int = 0
    text_bytes: int = 0
    duplicates: int = 0
    duplicate_bytes: int = 0
    borders: Borders = Borders()  # behind its last document


class Writing:
    """While the library tokenizes one batch on all cores, the next one is read and compared with the held-out text."""

    def __init__(self, out: Path, work: Path, scanned: Scan, tokenizer: Tokenizer, shard_bytes: int) -> None:
        self._work, self._scan, self._tokenizer = work, scanned, tokenizer
        self.writers = {split: ShardWriter(out, tokenizer, shard_bytes) for split in SPLITS}
        self.progress = Progress.load(work, self.writers)

    def run(self, found: Iterable[Document]) -> Iterator[int]:
        """Yields the bytes of text that are done."""
        before: tuple[Batch, Future[list[Ids]]] | None = None
        with ThreadPoolExecutor(1) as pool:
            for batch in self._batches(found):
                encoding = pool.submit(self._tokenizer.encode_texts, [piece for _, piece in batch.pieces])
                if before is not None:
                    self._add(before[0], before[1].result())
                    yield self.progress.text_bytes
                before = batch, encoding
            if before is not None:
                self._add(before[0], before[1].result())
        yield self.progress.text_bytes

    def _batches(self, found: Iterable[Document]) -> Iterator[Batch]:
        batch, done = Batch(borders=self.progress.borders), self.progress.num_documents
        begun = {split for split, count in self.progress.documents.items() if count}
        for number, document in enumerate(found):
            if number < done:
                continue
            self._take(batch, document, begun)
            if batch.text_bytes >= BATCH_BYTES:
                yield batch
                batch = Batch(borders=batch.borders)
        yield batch

    def _take(self, batch: Batch, document: Document, begun: set[Split]) -> None:
        """`begun`: the splits that have a document."""
        text = document.text.encode()
        split = self._scan.split_of(document, text)
        batch.num_documents += 1
        batch.text_bytes += len(text)
        if split is None:
            batch.duplicates += 1
            batch.duplicate_bytes += len(text)
        elif text:
            batch.entries.append(DocumentEntry(name=document.name, split=split, text_bytes=len(text)))
            if split in begun and not batch.borders.joins(document, split):
                batch.pieces.append((split, BETWEEN_DOCUMENTS.decode()))
            begun.add(split)
            batch.pieces += [(split, piece) for piece in sections([document.text], LONGEST_SECTION)]
        batch.borders = batch.borders.after(split, document.text)

    def _add(self, batch: Batch, encoded: list[Ids]) -> None:
        filled = False
        for (split, piece), tokens in zip(batch.pieces, encoded, strict=True):
            self._require_lossless(piece, int(self._tokenizer.token_lengths.take(tokens).sum()))
            filled |= self.writers[split].add(tokens)
        self.progress.count(batch)
        if filled:
            self.progress.save(self._work, self.writers)

    def _require_lossless(self, piece: str, num_bytes: int) -> None:
        if num_bytes != len(piece.encode()):
            raise ConfigError(
                f"the tokenizer {self._tokenizer.name} changes the text {piece[:40]!r}…: give one that keeps every "
                f"byte, such as bpe:4096"
            )
