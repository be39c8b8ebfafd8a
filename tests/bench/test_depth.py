"""The experiment on depth, at a tiny shape: its rows do equal work, and its file makes its part of the page."""

import json

import pytest

from blocktrain.spec import preset
from blocktrain.train.flops import run_flops
from blocktrain.train.streamed import streamed_run_flops


@pytest.fixture(scope="module")
def depth(bench):
    return bench("depth")


@pytest.fixture(scope="module")
def document(depth, small_text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("depth")
    rows = "end-to-end,whole-bare,one-block"
    depth.main(
        ["--quick", "--corpus", str(small_text), "--rows", rows, "--out", str(folder), "--work", str(folder / "runs")]
    )
    return json.loads((folder / "depth.json").read_text())


def test_every_row_does_the_work_of_its_budget(depth):
    base = preset("small").with_(**{"model.layers": 8})
    rows = {row.name: row.make(base, 800) for row in depth.rows_of(800)}
    work = run_flops(rows["end-to-end-800"])
    for name, spec in rows.items():
        assert (streamed_run_flops if "whole" in name else run_flops)(spec) == pytest.approx(work, rel=0.01), name


def test_the_section_tells_every_row_and_the_memory_of_a_streamed_worker(depth, document):
    text = depth.section(document)
    assert "whole model, one block in memory" in text or "without the blocks' own losses" in text
    assert "whole, one block in memory | 2 |" in text


def test_what_is_recovered_is_one_at_the_loss_of_end_to_end_training(depth):
    lines = {
        "one-block": {"valid": 1.3},
        "end-to-end": {"valid": 1.2},
        "whole": {"valid": 1.2},
        "default": {"valid": 1.3},
    }
    assert (depth._recovered(lines, "whole"), depth._recovered(lines, "default")) == (1.0, 0.0)


def test_the_figure_has_one_line_per_way_of_training(depth, document):
    assert len(depth.figures(document)["depth"].data) == 3
