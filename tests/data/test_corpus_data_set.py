"""Corpora that are data sets, read by the package datasets from files of its formats."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from blocktrain.data.corpus import load_corpus
from blocktrain.data.raw import data_set_name
from blocktrain.errors import ConfigError, CorpusError
from blocktrain.spec import CorpusSpec

TEXTS = [f"{n} bottles of beer on the wall" for n in range(200)]
JOINED = "\n".join(TEXTS).encode()


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    """The package, with a cache of its own. Importing it takes a second: only where these tests run."""
    datasets = pytest.importorskip("datasets", reason="needs the extra: pip install 'blocktrain[hf]'")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return datasets


def whole(source: object, **shares: float) -> bytes:
    corpus = load_corpus(CorpusSpec(source=f"hf:{source}", **shares), context=8)
    return b"".join(part.tobytes() for part in (corpus.train, corpus.valid, corpus.test))


def write_json(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_a_file_of_each_format_is_the_same_text(tmp_path, datasets, kind):
    path = tmp_path / f"set.{kind}"
    made = datasets.Dataset.from_dict({"number": list(range(200)), "text": TEXTS})
    {"jsonl": made.to_json, "parquet": made.to_parquet, "csv": made.to_csv}[kind](path)
    assert whole(path) == JOINED


def test_a_folder_with_the_three_splits_brings_its_own(tmp_path):
    for name in ("train", "validation", "test"):
        write_json(tmp_path / f"{name}.jsonl", [{"text": f"{name} {n}"} for n in range(20)])
    corpus = load_corpus(CorpusSpec(source=f"hf:{tmp_path}"), context=8)
    assert [bytes(x[:5]) for x in (corpus.train, corpus.valid, corpus.test)] == [b"train", b"valid", b"test "]


@pytest.mark.parametrize("suffix, first", [("::title", b"A0"), ("::body", b"B0")])
def test_a_column_can_be_named(tmp_path, suffix, first):
    path = write_json(tmp_path / "set.jsonl", [{"title": f"A{n} or so", "body": f"B{n} or so"} for n in range(50)])
    assert whole(f"{path}{suffix}").startswith(first)


@pytest.mark.parametrize("suffix", ["", "::text"])
def test_an_unclear_column_is_refused_with_those_there_are(tmp_path, suffix):
    path = write_json(tmp_path / "set.jsonl", [{"title": "a", "body": "b"}])
    with pytest.raises(CorpusError, match="title, body: name one"):
        whole(f"{path}{suffix}")


def test_rows_without_text_are_left_out(tmp_path):
    rows = [{"text": text} for text in TEXTS] + [{"text": None}]
    assert whole(write_json(tmp_path / "set.jsonl", rows)) == JOINED


def test_a_data_set_that_cannot_be_read_is_refused_with_the_remedy(tmp_path):
    (tmp_path / "set.parquet").write_text("nothing")
    with pytest.raises(CorpusError, match="check its name"):
        whole(tmp_path / "set.parquet")


@pytest.mark.parametrize(
    "source, parts",
    [
        ("hf:a/b", ("a/b", None, None)),
        ("hf:a/b:c", ("a/b", "c", None)),
        ("hf:a/b:c:d", ("a/b", "c", "d")),
        ("hf:a/b::d", ("a/b", None, "d")),
    ],
)
def test_a_name_has_up_to_three_parts(source, parts):
    assert data_set_name(source) == parts


@pytest.mark.parametrize("source", ["hf:", "hf:a:b:c:d"])
def test_what_names_no_data_set_is_refused(source):
    with pytest.raises(ConfigError, match="write hf:NAME"):
        data_set_name(source)


def test_without_the_extra_the_remedy_is_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusError, match=r"pip install 'blocktrain\[hf\]'"):
        whole("some/data-set")
