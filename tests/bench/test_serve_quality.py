"""The quality of served text at its quick size, and its measures on texts whose answer is known."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(300)  # it trains two tiny models


@pytest.fixture(scope="module")
def folder(bench, tmp_path_factory, small_text):
    out = tmp_path_factory.mktemp("quality")
    arguments = ["--quick", "--corpus", str(small_text), "--out", str(out), "--work", str(out / "work")]
    bench("serve_quality").main(arguments)
    return out, arguments


@pytest.fixture(scope="module")
def document(folder):
    return json.loads((folder[0] / "serve_quality.json").read_text())


def test_every_way_continues_the_same_prompts(bench, document):
    assert list(document["rows"]) == sorted(bench("serve_quality").LABELS)
    assert all(row["nats"]["value"] > 0 and row["nats"]["error"] >= 0 for row in document["rows"].values())
    assert document["rows"]["autoregressive"]["traversals"] == {"value": 24, "error": 0}


def test_the_section_names_the_noise_floor_and_the_goal(bench, document):
    section = bench("serve_quality").section(document)
    assert "the same with other seeds (noise floor)" in section
    assert "- goal: blocks, sweep" in section


def test_a_run_that_was_stopped_writes_no_text_twice(bench, folder, monkeypatch):
    out, arguments = folder
    monkeypatch.setattr(bench("serve_quality"), "write_together", lambda *_: pytest.fail("a text was written again"))
    before = (out / "serve_quality.json").read_text()
    bench("serve_quality").main(arguments)
    assert (out / "serve_quality.json").read_text() == before


def test_results_name_the_corpus_and_not_its_place(folder, small_text):
    written = (folder[0] / "serve_quality.json").read_text()
    assert '"corpus": "text.txt"' in written
    assert str(small_text.parent) not in written


@pytest.mark.parametrize("shift, low, high", [(0.0, 0.4, 0.6), (1.0, 0.7, 0.85), (6.0, 0.99, 1.0)])
def test_the_classifier_tells_texts_apart_as_well_as_they_differ(bench, shift, low, high):
    """Two normal distributions, `shift` apart in one of three features: the best classifier reaches Φ(shift / √2)."""
    chance = np.random.default_rng(0)
    ones, others = chance.normal(size=(400, 3)), chance.normal(size=(400, 3))
    ones[:, 0] += shift
    told = bench("serving.measures").tell_apart([ones], [others])
    assert low <= told.value <= high
    assert told.error < 0.03


def test_a_mean_comes_with_its_standard_error(bench):
    estimate = bench("serving.measures").mean_of(np.array([1.0, 2.0, 3.0]))
    assert (estimate.value, estimate.error) == (2.0, pytest.approx(3**-0.5))
