"""Corpora: the text of a run in three splits. Bytes of a raw source are read into memory; everything else is prepared
first and left in its files. No torch. Next: raw.py and prepare.py, the two ways; windows.py, what a step reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from blocktrain.data.prepare import PrepareReport, prepared_for
from blocktrain.data.raw import Parts, read_parts
from blocktrain.data.shards import SPLITS, PreparedCorpus, is_prepared
from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer
from blocktrain.data.windows import Bytes, Tokens
from blocktrain.errors import ConfigError, CorpusError
from blocktrain.spec import BYTES, CorpusSpec, RunSpec
from blocktrain.tables import with_vocabulary


@dataclass(frozen=True)
class Corpus:
    """Three read-only splits that share no byte of the source, a hash of all of them, and their tokenizer."""

    train: Tokens
    valid: Tokens
    test: Tokens
    sha256: str
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    prepared: PreparedCorpus | None = None  # where the splits are, unless they are raw bytes in memory

    def split(self, name: str) -> Tokens:
        splits = {"train": self.train, "valid": self.valid, "test": self.test}
        if name not in splits:
            raise ConfigError(f'there is no split "{name}": choose one of {", ".join(SPLITS)}')
        return splits[name]


def load_corpus(
    spec: CorpusSpec, context: int, report: Callable[[PrepareReport], None] = lambda report: None
) -> Corpus:
    """Read `spec.source`. Every split holds at least one window of context + 1 tokens. Text for another tokenizer than
    bytes is prepared first, once, in the user's cache folder; `report` is told how far that is."""
    if is_prepared(spec.source):
        corpus = _of_prepared(PreparedCorpus.open(Path(spec.source).expanduser()))
        _require_tokenizer(spec, corpus.tokenizer)
    elif spec.tokenizer in (None, BYTES):
        corpus = _of_bytes(read_parts(spec), spec)
    else:
        corpus = _of_prepared(prepared_for(spec, report))
        _require_tokenizer(spec, corpus.tokenizer)
    unit = "bytes" if corpus.tokenizer.sha256 is None else "tokens"
    for name in SPLITS:
        if len(corpus.split(name)) < context + 1:
            raise CorpusError(
                f'the {name} split of corpus "{spec.source}" has {len(corpus.split(name))} {unit} and needs '
                f"{context + 1} (model.context + 1): {_remedy(name)}"
            )
    return corpus


def with_tokenizer(spec: RunSpec, corpus: Corpus) -> RunSpec:
    """The spec of a run on this corpus, with what follows from its tokenizer filled in: its hash, the size of its
    vocabulary and, unless the spec names one, the width of the tables."""
    tokenizer = corpus.tokenizer
    if tokenizer.sha256 is None and spec.model.vocabulary == tokenizer.vocabulary:
        return spec
    if spec.model.vocabulary not in (tokenizer.vocabulary, ByteTokenizer.vocabulary):
        raise ConfigError(
            f"model.vocabulary = {spec.model.vocabulary} does not fit the tokenizer {tokenizer.name}, which has "
            f"{tokenizer.vocabulary} tokens: leave model.vocabulary out, it is filled in"
        )
    changes = {"corpus.tokenizer": tokenizer.name, "corpus.tokenizer_sha256": tokenizer.sha256}
    return with_vocabulary(spec.with_(**changes), tokenizer.vocabulary)


def raw_bytes(split: Tokens) -> Bytes:
    """A split that is in memory."""
    assert isinstance(split, np.ndarray), "the corpus is prepared"
    return split


def _of_bytes(parts: Parts, spec: CorpusSpec) -> Corpus:
    if not any(parts):
        raise CorpusError(f'corpus "{spec.source}" is empty: give a file or folder that holds text')
    train, valid, test = (np.frombuffer(part, dtype=np.uint8) for part in parts)
    return Corpus(train, valid, test, sha256=_fingerprint(parts))


def _of_prepared(prepared: PreparedCorpus) -> Corpus:
    splits = (prepared.split("train"), prepared.split("valid"), prepared.split("test"))
    return Corpus(*splits, prepared.index.sha256, prepared.tokenizer, prepared)


def _require_tokenizer(spec: CorpusSpec, tokenizer: Tokenizer) -> None:
    """The corpus's tokenizer must be the run's: the same name, and after the run's start the same file."""
    if spec.tokenizer_sha256 is not None and spec.tokenizer_sha256 != tokenizer.sha256:
        raise CorpusError(
            f'corpus "{spec.source}" is prepared with another tokenizer ({tokenizer.name}) than the run '
            f"({spec.tokenizer}, {spec.tokenizer_sha256[:12]}): prepare the text with the run's tokenizer"
        )
    if spec.tokenizer_sha256 is None and spec.tokenizer not in (None, tokenizer.name):
        raise CorpusError(
            f'corpus "{spec.source}" is prepared with the tokenizer {tokenizer.name}, and corpus.tokenizer is '
            f"{spec.tokenizer}: leave corpus.tokenizer out, or prepare the text with that tokenizer"
        )


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
