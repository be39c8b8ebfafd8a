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

from blocktrain.data.documents import documents, sections
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


@pytest.mark.parametrize(
    "name, data, complaint",
    [
        ("photo.jpg", b"\xff\xd8\xff\xe0", r"photo.jpg is not UTF-8 text .*: convert it to UTF-8, or remove it"),
        ("data.bin", b"a\0b", r"data.bin is not text, it holds zero bytes: leave it out"),
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
