"""Documents: the texts of files, folders, .jsonl, .parquet, compressed files and data sets, one after the other.
Streams: never more than one document or a piece of a file in memory. Next: prepare.py, which tokenizes them.

A row of .jsonl, .parquet or a data set is a document, and so is a text file. If a source has fewer than 400 text files,
each is cut into sections at blank lines, and the sections are the documents."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from blocktrain.data.findings import JSON_LINES_ENDINGS, remarks_on, strange_bytes
from blocktrain.data.findings import SAMPLE_BYTES as FINDINGS_BYTES
from blocktrain.data.raw import DATA_SET_SPLITS, data_set_arguments, data_set_name, locate, visible_files
from blocktrain.data.shards import SPLITS, Split, is_prepared
from blocktrain.errors import CorpusError
from blocktrain.settings import DATA_SET

COMPRESSED = (".gz", ".zst")
FEW_FILES = 400  # fewer text files are cut into sections
SHORTEST_SECTION, LONGEST_SECTION = 1 << 10, 1 << 16  # characters
LARGEST_FILE_BYTES = 64 * 2**20  # a larger text file is always cut into sections
TEXT_COLUMN = "text"
MISSING = object()
SPLIT_FILE = re.compile(r"(train|valid|validation|test)(-\d+-of-\d+)?(\.|$)")  # a file of one split


@dataclass(frozen=True)
class Document:
    """`split` is given if the source has its own splits. `continues`: it follows the document before it directly."""

    name: str
    text: str
    split: Split | None = None
    continues: bool = False


@dataclass(frozen=True)
class SourceFile:
    path: Path
    split: Split | None
    name: str  # inside the source

    @property
    def unpacked_name(self) -> str:
        return self.name.removesuffix(self.path.suffix) if self.is_compressed else self.name

    @property
    def kind(self) -> str:
        """The suffix without the one of the compression."""
        return Path(self.unpacked_name).suffix.lower()

    @property
    def is_compressed(self) -> bool:
        return self.path.suffix.lower() in COMPRESSED

    @property
    def is_text(self) -> bool:
        return self.kind not in (*JSON_LINES_ENDINGS, ".parquet")


def documents(sources: Sequence[str], column: str = TEXT_COLUMN) -> Iterator[Document]:
    """All documents in an order that depends on the sources alone."""
    for source in sources:
        if source.startswith(DATA_SET):
            yield from _data_set(source, column)
        else:
            yield from _files(source, column)


def source_files(source: str) -> list[SourceFile]:
    """The files of a source, in order. A folder with train, valid and test files has its own splits, and nothing else
    may be beside them: nobody would know which split it belongs to."""
    path = locate(source)
    if path.is_file():
        return [SourceFile(path, None, path.name)]
    if is_prepared(source):
        raise CorpusError(f'"{source}" is prepared already: give it with --corpus, or prepare the text it came from')
    files = [
        SourceFile(file, _own_split(path, file), file.relative_to(path).as_posix()) for file in visible_files(path)
    ]
    if not files:
        raise CorpusError(f'"{source}" is an empty folder: give a file or folder that holds text')
    own = [file for file in files if file.split]
    if missing := [split for split in SPLITS if own and split not in {file.split for file in own}]:
        raise CorpusError(
            f"{path} holds {own[0].name} and no file of the split {' or '.join(missing)}: add what is missing, or "
            f"rename {own[0].name}, and the folder is split automatically"
        )
    if own and len(own) < len(files):
        other = next(file for file in files if not file.split)
        raise CorpusError(
            f"{path} holds files of the splits train, valid and test, and {other.name}, which is of none: move it "
            f"elsewhere, or rename the others, and the folder is split automatically"
        )
    return sorted(own, key=lambda file: (SPLITS.index(file.split or "train"), file.name)) or files


def _own_split(folder: Path, file: Path) -> Split | None:
    """The split that the name of a file says."""
    found = SPLIT_FILE.match(file.name) if file.parent == folder else None
    name = found[1].removesuffix("ation") if found else None
    return next((split for split in SPLITS if split == name), None)


def remarks_on_texts(sources: Sequence[str]) -> tuple[str, ...]:
    """JSON and tables in files that are read as text, as sentences with the remedy. What is no text at all is refused
    when it is read."""
    starts = list[tuple[str, bytes]]()
    for source in sources:
        if not source.startswith(DATA_SET):
            with _readable(source):
                starts += [(file.unpacked_name, _start_of(file.path)) for file in source_files(source) if file.is_text]
    return remarks_on([(name, start) for name, start in starts if not strange_bytes(start, name)])


def _start_of(path: Path) -> bytes:
    with _opened(path) as file, _text_only(path):
        return file.read(FINDINGS_BYTES)


def source_facts(sources: Sequence[str]) -> list[list[Any]]:
    """What changes when a source changes: the names, sizes and times of its files."""
    facts: list[list[Any]] = []
    for source in sources:
        if source.startswith(DATA_SET):
            facts.append([source])
            continue
        with _readable(source):
            for file in source_files(source):
                status = file.path.stat()
                facts.append([str(file.path.resolve()), status.st_size, status.st_mtime_ns])
    return facts


def _files(source: str, column: str) -> Iterator[Document]:
    with _readable(source):
        files = source_files(source)
        texts = [file for file in files if file.is_text]
        total = sum(file.path.stat().st_size for file in texts)
        section = max(SHORTEST_SECTION, min(LONGEST_SECTION, total // FEW_FILES))
        for file in files:
            if file.kind in JSON_LINES_ENDINGS:
                yield from _json_lines(file, column)
            elif file.kind == ".parquet":
                yield from _parquet(file, column)
            elif len(texts) < FEW_FILES or file.path.stat().st_size > LARGEST_FILE_BYTES:
                yield from _in_sections(file, section)
            else:
                yield Document(file.name, "".join(_characters(file.path, LONGEST_SECTION)), file.split)


def _in_sections(file: SourceFile, size: int) -> Iterator[Document]:
    for number, text in enumerate(sections(_characters(file.path, 16 * size), size)):
        yield Document(f"{file.name} section {number + 1}", text, file.split, continues=number > 0)


def sections(pieces: Iterable[str], size: int) -> Iterator[str]:
    """Parts of one to four times `size` characters that join to the whole, cut behind a blank line if possible."""
    held = ""
    for piece in pieces:
        held += piece
        while len(held) > 4 * size:
            cut = _border(held, size)
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def _border(text: str, size: int) -> int:
    for ending, last in (("\n\n", 2 * size), ("\n", 4 * size)):
        if (at := text.find(ending, size, last)) >= 0:
            return at + len(ending)
    return 4 * size


def _json_lines(file: SourceFile, column: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(file.path)):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row if isinstance(row, str) else row[column]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise CorpusError(
                f'{file.path}, line {number + 1} is not a JSON object with the text "{column}": correct the line, '
                f"or name another key with --column"
            )
        yield Document(f"{file.name} line {number + 1}", _valid(text), file.split)


def _parquet(file: SourceFile, column: str) -> Iterator[Document]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise CorpusError(
            f"{file.path} needs the package pyarrow, which is not installed: pip install 'blocktrain[parquet]'"
        ) from None
    if file.is_compressed:
        raise CorpusError(f"{file.path} is a compressed parquet file: unpack it first (gunzip, unzstd)")
    try:
        table = pq.ParquetFile(file.path)
    except pa.ArrowException as error:
        raise CorpusError(f"{file.path} is not a parquet file ({str(error)[:100]}): replace or remove it") from None
    strings = [x.name for x in table.schema_arrow if pa.types.is_string(x.type) or pa.types.is_large_string(x.type)]
    if not strings:
        raise CorpusError(f"{file.path} has no column of text: leave it out, or give the texts themselves")
    if column not in strings:
        raise CorpusError(
            f'{file.path} has no text column "{column}", its text columns are {", ".join(strings)}: '
            f"name one of them with --column"
        )
    number = 0
    for batch in table.iter_batches(batch_size=256, columns=[column]):
        for text in batch.column(0).to_pylist():
            number += 1
            if text is not None:
                yield Document(f"{file.name} row {number}", text, file.split)


def _data_set(source: str, column: str) -> Iterator[Document]:
    """Streamed. A data set with train, validation and test has its own splits."""
    try:
        import datasets
    except ImportError:
        raise CorpusError(
            f"\"{source}\" needs the package datasets, which is not installed: pip install 'blocktrain[hf]'"
        ) from None
    name, config, own_column = data_set_name(source)
    try:
        found = datasets.load_dataset(**data_set_arguments(name, config), streaming=True)
        own_splits = set(DATA_SET_SPLITS) <= set(found)
        for split, rows in found.items():
            ours = dict(zip(DATA_SET_SPLITS, SPLITS, strict=True)).get(split) if own_splits else None
            for number, row in enumerate(rows):
                text = row.get(own_column or column, MISSING)
                if text is None:
                    continue
                if not isinstance(text, str):
                    raise CorpusError(
                        f'"{source}" has the columns {", ".join(row)} and no text in "{own_column or column}": '
                        f"name one, as in hf:NAME::COLUMN"
                    )
                yield Document(f"{source} {split} row {number + 1}", _valid(text), ours)
    except CorpusError:
        raise
    except Exception as error:  # of the hub, the network and every format: they have no common class
        detail = " ".join(str(error).split())[:200]
        raise CorpusError(
            f'"{source}" cannot be read as a data set ({detail}): check its name, config and the network'
        ) from None


def _characters(path: Path, size: int) -> Iterator[str]:
    with _opened(path) as file, _text_only(path), io.TextIOWrapper(file, encoding="utf-8", newline="") as reader:
        while piece := reader.read(size):
            if "\0" in piece:
                _require_usual(piece.encode(), path)
                raise CorpusError(f"{path} is not text, it holds zero bytes: leave it out, or extract its text")
            yield piece


def _lines(path: Path) -> Iterator[str]:
    with _opened(path) as file, _text_only(path), io.TextIOWrapper(file, encoding="utf-8") as reader:
        yield from reader


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file, decompressed."""
    if path.suffix.lower() == ".gz":
        with gzip.open(path) as file:
            yield io.BufferedReader(file)
    elif path.suffix.lower() == ".zst":
        with path.open("rb") as raw:
            yield io.BufferedReader(_Unpacked(raw, path), LONGEST_SECTION)
    else:
        with path.open("rb") as file:
            yield file


