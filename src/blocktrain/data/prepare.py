"""Preparing: documents of any number become shards of tokens in three splits. It reads the documents twice: first to
choose the held-out ones and to learn the tokenizer, then to write. A kill loses at most one shard; the same command
continues. Next: documents.py, where they come from; shards.py, what is written; duplicates.py, what is left out."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from blocktrain.data.documents import LONGEST_SECTION, TEXT_COLUMN, documents, sections, source_facts
from blocktrain.data.duplicates import content_hash
from blocktrain.data.scan import UNREADABLE, Scan, scan
from blocktrain.data.shards import (
    INDEX_FILE,
    SHARD_BYTES,
    SPLITS,
    WORK_FOLDER,
    CorpusIndex,
    PreparedCorpus,
    read_index,
    token_size,
)
from blocktrain.data.tokenizer import (
    BpeTokenizer,
    Tokenizer,
    learn_tokenizer,
    learned_size,
    load_tokenizer,
)
from blocktrain.data.writing import Writing
from blocktrain.errors import ConfigError, CorpusError
from blocktrain.io.files import make_folder, write_whole
from blocktrain.io.private import cache_home
from blocktrain.settings import BYTES, DATA_SET, TOKENIZER_FILE, CorpusSpec

PLAN_FILE = "plan.json"  # in the work folder
SHARE_FACTORS = (1, 2, 4, 7)  # of the held-out shares, tried in turn
LARGEST_GROWN_SHARE = 0.35
FIRST_STEP_BYTES = 32 * 2**20  # that a worker of a swarm fetches before its first step
INDEX_BYTES = 2**20  # kept free for the index
SMALLEST_SHARD_BYTES = 2**20
SAMPLE_BYTES = 32 * 2**20  # of the train split, from which a tokenizer is learned


@dataclass(frozen=True)
class PrepareReport:
    """How far preparing is. `total_bytes` is None while nobody knows."""

    task: str
    done_bytes: int
    total_bytes: int | None


@dataclass(frozen=True)
class Plan:
    """Everything that a prepared corpus depends on."""

    sources: tuple[str, ...]
    tokenizer: str = BYTES
    valid_share: float = 0.05
    test_share: float = 0.05
    column: str = TEXT_COLUMN
    shard_bytes: int = SHARD_BYTES

    def sha256(self) -> str:
        """Changes when a setting, a source or the tokenizer's file changes."""
        chosen = self.tokenizer if learned_size(self.tokenizer) else load_tokenizer(self.tokenizer).sha256
        facts = [asdict(replace(self, sources=self.normal_sources)), source_facts(self.sources), chosen]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @property
    def normal_sources(self) -> tuple[str, ...]:
        """Each path in its shortest form: "texts" of "./texts/"."""
        return tuple(
            source if source.startswith(DATA_SET) else Path(os.path.normpath(source)).as_posix()
            for source in self.sources
        )


@dataclass(frozen=True)
class Begun:
    """What a folder was begun with."""

    plan_sha256: str
    sources: Sequence[str]
    tokenizer: str

    def save(self, work: Path) -> None:
        write_whole(work / PLAN_FILE, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, work: Path) -> Self | None:
        """None if it was not saved, or cannot be read any more."""
        with suppress(*UNREADABLE):
            return cls(**json.loads((work / PLAN_FILE).read_text()))
        return None


Report = Callable[[PrepareReport], None]


def prepare(plan: Plan, out: Path, report: Report = lambda report: None) -> PreparedCorpus:
    """Writes the corpus, or what is left of it. Does nothing if it is complete."""
    _require_outside(plan.sources, out)
    digest = plan.sha256()
    make_folder(out)
    if (out / INDEX_FILE).exists():
        index = read_index(out)
        _require_same_plan(out, Begun(index.plan_sha256, index.sources, index.tokenizer), plan, digest)
        return _whole(out)
    with _alone_in(out):
        work = out / WORK_FOLDER
        _require_empty(out)
        make_folder(work)
        begun = Begun.load(work)
        scanned = Scan.load(work) if begun else None
        if begun is None or scanned is None:  # nothing is lost: another plan, perhaps the corrected one, may begin here
            shutil.rmtree(work)
            make_folder(work)
            Begun(digest, plan.sources, plan.tokenizer).save(work)
        else:
            _require_same_plan(out, begun, plan, digest)
        scanned = scanned or _scanned(plan, work, report)
        tokenizer = _tokenizer(plan, work, scanned, report)
        total, shard_bytes = sum(scanned.text_bytes.values()), min(plan.shard_bytes, _largest_shard(tokenizer))
        writing = Writing(out, work, scanned, tokenizer, shard_bytes)
        for done in writing.run(documents(plan.sources, plan.column)):
            report(PrepareReport("writing", done, total))
        index = _index(plan, digest, tokenizer, writing)
        if tokenizer.file is not None:
            write_whole(out / TOKENIZER_FILE, tokenizer.file)
        write_whole(out / INDEX_FILE, index.model_dump_json(indent=1).encode())
        shutil.rmtree(work)
    return _whole(out)


def _whole(out: Path) -> PreparedCorpus:
    corpus = PreparedCorpus.open(out)
    corpus.require_files()
    return corpus


def prepared_for(spec: CorpusSpec, report: Report = lambda report: None) -> PreparedCorpus:
    """A source that is not prepared, in the user's cache folder."""
    assert spec.tokenizer is not None
    plan = Plan((spec.source,), spec.tokenizer, spec.valid_share, spec.test_share)
    return prepare(plan, cache_home() / "corpora" / plan.sha256()[:32], report)


