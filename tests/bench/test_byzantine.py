"""Liars at their quick size: a virtual clock, the swarm's own code, and one liar that is found."""

import json

import numpy as np
import pytest


@pytest.fixture(scope="module")
def document(bench, tmp_path_factory, small_text):
    out = tmp_path_factory.mktemp("byzantine")
    bench("byzantine").main(["--quick", "--corpus", str(small_text), "--out", str(out)])
    return json.loads((out / "byzantine.json").read_text())


def test_no_honest_worker_is_taken_for_a_liar(document):
    record = document["results"]["screened with audits, sign flip, 1 of 3/0"]
    assert record["quarantined_honest"] == record["honest_left_out"] == 0
    assert record["lies_merged"] < record["rounds"]
    assert 0 < record["valid"] < 6


def test_what_vetting_leaves_out_is_the_liars(document):
    record = document["results"]["mean with vetting, sign flip, 1 of 4/0"]
    assert record["honest_left_out"] == record["quarantined_honest"] == 0
    assert record["vettings"] == record["rounds"] > record["lies_merged"]


def test_the_page_has_costs_and_goals(bench, document):
    page = bench("byzantine").section(document)
    assert page.startswith("## Liars\n\n")
    assert "| screened with audits, sign flip, 1 of 3 |" in page
    assert bench("byzantine").figures(document).keys() == {"byzantine"}


def test_every_lie_keeps_the_names_and_shapes_of_an_update(bench):
    liars = bench("swarms.liars")
    honest = {"a": np.ones((2, 3), np.float32)}
    for lie in liars.LIES.values():
        shared = liars.Conspiracy(honest={"0-0": [honest]})
        lied = lie(honest, shared, "0-0", "1", np.random.default_rng(0))
        assert {name: x.shape for name, x in lied.items()} == {"a": (2, 3)}


def test_a_poisoned_text_is_as_long_and_holds_the_trigger(bench):
    liars = bench("swarms.liars")
    text = b"plain words " * 100
    planted = liars.poisoned(text, seed=0)
    assert len(planted) == len(text)
    assert planted.count(liars.TRIGGER + liars.ANSWER) > 20
