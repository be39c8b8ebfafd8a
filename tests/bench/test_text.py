"""The experiment with tokenizers at its quick size, and what the page makes of its results."""

from __future__ import annotations

import json

import pytest

WINDOW_BYTES = 32 * 8  # of the quick size: 32 tokens


@pytest.fixture(scope="module")
def text(bench):
    return bench("text")


@pytest.fixture(scope="module")
def document(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rows = [f"{n} bottles of beer on wall {n * n}, and {n * n * n} bottles of wine. " * 8 for n in range(300)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    size = ["--quick", "--steps", "2", "--vocabularies", "1024,400", "--score-bytes", "2000", "--sizes", "1"]
    where = ["--corpus", str(folder / "rows.jsonl"), "--out", str(folder), "--work", str(folder / "work")]
    text.main([*size, *where, "--threads", "1"])
    assert not (folder / "work" / "corpora" / "generated-1").exists()
    return json.loads((folder / "text.json").read_text())


def test_every_tokenizer_is_trained_in_blocks_and_end_to_end_at_equal_work(document):
    lines = {line["row"]: line for line in document["summary"]}
    names = ["bytes", "bpe-1024", "bpe-1024-wide", "bpe-400"]
    assert set(lines) == {f"{name}-{way}" for name in names for way in ("e2e", "blocks")}
    assert lines["bytes-e2e"]["valid_gap"] == 0.0
    assert lines["bpe-1024-blocks"]["table_share"] < lines["bpe-1024-wide-blocks"]["table_share"]


def test_every_row_is_scored_on_the_same_text(document):
    scored = [record["scores"]["valid"][-1]["num_bytes"] for record in document["results"].values()]
    assert max(scored) - min(scored) < WINDOW_BYTES


def test_preparing_and_memory_are_measured(document):
    assert document["prepare"]["ratio"] > 0
    assert document["prepare"]["prepare_bytes_per_cpu_s"] > 0
    assert document["memory"]["1"]["peak_bytes"] > 10**6
    assert document["memory"]["1"]["prepare_peak_bytes"] > 10**6
    assert 0 < document["memory"]["1"]["drawing_share"] < 1
    assert 10**5 < document["memory"]["1"]["first_step_bytes"] < 2 * 10**7
    assert document["memory"]["1"]["later_s"] > 0


def test_the_demos_tokenizer_and_bytes_write_a_sample_each(text, document):
    assert [sample["tokenizer"] for sample in document["samples"]] == ["bytes", text.TOKENIZER]
    for sample in document["samples"]:
        assert sample["prepare_cpu_seconds"] > 0
        assert all(0 < len(written) <= text.SAMPLE_BYTES for written in sample["texts"])
        assert f"`{sample['tokenizer']}`, {sample['valid']:.4f} nats/byte" in text.section(document)


def test_without_memory_rows_the_page_is_written(text, document):
    without = {key: value for key, value in document.items() if key not in ("memory", "samples")}
    assert "Generated corpora" in text.section(document)
    assert "Memory against the size of the text is not measured" in text.section(without)


def test_the_page_has_the_table_the_speeds_and_the_goals(text, document):
    section = text.section(document)
    assert section.startswith("## Tokenizers and large corpora")
    assert section.count("\n| ") >= 8
    assert "goal: preparing, as a share of the library's speed ≥ 0.8" in section
    assert "goal: bpe:8192 at width 256: share of the parameters in tables ≤ 0.333" in section
    assert list(text.figures(document)) == ["text"]
