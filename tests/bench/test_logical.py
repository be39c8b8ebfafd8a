"""The bench of the logical shape: its counts, and one quick run of the whole script with a real stage."""

from __future__ import annotations

import json

import pytest

from blocktrain.model.block import logical_parameters, physical_parameters
from blocktrain.spec import Denoise, EndToEnd

pytestmark = pytest.mark.timeout(300)  # it starts processes that import torch


@pytest.fixture(scope="module")
def logical(bench):
    return bench("logical")


@pytest.fixture(scope="module")
def document(logical, tmp_path_factory):
    out = tmp_path_factory.mktemp("logical")
    logical.main(["--quick", "--threads", "1", "--out", str(out)])
    assert (out / "logical.html").is_file()
    return json.loads((out / "logical.json").read_text())


@pytest.mark.parametrize("objective", [Denoise(span_share=0.5), EndToEnd()])
def test_the_shape_has_75_80_billion_logical_parameters(logical, objective):
    spec = logical.logical_spec(objective, positions=64, physical_layers=2, quick=False)
    assert f"{logical_parameters(spec) / 1e9:.2f}" == "75.80"
    assert physical_parameters(spec) < 1.3e9


def test_a_traversal_costs_two_operations_a_logical_parameter_and_position(logical):
    spec = logical.logical_spec(EndToEnd(), positions=64, physical_layers=2, quick=False)
    assert logical.traversal_flops(spec, 63) == pytest.approx(2 * 63 * logical_parameters(spec), rel=0.01)


def test_logical_and_physical_counts_stand_side_by_side(document):
    for way in ("sweep", "autoregressive"):
        assert document[way]["physical_parameters"] < document[way]["logical_parameters"]
        assert 2 * document[way]["physical_parameters"] <= sum(document[way]["stored_bytes"])


def test_the_sweep_takes_one_traversal_and_the_other_one_a_byte(document):
    swept, written = document["sweep"], document["autoregressive"]
    assert (swept["measured_bytes"], swept["output_bytes"], written["output_bytes"]) == (8, 8, 8)
    assert [len(stages) for stages in swept["stage_seconds"]] == [1]
    assert len(written["traversal_seconds"]) == written["measured_bytes"]


def test_the_logits_of_every_byte_go_over_the_wire(document):
    written = document["autoregressive"]
    in_half_precision = 256 * 2
    assert written["measured_wire_bytes"]["back"] > written["measured_bytes"] * in_half_precision


def test_what_was_not_run_is_called_extrapolated(document):
    summary, written = document["summary"], document["autoregressive"]
    assert {"autoregressive_extrapolated_seconds", "extrapolated_speedup"} <= summary.keys()
    rest = (written["output_bytes"] - 1) * written["median_later_byte_seconds"]
    assert written["extrapolated_seconds"] == pytest.approx(written["first_byte_seconds"] + rest)


def test_every_stage_tells_its_peak_memory(document):
    for way in ("sweep", "autoregressive"):
        assert [stage["block"] for stage in document[way]["stages"]] == [0]
        assert all(stage["peak_rss_bytes"] > 0 for stage in document[way]["stages"])


def test_the_section_says_what_is_extrapolated_and_whether_the_shape_is_the_paper_s(logical, document):
    shape, speed = logical.verdicts(document)
    assert (shape.reached, shape.paper) == (False, "75.80")
    assert "of 8 bytes of it measured, the rest extrapolated" in speed.ours
    assert f"- goal: {shape.what} ≥ 75.80: not reached (" in logical.section(document)
