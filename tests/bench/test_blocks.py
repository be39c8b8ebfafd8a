"""The experiment with the number of blocks at its quick size."""

from __future__ import annotations

import json

import pytest

ROWS = "reference-1,reference-2,stacked-2"


@pytest.fixture(scope="module")
def blocks(bench):
    return bench("blocks")


@pytest.fixture(scope="module")
def document(blocks, tmp_path_factory, small_text):
    folder = tmp_path_factory.mktemp("blocks")
    where = ["--corpus", str(small_text), "--out", str(folder), "--work", str(folder / "work")]
    blocks.main(["--quick", "--rows", ROWS, "--seeds", "0", *where])
    assert (folder / "blocks.html").is_file()
    return json.loads((folder / "blocks.json").read_text())


def test_every_row_is_scored_and_its_memory_measured(blocks, document):
    assert (
        {record["row"] for record in document["results"].values()} == document["memory"].keys() == set(ROWS.split(","))
    )
    assert blocks.memory_share(document, "reference-1") == 1
    assert blocks.memory_share(document, "denoise-8") is None


def test_a_gap_is_to_the_same_blocks_end_to_end(blocks, document):
    lines = {line["row"]: line for line in blocks.summarise(blocks.ROWS, document["results"])}
    assert lines["stacked-2"]["test_gap"] == lines["stacked-2"]["test"] - lines["reference-2"]["test"]
    assert lines["stacked-2"]["parameters"] == lines["reference-2"]["parameters"]


@pytest.mark.parametrize("blocks_of_row", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["stacked", "denoise"])
def test_every_row_does_the_work_of_the_reference(bench, blocks, kind, blocks_of_row):
    flops = bench("training.rows").run_flops
    base = blocks.preset("small").with_(**{"model.layers": blocks.LAYERS})
    reference, cut = (blocks.row_of(name, blocks_of_row).make(base, 200) for name in ("reference", kind))
    assert flops(cut) == pytest.approx(flops(reference), rel=0.02)


def test_the_section_has_a_line_a_row_and_the_goal_of_the_default(blocks, document):
    section = blocks.section(document)
    assert section.count("\n| 2 | ") == 2
    assert "- goal: 2 blocks: gap to end to end at equal work, test, nats/byte ≤ 0.02: " in section
