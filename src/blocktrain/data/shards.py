"""A prepared corpus on disk: shards of tokens named by their hashes, and the index that lists them. Reading maps the
files and checks each one when it is first used. Next: prepare.py, which writes a corpus; windows.py, which reads it.

    corpus/
      index.json            what the corpus holds; written last
      tokenizer.json        unless the tokenizer is bytes
      shards/SHA256.tokens  16- or 32-bit numbers, little-endian (8-bit for bytes)
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from blocktrain.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer
from blocktrain.errors import BlockTrainError, CorpusError
from blocktrain.io.files import forget, make_folder, mapped, write_whole
from blocktrain.settings import BYTES, NUM_SYMBOLS, TOKENIZER_FILE, Sha256

INDEX_FILE, SHARDS_FOLDER = "index.json", "shards"
WORK_FOLDER = ".preparing"  # beside them until the index is written
SHARD_BYTES = 15 * 2**20  # two of them, the index and the tokenizer take less than 32 MiB
MAPPED_AT_ONCE = 4  # files of a split: the memory does not grow with the corpus

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, Split, Split] = ("train", "valid", "test")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardEntry(_Record):
    """One file of tokens."""

    sha256: Sha256
    num_tokens: int = Field(ge=1)
    text_bytes: int = Field(ge=0)  # of the original text


class DocumentEntry(_Record):
    """One of the longest documents."""

    name: str
    split: Split
    text_bytes: int


class CorpusIndex(_Record):
    """What a prepared corpus holds. Equal text and settings give equal shards on every machine."""

    format: Literal[1] = 1
    plan_sha256: Sha256  # of the settings and sources that it was prepared from
    sources: tuple[str, ...]
    tokenizer: str
    tokenizer_sha256: Sha256 | None  # None for bytes
    vocabulary: int = Field(ge=2)
    token_bytes: Literal[1, 2, 4]  # size of one number in a shard
    shard_tokens: int = Field(ge=1)  # of every shard but the last of a split
    splits: dict[Split, tuple[ShardEntry, ...]]
    documents: dict[Split, int]
    duplicates: int = 0  # documents removed from train, because a held-out one is nearly equal
    duplicate_bytes: int = 0
    longest: tuple[DocumentEntry, ...] = ()

    @property
    def sha256(self) -> str:
        """Of the tokens in their splits, and of their tokenizer: not of where they came from."""
        facts = self.model_dump_json(include={"tokenizer_sha256", "token_bytes", "splits"})
        return hashlib.sha256(facts.encode()).hexdigest()

    def num_tokens(self, split: Split) -> int:
        return sum(shard.num_tokens for shard in self.splits[split])

    def text_bytes(self, split: Split) -> int:
        return sum(shard.text_bytes for shard in self.splits[split])


OpenShard = Callable[[ShardEntry], tuple[Path, memoryview]]  # the file of a shard, mapped


class TokenShards:
    """The tokens of one split, left in their files."""

    def __init__(self, index: CorpusIndex, split: Split, tokenizer: Tokenizer, open_shard: OpenShard) -> None:
        self.entries, self._open_shard = index.splits[split], open_shard
        self._dtype = dtype_of(index.token_bytes)
        self.vocabulary, self.tokenizer = index.vocabulary, tokenizer
        self._mapped: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self._checked: set[int] = set()
        self.shard_tokens, self.token_lengths = index.shard_tokens, tokenizer.token_lengths
        self.sizes: Sequence[int] = [entry.num_tokens for entry in self.entries]
        self.text_bytes = index.text_bytes(split)
        self._length = sum(self.sizes)

    def __len__(self) -> int:
        return self._length

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """The tokens at these positions of the split."""
        taken = np.empty(positions.shape, dtype=np.int32)
        numbers, inside = np.divmod(positions, self.shard_tokens)
        for number in np.unique(numbers):
            here = numbers == number
            taken[here] = self._shard(int(number)).take(inside[here])
        return taken

    def rows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int32]:
        """[starts, length] tokens. Each row is within one shard."""
        rows = np.empty((len(starts), length), dtype=np.int32)
        for row, start in zip(rows, starts.tolist(), strict=True):
            number, inside = divmod(start, self.shard_tokens)
            row[:] = self._shard(number)[inside : inside + length]
        return rows

    def open_ahead(self, numbers: Iterable[int]) -> threading.Thread:
        """Fetches and checks these files in a thread, so that nobody waits for them when they are used. One that
        cannot be opened is opened again when it is used, and complained about then."""

        def open_each() -> None:
            with suppress(BlockTrainError, OSError):
                for number in numbers:
                    self._map(number)

        thread = threading.Thread(target=open_each, daemon=True)
        thread.start()
        return thread

    def check(self) -> None:
        """Reads every shard. Raises CorpusError for a damaged one."""
        for number in range(len(self.sizes)):
            self._shard(number)

    def bytes_of(self, number: int) -> memoryview:
        """A whole shard as it is in its file, checked."""
        return self._map(number).view(np.uint8).data

    def _shard(self, number: int) -> NDArray[Any]:
        if number not in self._mapped:
            self._mapped[number] = self._map(number)
            if len(self._mapped) > MAPPED_AT_ONCE:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(number)
        return self._mapped[number]

    def _map(self, number: int) -> NDArray[Any]:
        entry = self.entries[number]
        path, data = self._open_shard(entry)
        if len(data) != entry.num_tokens * self._dtype.itemsize:
            raise _damaged(path, f"it has {len(data)} bytes instead of {entry.num_tokens * self._dtype.itemsize}")
        if number not in self._checked:
            if (found := hashlib.sha256(data).hexdigest()) != entry.sha256:
                raise _damaged(path, f"its hash is {found[:12]}… instead of {entry.sha256[:12]}…")
            if np.frombuffer(data, dtype=self._dtype).max() >= self.vocabulary:
                raise _damaged(path, f"it holds tokens beyond the vocabulary of {self.vocabulary}")
            forget(data)
            self._checked.add(number)
        return np.frombuffer(data, dtype=self._dtype)


class PreparedCorpus:
    """An opened folder of prepare."""

    def __init__(self, folder: Path, index: CorpusIndex, tokenizer: Tokenizer) -> None:
        self.folder, self.index, self.tokenizer = folder, index, tokenizer

    @classmethod
    def open(cls, folder: Path) -> Self:
        index = read_index(folder)
        return cls(folder, index, _tokenizer_of(folder, index))

    def split(self, name: Split) -> TokenShards:
        return TokenShards(self.index, name, self.tokenizer, self.open_shard)

    def require_files(self) -> None:
        """Every shard is there with its size. Hashes are compared when a shard is first used."""
        for entry in (entry for split in SPLITS for entry in self.index.splits[split]):
            path, expected = shard_file(self.folder, entry.sha256), entry.num_tokens * self.index.token_bytes
            try:
                found = path.stat().st_size
            except OSError as error:
                raise _damaged(path, error.strerror or "it cannot be read") from None
            if found != expected:
                raise _damaged(path, f"it has {found} bytes instead of {expected}")

    def open_shard(self, entry: ShardEntry) -> tuple[Path, memoryview]:
        path = shard_file(self.folder, entry.sha256)
        try:
            return path, mapped(path)
        except OSError as error:
            raise _damaged(path, error.strerror or "it cannot be read") from None


class ShardWriter:
    """Collects the tokens of one split and writes a shard whenever one is full."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._lengths = folder, tokenizer.token_lengths
        self._dtype = dtype_of(token_size(tokenizer.vocabulary))
        self.shard_tokens = shard_bytes // self._dtype.itemsize
        self.entries: list[ShardEntry] = []
        self._parts: list[NDArray[Any]] = []
        self._held = 0

    def add(self, tokens: NDArray[Any]) -> bool:
        """Whether a shard was written."""
        self._parts.append(tokens.astype(self._dtype))
        self._held += len(tokens)
        full = self._held >= self.shard_tokens
        while self._held >= self.shard_tokens:
            held = self.pending
            self._write(held[: self.shard_tokens])
            self._parts = [held[self.shard_tokens :].copy()]
            self._held = len(self._parts[0])
        return full

    @property
    def pending(self) -> NDArray[Any]:
        """What is not in a shard yet."""
        self._parts = [np.concatenate(self._parts)] if self._parts else [np.empty(0, dtype=self._dtype)]
        return self._parts[0]

    def has(self, entry: ShardEntry) -> bool:
        """Whether this shard is in its file."""
        with suppress(OSError):
            return shard_file(self._folder, entry.sha256).stat().st_size == entry.num_tokens * self._dtype.itemsize
        return False

    def restore(self, entries: Sequence[ShardEntry], pending: NDArray[Any]) -> None:
        self.entries, self._parts, self._held = list(entries), [pending.astype(self._dtype)], len(pending)

    def finish(self) -> tuple[ShardEntry, ...]:
        if self._held:
            self._write(self.pending)
            self._parts, self._held = [], 0
        return tuple(self.entries)

    def _write(self, tokens: NDArray[Any]) -> None:
        data = tokens.tobytes()
        name = hashlib.sha256(data).hexdigest()
        make_folder(self._folder / SHARDS_FOLDER)
        write_whole(shard_file(self._folder, name), data)
        text_bytes = int(self._lengths.take(tokens).sum())
        self.entries.append(ShardEntry(sha256=name, num_tokens=len(tokens), text_bytes=text_bytes))


