"""Preparing: what is in the splits, that a kill loses nothing, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blocktrain.data import prepare as module
from blocktrain.data import scan as scanning
from blocktrain.data import writing
from blocktrain.data.corpus import load_corpus
from blocktrain.data.prepare import Plan, PrepareReport, prepare
from blocktrain.data.shards import SHARD_BYTES as SHARD_BYTES_OF_PREPARE
from blocktrain.data.shards import SPLITS, PreparedCorpus, shard_file
from blocktrain.data.tokenizer import BpeTokenizer, learn_tokenizer
from blocktrain.errors import ConfigError, CorpusError, StorageError
from blocktrain.settings import CorpusSpec

SHARD_BYTES = 16384


class Killed(BaseException):
    """As if the process had ended here."""


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(writing, "BATCH_BYTES", 8000)


def plan(source: object, tokenizer: str = "bpe:300", **settings: object) -> Plan:
    return Plan((str(source),), tokenizer, 0.1, 0.1, shard_bytes=SHARD_BYTES, **settings)


def text_of(corpus: PreparedCorpus, split: str) -> str:
    tokens = corpus.split(split)
    return corpus.tokenizer.decode(tokens.take(np.arange(len(tokens))).tolist()).decode()


def documents_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_every_document_is_in_exactly_one_split(rows, tmp_path, tokenizer):
    corpus = prepare(plan(rows, tokenizer), tmp_path / "corpus")
    found = {split: text_of(corpus, split) for split in SPLITS}
    held = [sum(text in found[split] for split in SPLITS) for text in documents_of(rows)]
    assert held == [1] * 300
    assert len("\n".join(found.values()).encode()) == len("\n".join(documents_of(rows)).encode())
    assert all(0.03 < len(found[split]) / sum(map(len, found.values())) < 0.2 for split in ("valid", "test"))


def test_the_index_counts_tokens_and_bytes_of_every_shard(rows, tmp_path):
    corpus = prepare(plan(rows), tmp_path / "corpus")
    train = corpus.index.splits["train"]
    assert len(train) > 3
    assert {shard.num_tokens for shard in train[:-1]} == {SHARD_BYTES // 2}
    for number, shard in enumerate(train):
        tokens = np.fromfile(shard_file(corpus.folder, shard.sha256), dtype="<u2")
        assert len(corpus.tokenizer.decode(tokens.tolist())) == shard.text_bytes, number
    assert sum(corpus.index.documents.values()) == 300


def test_the_same_text_gives_the_same_corpus_elsewhere(rows, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "rows.jsonl"
    elsewhere.parent.mkdir()
    shutil.copy(rows, elsewhere)
    ours, theirs = prepare(plan(rows), tmp_path / "a"), prepare(plan(elsewhere), tmp_path / "b")
    assert ours.index.sha256 == theirs.index.sha256
    assert ours.tokenizer.sha256 == theirs.tokenizer.sha256


def test_the_tokenizer_is_learned_from_train_alone(tmp_path):
    for split, word in (("train", "river"), ("valid", "zebra"), ("test", "yacht")):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{split}.txt").write_text(f"{word} {word} {word}, " * 50 + split)
    corpus = prepare(plan(tmp_path / "texts"), tmp_path / "corpus")
    assert len(corpus.tokenizer.encode(b" river")) == 1
    assert len(corpus.tokenizer.encode(b" zebra")) > 2


def test_sections_from_different_places_do_not_make_new_words(tmp_path):
    """A file without line breaks is cut within words."""
    text = " ".join(f"{n:07}" for n in range(9000))
    (tmp_path / "line.txt").write_text(text)
    corpus = prepare(plan(tmp_path / "line.txt", "bytes"), tmp_path / "corpus")
    pieces = [piece for split in SPLITS for piece in text_of(corpus, split).split("\n")]
    assert len(pieces) > 5
    assert all(piece in text for piece in pieces)
    assert sum(map(len, pieces)) == len(text)


def test_sections_of_whole_lines_are_joined_without_another_break(tmp_path):
    text = "".join(f"paragraph {n}\n\n" for n in range(9000))
    (tmp_path / "book.txt").write_text(text)
    corpus = prepare(plan(tmp_path / "book.txt", "bytes"), tmp_path / "corpus")
    assert sum(corpus.index.text_bytes(split) for split in SPLITS) == len(text)


def test_a_vocabulary_above_65536_gets_shards_of_32_bits(rows, tmp_path):
    settings = json.loads(learn_tokenizer(iter(documents_of(rows)), 300).file)
    vocabulary = settings["model"]["vocab"]
    vocabulary[next(token for token, index in vocabulary.items() if index == 256)] = 70_000
    (tmp_path / "large.json").write_text(json.dumps(settings))
    corpus = prepare(plan(rows, str(tmp_path / "large.json")), tmp_path / "corpus")
    assert (corpus.index.vocabulary, corpus.index.token_bytes) == (70_001, 4)
    assert corpus.split("train").take(np.arange(len(corpus.split("train")))).max() == 70_000
    assert sum(text in text_of(corpus, "train") for text in documents_of(rows)) == corpus.index.documents["train"]


def test_a_near_duplicate_of_a_held_out_document_is_left_out_of_train(rows, tmp_path):
    first = prepare(plan(rows, "bytes"), tmp_path / "first")
    held = next(text for text in documents_of(rows) if text in text_of(first, "valid"))
    with rows.open("a") as file:
        file.write(json.dumps({"text": held + " Edited at the end."}) + "\n")
    second = prepare(plan(rows, "bytes"), tmp_path / "second")
    assert (second.index.duplicates, second.index.documents["train"]) == (1, first.index.documents["train"])
    assert "Edited at the end" not in text_of(second, "train")


def count_calls(monkeypatch, function: str, at: int, error: BaseException) -> Callable[[], None]:
    """The call number `at` of os.replace or os.fsync raises."""
    real, calls = getattr(os, function), iter(range(10**6))

    def call(*arguments: object, **settings: object) -> object:
        if next(calls) == at:
            raise error
        return real(*arguments, **settings)

    monkeypatch.setattr(os, function, call)
    return lambda: monkeypatch.setattr(os, function, real)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5, 6, 9, 12, 15])
def test_a_kill_at_any_write_loses_nothing_and_the_same_command_continues(rows, tmp_path, monkeypatch, at):
    whole = prepare(plan(rows), tmp_path / "whole")
    undo = count_calls(monkeypatch, "replace", at, Killed())
    with pytest.raises(Killed):
        prepare(plan(rows), tmp_path / "killed")
    undo()
    with pytest.raises(CorpusError, match=r"is not a prepared corpus.*after it has finished"):
        PreparedCorpus.open(tmp_path / "killed")
    assert prepare(plan(rows), tmp_path / "killed").index == whole.index
    names = sorted(path.name for path in (tmp_path / "killed").rglob("*"))
    assert names == sorted(path.name for path in (tmp_path / "whole").rglob("*"))


def test_after_a_kill_only_the_last_shard_is_made_again(rows, tmp_path, monkeypatch):
    undo = count_calls(monkeypatch, "replace", 12, Killed())
    with pytest.raises(Killed):
        prepare(plan(rows), tmp_path / "corpus")
    undo()
    reports: list[PrepareReport] = []
    prepare(plan(rows), tmp_path / "corpus", reports.append)
    assert {report.task for report in reports} == {"writing"}
    assert reports[0].done_bytes > 2 * 8000


def test_a_disk_that_fills_is_named_and_leaves_no_corpus(rows, tmp_path, monkeypatch):
    undo = count_calls(monkeypatch, "fsync", 8, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(StorageError, match=r"No space left on device\): free .* run the command again"):
        prepare(plan(rows), tmp_path / "corpus")
    undo()
    with pytest.raises(CorpusError, match="is not a prepared corpus"):
        PreparedCorpus.open(tmp_path / "corpus")
    assert prepare(plan(rows), tmp_path / "corpus").index.documents["train"] > 200


def test_a_finished_corpus_is_not_made_again(rows, tmp_path):
    first, reports = prepare(plan(rows), tmp_path / "corpus"), []
    assert prepare(plan(rows), tmp_path / "corpus", reports.append).index == first.index
    assert reports == []


def test_a_source_is_the_same_in_every_spelling(rows, tmp_path):
    first = prepare(plan(rows), tmp_path / "corpus")
    assert prepare(plan(f"{rows.parent}/.//{rows.name}"), tmp_path / "corpus").index == first.index


def test_what_differs_from_an_unfinished_corpus_is_named_too(rows, tmp_path, monkeypatch):
    killed_after_some_shards(rows, tmp_path / "corpus", monkeypatch)
    with pytest.raises(ConfigError, match=r"settings \(its tokenizer is bpe:300, not bytes\): choose another"):
        prepare(plan(rows, "bytes"), tmp_path / "corpus")


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"tokenizer": "bpe:301"}, r"its tokenizer is bpe:300, not bpe:301"),
        ({"sources": ("tests",)}, r"its source is .*rows.jsonl"),
        ({"valid_share": 0.2}, "a file has changed since, or a share"),
    ],
)
def test_what_differs_from_the_finished_corpus_is_named(rows, tmp_path, changed, named):
    prepare(plan(rows), tmp_path / "corpus")
    with pytest.raises(ConfigError, match=rf"from other text or with other settings \({named}.*\): choose another"):
        prepare(replace(plan(rows), **changed), tmp_path / "corpus")


def test_a_corpus_is_not_written_into_its_own_source(rows, tmp_path):
    with pytest.raises(ConfigError, match=r"corpus is inside the source .*: choose an --out elsewhere"):
        prepare(plan(tmp_path), tmp_path / "new" / "corpus")
    assert not (tmp_path / "new").exists()


def test_a_large_tokenizer_makes_the_shards_smaller(rows, tmp_path):
    tokenizer = BpeTokenizer("x", learn_tokenizer(iter(documents_of(rows)), 300).file, "x")
    tokenizer.file = bytes(21 * 2**20)
    assert module._largest_shard(tokenizer) == 5 * 2**20
    tokenizer.file = bytes(2**20)
    assert module._largest_shard(tokenizer) == SHARD_BYTES_OF_PREPARE


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_or_other_text_need_another_folder(rows, tmp_path, monkeypatch, finished):
    if not finished:
        undo = count_calls(monkeypatch, "replace", 5, Killed())
    with pytest.raises(Killed) if not finished else pytest.MonkeyPatch.context():
        prepare(plan(rows), tmp_path / "corpus")
    if not finished:
        undo()
    with pytest.raises(ConfigError, match=r"from other text or with other settings.*: choose another --out, or delete"):
        prepare(plan(rows, "bpe:301"), tmp_path / "corpus")
    rows.write_text(rows.read_text() + json.dumps({"text": "more"}) + "\n")
    with pytest.raises(ConfigError, match="from other text or with other settings"):
        prepare(plan(rows), tmp_path / "corpus")


def killed_after_some_shards(rows: Path, out: Path, monkeypatch) -> None:
    undo = count_calls(monkeypatch, "replace", 12, Killed())
    with pytest.raises(Killed):
        prepare(plan(rows), out)
    undo()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("lose", [Path.unlink, cut])
def test_shards_that_are_lost_after_a_kill_are_made_again(rows, tmp_path, monkeypatch, lose):
    whole = prepare(plan(rows), tmp_path / "whole")
    killed_after_some_shards(rows, tmp_path / "corpus", monkeypatch)
    for shard in (tmp_path / "corpus" / "shards").iterdir():
        lose(shard)
    assert prepare(plan(rows), tmp_path / "corpus").index == whole.index
    for split in SPLITS:
        PreparedCorpus.open(tmp_path / "corpus").split(split).check()


@pytest.mark.parametrize("name", ["progress.npz", "scan.json", "sketches.npz", "plan.json"])
def test_cut_notes_of_a_killed_process_count_as_none(rows, tmp_path, monkeypatch, name):
    whole = prepare(plan(rows), tmp_path / "whole")
    killed_after_some_shards(rows, tmp_path / "corpus", monkeypatch)
    cut(tmp_path / "corpus" / ".preparing" / name)
    assert prepare(plan(rows), tmp_path / "corpus").index == whole.index


@pytest.mark.parametrize("lose, why", [(Path.unlink, "No such file"), (cut, r"it has \d+ bytes instead of \d+")])
def test_a_finished_corpus_without_one_of_its_shards_is_not_taken_for_whole(rows, tmp_path, lose, why):
    corpus = prepare(plan(rows), tmp_path / "corpus")
    path = shard_file(corpus.folder, corpus.index.splits["train"][1].sha256)
    lose(path)
    with pytest.raises(CorpusError, match=rf"{path.name} is damaged \({why}.*\): restore it"):
        prepare(plan(rows), tmp_path / "corpus")


def test_two_processes_do_not_prepare_the_same_folder(rows, tmp_path):
    with module._alone_in(tmp_path), pytest.raises(ConfigError, match="is being prepared by another process: wait"):
        prepare(plan(rows), tmp_path)


def test_text_that_falls_into_train_alone_asks_for_more(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "only one document"}\n')
    with pytest.raises(
        CorpusError, match=r"falls into the split .*: give at least three different documents or a longer"
    ):
        prepare(plan(tmp_path / "a.jsonl"), tmp_path / "corpus")


@pytest.mark.parametrize("texts", [["a b", "b c", "c d"], ["one", "two", "three"], [f"number {n}" for n in range(5)]])
def test_of_three_documents_or_more_each_split_gets_one(tmp_path, texts):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    documents = prepare(plan(tmp_path / "a.jsonl"), tmp_path / "corpus").index.documents
    assert sum(documents.values()) == len(texts)
    assert all(documents.values())


def test_of_few_documents_some_are_held_out_too(rows, tmp_path):
    (tmp_path / "few.jsonl").write_text("".join(rows.read_text().splitlines(keepends=True)[:12]))
    documents = prepare(Plan((str(tmp_path / "few.jsonl"),), "bpe:300"), tmp_path / "corpus").index.documents
    assert documents["train"] > documents["valid"] > 0
    assert documents["test"] > 0
    assert sum(documents.values()) == 12


def test_a_source_without_any_text_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(CorpusError, match="holds no text: give a file or folder that holds text"):
        prepare(plan(tmp_path / "a.jsonl"), tmp_path / "corpus")


def test_held_out_text_stops_growing_with_the_corpus(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(scanning, "MAX_HELD_OUT_BYTES", 3000)
    corpus = prepare(plan(rows, "bytes"), tmp_path / "corpus")
    assert 1000 < corpus.index.text_bytes("valid") < 6000
    assert sum(corpus.index.documents.values()) == 300


def test_after_a_refused_text_the_corrected_one_may_be_prepared_there(rows, tmp_path):
    wrong = tmp_path / "wrong.txt"
    wrong.write_bytes(b"\0")
    with pytest.raises(CorpusError, match="is binary: leave it out"):
        prepare(plan(wrong), tmp_path / "corpus")
    assert prepare(plan(rows), tmp_path / "corpus").index.num_tokens("train")


def test_a_corpus_is_not_mixed_with_other_files(rows, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "novel.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="mine holds other files: choose another --out"):
        prepare(plan(rows), tmp_path / "mine")
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {"novel.txt", ".lock"}


def test_what_is_prepared_already_is_not_prepared_again(rows, tmp_path):
    prepare(plan(rows), tmp_path / "corpus")
    with pytest.raises(CorpusError, match="is prepared already: give it with --corpus"):
        prepare(plan(tmp_path / "corpus"), tmp_path / "again")


def test_a_corpus_that_is_not_prepared_to_its_end_is_no_text(rows, tmp_path, monkeypatch):
    undo = count_calls(monkeypatch, "replace", 5, Killed())
    with pytest.raises(Killed):
        prepare(plan(rows), tmp_path / "corpus")
    undo()
    assert list((tmp_path / "corpus" / "shards").iterdir())
    with pytest.raises(CorpusError, match="is not prepared to its end: run its blocktrain prepare command again"):
        load_corpus(CorpusSpec(source=str(tmp_path / "corpus")), 8)
