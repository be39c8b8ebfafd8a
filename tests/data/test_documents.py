"""Documents: every kind of source gives its texts, and a source that has none says so."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.data.documents import documents, remarks_on_texts, sections
from blocktrain.errors import CorpusError

ROWS = ["one\r\ntwo", "Ünïcödé", "", "last"]
CUT = gzip.compress(b"text" * 99, mtime=0)[:-9]  # without the time, which would be in the name of the case
LINES = "".join(json.dumps({"text": row}) + "\n" for row in ROWS).encode()


def texts(*sources: object, **settings: str) -> list[str]:
    return [document.text for document in documents([str(source) for source in sources], **settings)]


def parquet(path: Path, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize(
    "name, data",
    [
        ("rows.jsonl", LINES),
        ("rows.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("rows.jsonl.zst", zstandard.compress(LINES)),
        ("two-frames.jsonl.zst", zstandard.compress(LINES[:20]) + zstandard.compress(LINES[20:])),
        ("strings.jsonl", "\n".join(map(json.dumps, ROWS)).encode()),
        ("rows.ndjson", LINES),
        ("ROWS.JSONL.GZ", gzip.compress(LINES, mtime=0)),
    ],
)
def test_each_row_of_json_lines_is_a_document(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert texts(tmp_path / name) == ROWS


def test_each_row_of_parquet_is_a_document(tmp_path):
    assert texts(parquet(tmp_path / "a.parquet", text=[*ROWS, None], score=[1, 2, 3, 4, 5])) == ROWS
    assert texts(parquet(tmp_path / "b.parquet", body=ROWS), column="body") == ROWS


def test_a_data_set_is_streamed(tmp_path):
    pytest.importorskip("datasets", reason="needs the extra: pip install 'blocktrain[hf]'")
    for split in ("train", "validation", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"body": f"text of {split}"}) + "\n")
    found = list(documents([f"hf:{tmp_path}::body"]))
    assert {(document.text, document.split) for document in found} == {
        ("text of train", "train"),
        ("text of validation", "valid"),
        ("text of test", "test"),
    }


@pytest.mark.parametrize(
    "name, data",
    [
        ("list.json", json.dumps([{"text": row} for row in ROWS] + [{"text": None}]).encode()),
        ("rows.ndjson", LINES + b'{"text": null}\n'),
    ],
)
def test_a_file_is_read_as_a_data_set_and_rows_without_text_are_left_out(tmp_path, monkeypatch, name, data):
    pytest.importorskip("datasets", reason="needs the extra: pip install 'blocktrain[hf]'")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / name).write_bytes(data)
    assert texts(f"hf:{tmp_path / name}::text") == ROWS


@pytest.mark.parametrize("pack, suffix", [(bytes, ""), (gzip.compress, ".gz"), (zstandard.compress, ".zst")])
def test_the_sections_of_a_text_file_join_to_the_file(tmp_path, pack, suffix):
    text = "".join(f"Paragraph {n}.\r\nIts second line.\n\n" for n in range(900))
    (tmp_path / f"book.txt{suffix}").write_bytes(pack(text.encode()))
    found = list(documents([str(tmp_path)]))
    assert "".join(document.text for document in found) == text
    assert len(found) > 5
    assert [document.continues for document in found] == [False] + [True] * (len(found) - 1)


@given(st.lists(st.sampled_from(["a", "bb\n", "\n\n", "word " * 9, "x" * 70]), max_size=40))
def test_sections_lose_nothing_and_stay_short(pieces):
    found = list(sections(pieces, 10))
    assert "".join(found) == "".join(pieces)
    assert all(0 < len(section) <= 40 for section in found)


def test_each_of_many_text_files_is_a_document(tmp_path):
    for number in range(400):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    assert sorted(texts(tmp_path)) == sorted(f"text {number}" for number in range(400))


def test_a_folder_with_train_valid_and_test_has_its_own_splits(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"{split}.txt").write_text(f"of {split}")
    assert [(d.split, d.text) for d in documents([str(tmp_path)])] == [
        ("train", "of train"),
        ("valid", "of valid"),
        ("test", "of test"),
    ]


def test_the_splits_of_a_folder_may_have_several_files_and_the_names_of_data_sets(tmp_path):
    for name in ("train-00001-of-00002", "train-00000-of-00002", "validation-00000-of-00001", "test"):
        parquet(tmp_path / f"{name}.parquet", text=[name])
    assert [(d.split, d.text) for d in documents([str(tmp_path)])] == [
        ("train", "train-00000-of-00002"),
        ("train", "train-00001-of-00002"),
        ("valid", "validation-00000-of-00001"),
        ("test", "test"),
    ]


@pytest.mark.parametrize(
    "names, complaint",
    [
        (
            ["train.jsonl", "test.jsonl"],
            r"holds (train|test).jsonl and no file of the split valid: add what is missing",
        ),
        (["validation.txt", "more.txt"], "holds validation.txt and no file of the split train or test: add"),
        (["train.txt", "valid.txt", "test.txt", "more.txt"], "and more.txt, which is of none: move it elsewhere"),
    ],
)
def test_a_folder_is_not_split_anew_if_some_of_its_files_are_splits(tmp_path, names, complaint):
    for name in names:
        (tmp_path / name).write_text('{"text": "x"}\n')
    with pytest.raises(CorpusError, match=complaint):
        texts(tmp_path)


def test_json_and_tables_among_texts_are_remarked_on_and_what_has_a_reader_is_not(tmp_path):
    for name, data in {
        "a.txt": LINES * 2,
        "b.csv": b"id,body\n1,x\n",
        "c.jsonl": LINES,
        "d.ndjson": LINES,
        "e.json.gz": gzip.compress(LINES, mtime=0),
        "plain.txt": b"plain",
    }.items():
        (tmp_path / name).write_bytes(data)
    remarks = sorted(remarks_on_texts([str(tmp_path)]))
    assert len(remarks) == 2
    assert remarks[0].startswith(("a.txt, like 1 more of the 4 files, holds JSON", "e.json, like 1 more of the 4"))
    assert remarks[1].startswith("b.csv, one of 4 files, is a table")


@pytest.mark.parametrize(
    "name, data, complaint",
    [
        ("photo.jpg", b"\xff\xd8\xff\xe0", r"photo.jpg is a JPEG image: leave it out"),
        ("data.bin", b"a\0b", r"data.bin is binary: leave it out"),
        ("one.txt", b"a" * 9000 + b"\xff", r"one.txt is not UTF-8 text .*: convert it to UTF-8, or remove it"),
        (
            "old.txt",
            "Bär, naïve, façade".encode("latin-1"),
            r"old.txt is not UTF-8, perhaps Latin-1: .* iconv -f LATIN1",
        ),
        (
            "wide.txt",
            "plain text".encode("utf-16"),
            r"wide.txt is UTF-16 text: convert it with iconv -f UTF-16 -t UTF-8",
        ),
        ("wide.txt", "plain text".encode("utf-16-le"), r"wide.txt is UTF-16LE text: convert it with iconv -f UTF-16LE"),
        ("a.parquet.gz", b"x", r"a.parquet.gz is a compressed parquet file: unpack it first"),
        ("rows.jsonl", b'{"body": "x"}\n', r'line 1 is not a JSON object with the text "text": .* --column'),
        ("rows.jsonl", b'{"text": "x"}\n{"text": 3}\n', r"rows.jsonl, line 2 is not"),
        ("rows.jsonl", b'{"text": "x"}\n{"te', r"rows.jsonl, line 2 is not"),
        ("cut.txt.gz", CUT, r"cut.txt.gz is not a whole .gz file .*: replace or remove"),
        ("no.txt.gz", b"plain", r"no.txt.gz is not a whole .gz file"),
        ("cut.txt.zst", zstandard.compress(b"text" * 99)[:-3], r"cut.txt.zst is not a whole .zst file .*: replace"),
        ("no.txt.zst", b"plain text", r"no.txt.zst is not a whole .zst file .*: replace or remove"),
        ("no.parquet", b"plain text", r"no.parquet is not a parquet file .*: replace or remove"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path, name, data, complaint):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CorpusError, match=complaint):
        texts(tmp_path)


def test_a_parquet_file_without_a_text_column_lists_those_it_has(tmp_path):
    path = parquet(tmp_path / "a.parquet", title=["x"], body=["y"], year=[1])
    with pytest.raises(
        CorpusError, match=r'no text column "text", its text columns are title, body: name one .*column'
    ):
        texts(path)


def test_a_parquet_file_without_any_text_column_says_so(tmp_path):
    with pytest.raises(CorpusError, match=r"a.parquet has no column of text: leave it out"):
        texts(parquet(tmp_path / "a.parquet", year=[1]))


def test_an_empty_folder_and_a_missing_one_are_refused(tmp_path):
    with pytest.raises(CorpusError, match="is an empty folder: give a file or folder that holds text"):
        texts(tmp_path)
    with pytest.raises(CorpusError, match="is not a file or folder here"):
        texts(tmp_path / "no")


@pytest.mark.parametrize(
    "name, package, extra", [("a.parquet", "pyarrow", "parquet"), ("a.txt.zst", "zstandard", "zstd")]
)
def test_without_an_extra_the_remedy_is_to_install_it(tmp_path, monkeypatch, name, package, extra):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CorpusError, match=rf"needs the package {package}.*pip install 'blocktrain\[{extra}\]'"):
        texts(tmp_path)
