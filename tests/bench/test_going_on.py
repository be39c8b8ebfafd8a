"""Going on from a model at its quick size, and what the page makes of its results."""

from __future__ import annotations

import json

import pytest

ROWS = "other text: the model,other text: frozen,other text: new,more steps: further"


@pytest.fixture(scope="module")
def document(bench, tmp_path_factory, small_text):
    out = tmp_path_factory.mktemp("going-on")
    bench("going_on").main(["--quick", "--corpus", str(small_text), "--rows", ROWS, "--out", str(out)])
    return json.loads((out / "going_on.json").read_text())


def test_what_is_trained_further_is_better_than_the_model_it_starts_from(document):
    model, frozen = (document["results"][f"other text: {name}/0"] for name in ("the model", "frozen"))
    assert frozen["valid"] < model["valid"]
    assert (model["flops"], frozen["settings"]["spec"]["train"]["freeze"]) == (0, [0, 1])
    assert 0 < frozen["flops"] < document["results"]["other text: new/0"]["flops"]


def test_the_page_has_a_row_for_each_and_a_goal_where_both_sides_are(bench, document):
    going_on = bench("going_on")
    text = going_on.section(document)
    assert text.startswith("## Going on from a model\n\nA model of 4 layers")
    assert "| other text | blocks 0 and 1 frozen | " in text
    assert [verdict.what for verdict in going_on.verdicts(document)] == ["the same with two blocks frozen"]


def test_a_manner_of_equal_work_has_about_the_steps_for_it(bench):
    going_on, flops = bench("going_on"), bench("blocktrain.train.flops").run_flops
    base = bench("blocktrain.spec").preset("small")
    whole, blocks = (going_on.spec_of(base, going_on.OTHER_TEXT[name], 100) for name in ("whole", "all blocks"))
    assert flops(whole) == pytest.approx(flops(blocks), rel=0.02)
