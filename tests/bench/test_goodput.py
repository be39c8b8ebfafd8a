"""Goodput at its quick size: the simulator's real code with machines that fail, and the synchronous run beside it."""

import json

import pytest


@pytest.fixture(scope="module")
def document(bench, tmp_path_factory):
    out = tmp_path_factory.mktemp("goodput")
    bench("goodput").main(["--quick", "--seeds", "0,1", "--out", str(out)])
    return json.loads((out / "goodput.json").read_text())


def test_most_of_the_computed_steps_survive_failures(document):
    (point,) = document["points"]
    assert 0.5 < point["swarm"]["of_steps"] <= 1
    assert 0 < point["swarm"]["of_time"] <= 1


def test_the_shares_are_means_over_the_seeds(document):
    (point,) = document["points"]
    shares = [seed["swarm"]["of_steps"] for seed in point["seeds"]]
    assert point["swarm"]["of_steps"] == pytest.approx(sum(shares) / 2)
    assert point["swarm"]["least"] == min(shares)


def test_a_synchronous_run_without_failures_loses_only_its_checkpoints(bench):
    plan = {"worker-0": [], "worker-1": [], "coordinator-1": []}
    found = bench("goodput").synchronous(plan, steps=100, interval=50)
    assert (found["of_steps"], found["restarts"], found["took_s"]) == (1.0, 0, 104.0)


def test_a_failure_of_any_machine_takes_a_synchronous_run_back_to_its_checkpoint(bench):
    plan = {"worker-0": [], "worker-1": [(7.5, 5.0)], "coordinator-1": []}
    found = bench("goodput").synchronous(plan, steps=10, interval=5)
    assert (found["restarts"], found["finished"]) == (1, True)
    assert found["took_s"] == pytest.approx(12.5 + 10.0 + 5 * 1.0 + 2.0)


def test_the_page_has_both_shares_and_the_goals(bench, document):
    page = bench("goodput").section(document)
    assert page.startswith("## Goodput\n\n")
    assert "| 60 s |" in page
    assert bench("goodput").figures(document).keys() == {"goodput"}