class _Unpacked(io.RawIOBase):
    """A .zst file, decompressed. The package's own reader stops silently at the end of a cut file."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise CorpusError(
                f"{path} needs the package zstandard, which is not installed: pip install 'blocktrain[zstd]'"
            ) from None
        self._library, self._raw, self._path = zstandard, raw, path
        self._frame: Any = None
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            packed = (self._frame.unused_data if self._frame and self._frame.eof else b"") or self._raw.read(1 << 16)
            if not packed:
                if self._frame is not None and not self._frame.eof:
                    raise CorpusError(f"{self._path} is not a whole .zst file (it is cut): replace or remove it")
                return 0
            self._unpack(packed)
        count = min(len(buffer), len(self._held))
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        return count

    def _unpack(self, packed: bytes) -> None:
        if self._frame is None or self._frame.eof:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            self._held = memoryview(self._frame.decompress(packed))
        except self._library.ZstdError as error:
            raise CorpusError(f"{self._path} is not a whole .zst file ({error}): replace or remove it") from None


@contextmanager
def _text_only(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        _require_usual(error.object, path)
        raise CorpusError(
            f"{path} is not UTF-8 text ({error.reason}): convert it to UTF-8, or remove it from the source"
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise CorpusError(f"{path} is not a whole .gz file ({error}): replace or remove it") from None


def _require_usual(data: bytes, path: Path) -> None:
    """Names what begins with these bytes, and how to make UTF-8 text of it, if that is known."""
    if finding := strange_bytes(data, str(path)):
        raise CorpusError(f"{path} {finding.what}: {finding.remedy}") from None


def _valid(text: str) -> str:
    """JSON can name half of a surrogate pair, which no UTF-8 text holds."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()


@contextmanager
def _readable(source: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorpusError(
            f'"{source}": {error.filename or source} cannot be read ({error.strerror or error}): make it readable, '
            f"or give another source"
        ) from None
