"""The experiment with tokenizers at its quick size, and what the page makes of its results."""

from __future__ import annotations

import json

import pytest

from blocktrain.spec import preset


@pytest.fixture(scope="module")
def text(bench):
    return bench("text")


@pytest.fixture(scope="module")
def document(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rows = [f"{n} bottles of beer on wall {n * n}, and {n * n * n} bottles of wine. " * 8 for n in range(300)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    size = ["--quick", "--steps", "2", "--vocabularies", "1024", "--rank", "8", "--max-windows", "2", "--sizes", "1"]
    where = ["--corpus", str(folder / "rows.jsonl"), "--out", str(folder), "--work", str(folder / "work")]
    text.main([*size, *where, "--threads", "1"])
    assert not (folder / "work" / "corpora" / "generated-1").exists()
    return json.loads((folder / "text.json").read_text())


def test_every_tokenizer_is_trained_in_blocks_and_end_to_end_at_equal_work(document):
    lines = {line["row"]: line for line in document["summary"]}
    names = [f"{tokenizer}{rank}" for tokenizer in ("bytes", "bpe-1024") for rank in ("", "-rank-8")]
    assert set(lines) == {f"{name}-{way}" for name in names for way in ("e2e", "blocks")}
    assert lines["bytes-e2e"]["valid_gap"] == 0.0
    assert lines["bpe-1024-rank-8-blocks"]["table_share"] < lines["bpe-1024-blocks"]["table_share"]


def test_preparing_and_memory_are_measured(document):
    assert document["prepare"]["ratio"] > 0
    assert document["prepare"]["prepare_bytes_per_cpu_s"] > 0
    assert document["memory"]["1"]["peak_bytes"] > 10**7
    assert 0 < document["memory"]["1"]["drawing_share"] < 1
    assert 10**5 < document["memory"]["1"]["first_step_bytes"] < 2 * 10**7


def test_the_page_has_the_table_the_speeds_and_the_goals(text, document):
    section = text.section(document)
    assert section.startswith("## Tokenizers and large corpora")
    assert section.count("\n| ") >= 8
    assert "goal: preparing, as a share of the library's speed ≥ 0.8" in section
    assert list(text.figures(document)) == ["text"]


def test_narrow_tables_are_at_most_a_third_of_the_parameters_at_width_256_with_8192_tokens(bench, text):
    """Wide ones are nearly three quarters."""
    shape = {"model.width": 256, "model.heads": 8, "model.vocabulary": 8192}
    wide = preset("wikitext").with_(**shape)
    share = bench("text_report").table_share
    assert share(wide) > 0.7
    assert share(wide.with_(**{"model.table_rank": text.NARROW_RANK})) < 1 / 3