def token_size(vocabulary: int) -> Literal[1, 2, 4]:
    """Bytes per token in a shard."""
    return 1 if vocabulary <= NUM_SYMBOLS else 2 if vocabulary <= 2**16 else 4


def dtype_of(token_bytes: int) -> np.dtype[Any]:
    return np.dtype({1: "<u1", 2: "<u2", 4: "<u4"}[token_bytes])


def shard_file(folder: Path, sha256: str) -> Path:
    return folder / SHARDS_FOLDER / f"{sha256}.tokens"


def is_prepared(source: str) -> bool:
    return (Path(source).expanduser() / INDEX_FILE).is_file()


def read_index(folder: Path) -> CorpusIndex:
    path = folder / INDEX_FILE
    try:
        index = CorpusIndex.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CorpusError(
            f"{folder} is not a prepared corpus, {INDEX_FILE} cannot be read ({error.strerror}): "
            f"give the --out of blocktrain prepare, after it has finished"
        ) from None
    except ValidationError as error:
        raise _damaged(path, error.errors()[0]["msg"]) from None
    if any(shard.num_tokens != index.shard_tokens for shards in index.splits.values() for shard in shards[:-1]) or set(
        index.splits
    ) != set(SPLITS):
        raise _damaged(path, "its shards do not fit together")
    return index


def _tokenizer_of(folder: Path, index: CorpusIndex) -> Tokenizer:
    if index.tokenizer == BYTES:
        return ByteTokenizer()
    path = folder / TOKENIZER_FILE
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _damaged(path, error.strerror or "it cannot be read") from None
    tokenizer = BpeTokenizer(index.tokenizer, data, str(path))
    if tokenizer.sha256 != index.tokenizer_sha256 or tokenizer.vocabulary != index.vocabulary:
        raise _damaged(path, "it is not the tokenizer of the index")
    return tokenizer


def _damaged(path: Path, detail: str) -> CorpusError:
    return CorpusError(
        f"{path} is damaged ({detail}): restore it from a copy, or delete the corpus and run blocktrain prepare again"
    )
