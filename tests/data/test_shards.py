"""A prepared corpus: its windows, what it holds in memory, and what happens when a file is damaged."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import numpy as np
import pytest

from blocktrain.data.corpus import load_corpus, with_tokenizer
from blocktrain.data.prepare import Plan, prepare
from blocktrain.data.shards import MAPPED_AT_ONCE, PreparedCorpus, ShardWriter, shard_file, token_size
from blocktrain.data.tokenizer import ByteTokenizer
from blocktrain.data.windows import STEPS_PER_SHARDS, consecutive_windows, shards_of_step, text_bytes, windows
from blocktrain.errors import ConfigError, CorpusError
from blocktrain.spec import CorpusSpec, RunSpec, preset
from blocktrain.train.trainer import BlockTrainer

WHERE = {"seed": 1, "block": 2, "shard": 3, "step": 4}


@pytest.fixture
def corpus(rows: Path, tmp_path: Path) -> PreparedCorpus:
    """About ten shards in train."""
    return prepare(Plan((str(rows),), "bpe:300", 0.1, 0.1, shard_bytes=16384), tmp_path / "corpus")


@pytest.mark.parametrize("vocabulary, size", [(256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_tokens_take_as_few_bytes_as_the_vocabulary_allows(vocabulary, size):
    assert token_size(vocabulary) == size


def test_tokens_are_taken_from_all_shards(corpus):
    tokens = corpus.split("train")
    whole = np.concatenate(
        [np.fromfile(shard_file(corpus.folder, entry.sha256), "<u2") for entry in corpus.index.splits["train"]]
    )
    assert np.array_equal(tokens.take(np.arange(len(tokens))), whole)
    assert np.array_equal(consecutive_windows(tokens, 9, first=5, most=3)[1], whole[48:57])
    assert text_bytes(tokens, whole).sum() == tokens.text_bytes


def test_windows_of_one_shard_are_those_of_its_bytes_in_memory(rows, tmp_path):
    corpus = prepare(Plan((str(rows),), "bytes", 0.1, 0.1), tmp_path / "corpus")
    tokens = corpus.split("train")
    in_memory = tokens.take(np.arange(len(tokens))).astype(np.uint8)
    assert len(tokens.sizes) == 1
    assert np.array_equal(windows(tokens, count=8, length=30, **WHERE), windows(in_memory, count=8, length=30, **WHERE))


def test_windows_are_a_function_of_their_coordinates_and_stay_in_few_shards(corpus):
    ours, theirs = corpus.split("train"), PreparedCorpus.open(corpus.folder).split("train")
    drawn = windows(ours, count=50, length=30, **WHERE)
    assert np.array_equal(drawn, windows(theirs, count=50, length=30, **WHERE))
    assert not np.array_equal(drawn, windows(ours, count=50, length=30, **WHERE | {"shard": 4}))
    chosen = shards_of_step(ours, 30, **WHERE)
    assert len(set(chosen)) == 2
    assert set(theirs._mapped) == set(chosen)


def test_the_shards_of_a_step_change_now_and_then_and_reach_all(corpus):
    tokens = corpus.split("train")
    assert len({shards_of_step(tokens, 30, 0, 0, 0, step) for step in range(STEPS_PER_SHARDS)}) == 1
    later = [shards_of_step(tokens, 30, 0, 0, 0, n * STEPS_PER_SHARDS) for n in range(400)]
    assert {number for chosen in later for number in chosen} == set(range(len(tokens.sizes)))


def test_few_files_are_mapped_at_once(corpus):
    tokens = corpus.split("train")
    tokens.check()
    assert len(tokens.sizes) > MAPPED_AT_ONCE
    assert len(tokens._mapped) == MAPPED_AT_ONCE


def test_files_that_were_opened_ahead_are_not_checked_again_when_they_are_used(corpus, monkeypatch):
    tokens, threads = corpus.split("train"), []
    sha256 = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda data: threads.append(threading.get_ident()) or sha256(data))
    ahead = tokens.open_ahead([3, 4])
    ahead.join()
    tokens.rows(np.array([3, 4]) * tokens.shard_tokens, 5)
    assert threads == [ahead.ident] * 2


def test_a_file_that_cannot_be_opened_ahead_is_named_when_it_is_used(corpus):
    tokens = corpus.split("train")
    shard_file(corpus.folder, tokens.entries[3].sha256).unlink()
    tokens.open_ahead([3]).join()
    with pytest.raises(CorpusError, match=r"is damaged .*No such file"):
        tokens.take(np.array([3 * tokens.shard_tokens]))


def test_a_trainer_opens_the_files_of_later_steps_once(corpus, monkeypatch):
    spec = preset("tiny").with_(**{"corpus.source": str(corpus.folder), "train.steps": 3 * STEPS_PER_SHARDS})
    loaded = load_corpus(spec.corpus, spec.model.context)
    spec, opened = with_tokenizer(spec, loaded), []
    monkeypatch.setattr(loaded.train, "open_ahead", opened.append)
    trainer = BlockTrainer(spec, spec.phases[0], loaded.train, {}, compile=False)
    for trainer.step_done in (1, 2, STEPS_PER_SHARDS, spec.phases[0].steps - 1):
        trainer.open_ahead()
    where = {"length": spec.model.context + 1, "seed": spec.draw_seed, "block": 0, "shard": 0}
    assert opened == [shards_of_step(loaded.train, step=n * STEPS_PER_SHARDS, **where) for n in (1, 2)]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    {"changed": lambda: path.write_bytes(data), "cut": lambda: path.write_bytes(data[:-2]), "gone": path.unlink}[how]()


@pytest.mark.parametrize(
    "how, why", [("changed", "hash is [0-9a-f]{12}… instead of"), ("cut", "bytes instead of"), ("gone", "No such")]
)
def test_a_damaged_shard_is_named_when_it_is_used(corpus, how, why):
    path = shard_file(corpus.folder, corpus.index.splits["train"][1].sha256)
    damage(path, how)
    tokens = PreparedCorpus.open(corpus.folder).split("train")
    with pytest.raises(CorpusError, match=rf"{path.name} is damaged \(.*{why}.*\): restore it from a copy, or delete"):
        tokens.take(np.arange(len(tokens)))


@pytest.mark.parametrize("name", ["index.json", "tokenizer.json"])
def test_a_damaged_index_or_tokenizer_is_named(corpus, name):
    path = corpus.folder / name
    facts = json.loads(path.read_text())
    if name == "index.json":
        facts["vocabulary"] -= 1
    else:
        facts["model"]["merges"].pop()
    path.write_text(json.dumps(facts))
    with pytest.raises(CorpusError, match=r"tokenizer.json is damaged \(it is not the tokenizer of the index\)"):
        PreparedCorpus.open(corpus.folder)
    path.write_text("{")
    with pytest.raises((CorpusError, ConfigError), match=name):
        PreparedCorpus.open(corpus.folder)


def test_a_run_takes_the_tokenizer_of_its_prepared_corpus(corpus):
    spec = RunSpec(corpus=CorpusSpec(source=str(corpus.folder)))
    loaded = load_corpus(spec.corpus, 64)
    spec = with_tokenizer(spec, loaded)
    assert (spec.corpus.tokenizer, spec.model.vocabulary) == ("bpe:300", 300)
    assert spec.corpus.tokenizer_sha256 == corpus.tokenizer.sha256
    assert load_corpus(spec.corpus, 64).sha256 == loaded.sha256
    assert with_tokenizer(spec, loaded) == spec


def test_a_run_with_many_tokens_gets_narrow_tables_unless_it_names_their_width(corpus):
    tiny = preset("tiny").with_(**{"corpus.source": str(corpus.folder)})
    loaded = load_corpus(tiny.corpus, 64)
    assert with_tokenizer(tiny, loaded).model.table_rank == 24
    assert with_tokenizer(tiny.with_(**{"model.table_rank": 32}), loaded).model.table_rank == 32


@pytest.mark.parametrize(
    "tokenizer, sha256, complaint",
    [
        ("bytes", None, "is prepared with the tokenizer bpe:300, and corpus.tokenizer is bytes: leave"),
        ("bpe:400", None, "is prepared with the tokenizer bpe:300, and corpus.tokenizer is bpe:400: leave"),
        ("bpe:300", "0" * 64, r"is prepared with another tokenizer \(bpe:300\) than the run .*: prepare the text with"),
    ],
)
def test_a_corpus_prepared_with_another_tokenizer_than_the_runs_is_refused(corpus, tokenizer, sha256, complaint):
    spec = CorpusSpec(source=str(corpus.folder), tokenizer=tokenizer, tokenizer_sha256=sha256)
    with pytest.raises(CorpusError, match=complaint):
        load_corpus(spec, 64)


def test_a_vocabulary_that_does_not_fit_the_model_is_refused(corpus):
    spec = RunSpec(corpus=CorpusSpec(source=str(corpus.folder)))
    loaded = load_corpus(spec.corpus, 64)
    with pytest.raises(ConfigError, match=r"model.vocabulary = 999 does not fit the tokenizer bpe:300, which has 300"):
        with_tokenizer(spec.with_(**{"model.vocabulary": 999}), loaded)
    with pytest.raises(ConfigError, match=r"vocabulary of 300, which does not fit the model: model.vocabulary is 256"):
        BlockTrainer(spec, spec.phases[0], loaded.train, {}, compile=False)


def test_a_source_is_prepared_on_first_use_into_the_cache(rows, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec, reports = CorpusSpec(source=str(rows), tokenizer="bpe:300", valid_share=0.1, test_share=0.1), []
    first = load_corpus(spec, 16, reports.append)
    assert reports
    assert load_corpus(spec, 16, reports.clear).sha256 == first.sha256
    assert len(list((tmp_path / "cache" / "blocktrain" / "corpora").iterdir())) == 1


def test_a_split_that_is_too_short_is_named_in_tokens(corpus):
    with pytest.raises(CorpusError, match=r"the (train|valid|test) split of corpus .* has \d+ tokens and needs 100001"):
        load_corpus(CorpusSpec(source=str(corpus.folder)), 100_000)


def test_a_writer_continues_where_another_was(tmp_path):
    data = np.arange(5000) % 251
    one, two = (ShardWriter(tmp_path, ByteTokenizer(), shard_bytes=1024) for _ in range(2))
    one.add(data[:3000])
    two.restore(one.entries, one.pending.copy())
    one.add(data[3000:])
    two.add(data[3000:])
    assert json.dumps([e.sha256 for e in one.finish()]) == json.dumps([e.sha256 for e in two.finish()])