def _scanned(plan: Plan, work: Path, report: Report) -> Scan:
    found = _first_reading(plan, lambda done: report(PrepareReport("reading", done, None)))
    sources = ", ".join(plan.sources)
    if not found.text_bytes["train"] + found.text_bytes["valid"] + found.text_bytes["test"]:
        raise CorpusError(f'"{sources}" holds no text: give a file or folder that holds text')
    if empty := [split for split in SPLITS if not found.text_bytes[split]]:
        raise CorpusError(
            f'no document of "{sources}" falls into the split {" or ".join(empty)}: give at least three different '
            f"documents or a longer text, and shares above 0"
        )
    found.save(work)
    return found


def _first_reading(plan: Plan, report: Callable[[int], None]) -> Scan:
    """Of few documents none may fall into a held-out split: they are read again with larger shares."""
    for factor in SHARE_FACTORS:
        valid, test = (
            max(share, min(factor * share, LARGEST_GROWN_SHARE)) for share in (plan.valid_share, plan.test_share)
        )
        found = scan(documents(plan.sources, plan.column), valid, test, report)
        if all(found.text_bytes.values()) or not any(found.text_bytes.values()):
            return found
    return _by_rank(plan, report) or found


def _by_rank(plan: Plan, report: Callable[[int], None]) -> Scan | None:
    """The document with the lowest hash is valid, the one with the highest is test."""
    hashes = {content_hash(each.text.encode()) for each in documents(plan.sources, plan.column) if each.text}
    if len(hashes) < len(SPLITS) or not plan.valid_share or not plan.test_share:
        return None
    valid, test = (math.nextafter(share, 1) for share in (min(hashes) / 2**64, 1 - max(hashes) / 2**64))
    return scan(documents(plan.sources, plan.column), valid, test, report)


def _largest_shard(tokenizer: Tokenizer) -> int:
    """Two shards, the tokenizer and the index are at most FIRST_STEP_BYTES, if that leaves a shard worth its file."""
    rest = FIRST_STEP_BYTES - INDEX_BYTES - len(tokenizer.file or b"")
    return max(rest // 2, SMALLEST_SHARD_BYTES)


def _tokenizer(plan: Plan, work: Path, scanned: Scan, report: Report) -> Tokenizer:
    size, path = learned_size(plan.tokenizer), work / TOKENIZER_FILE
    if size is None:
        return load_tokenizer(plan.tokenizer)
    if not path.exists():
        report(PrepareReport(f"learning {plan.tokenizer}", 0, None))
        learned = learn_tokenizer(_sample(plan, scanned), size)
        assert learned.file is not None
        write_whole(path, learned.file)
    return BpeTokenizer(plan.tokenizer, path.read_bytes(), str(path))


def _sample(plan: Plan, scanned: Scan) -> Iterator[str]:
    """The first texts of the train split."""
    taken = 0
    for document in documents(plan.sources, plan.column):
        text = document.text.encode()
        if scanned.split_of(document, text) == "train":
            taken += len(text)
            yield from sections([document.text], LONGEST_SECTION)
        if taken >= SAMPLE_BYTES:
            return


def _index(plan: Plan, digest: str, tokenizer: Tokenizer, writing: Writing) -> CorpusIndex:
    progress = writing.progress
    return CorpusIndex(
        plan_sha256=digest,
        sources=plan.sources,
        tokenizer=plan.tokenizer,
        tokenizer_sha256=tokenizer.sha256,
        vocabulary=tokenizer.vocabulary,
        token_bytes=token_size(tokenizer.vocabulary),
        shard_tokens=writing.writers["train"].shard_tokens,
        splits={split: writer.finish() for split, writer in writing.writers.items()},
        documents=progress.documents,
        duplicates=progress.duplicates,
        duplicate_bytes=progress.duplicate_bytes,
        longest=tuple(progress.longest),
    )


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    try:
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout:
        raise ConfigError(f"{out} is being prepared by another process: wait for it, or choose another --out") from None


def _require_empty(out: Path) -> None:
    """Or begun by an earlier call: a corpus is not mixed with files of others."""
    if not (out / WORK_FOLDER).exists() and any(not path.name.startswith(".") for path in out.iterdir()):
        raise ConfigError(f"{out} holds other files: choose another --out, a corpus gets a directory of its own")


def _require_outside(sources: tuple[str, ...], out: Path) -> None:
    """A corpus inside its own source would be read as text. Hidden folders are not read."""
    for source in sources:
        folder, inside = Path(source).expanduser().resolve(), out.expanduser().resolve()
        if not inside.is_relative_to(folder) or not folder.is_dir():
            continue
        if not any(part.startswith(".") for part in inside.relative_to(folder).parts):
            raise ConfigError(f"{out} is inside the source {source}: choose an --out elsewhere")


def _require_same_plan(out: Path, begun: Begun, plan: Plan, digest: str) -> None:
    if begun.plan_sha256 != digest:
        raise ConfigError(
            f"{out} was prepared from other text or with other settings ({_difference(begun, plan)}): choose another "
            f"--out, or delete it"
        )


def _difference(begun: Begun, plan: Plan) -> str:
    """As far as it is known."""
    if begun.tokenizer != plan.tokenizer:
        return f"its tokenizer is {begun.tokenizer}, not {plan.tokenizer}"
    there = replace(plan, sources=tuple(begun.sources)).normal_sources
    if there != plan.normal_sources:
        return f"its source is {', '.join(there)}"
    return "a file has changed since, or a share, the column or the tokenizer's file is another"
