"""Whole runs of a real swarm at their quick size: of the experiments on swarm_run.py the one that starts processes;
their pages are made of sample documents in test_swarm_pages.py."""

import json

import pytest

pytestmark = pytest.mark.timeout(600)  # it starts processes that import torch, on a machine that may be busy


@pytest.fixture(scope="module")
def out(bench, tmp_path_factory):
    """One quick run of the whole script, on hosts that need no root."""
    out = tmp_path_factory.mktemp("six_workers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench("swarm_run"), "network", bench("swarm_hosts").loopback)
        bench("six_workers").main(["--quick", "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def document(out):
    return json.loads((out / "six_workers.json").read_text())


def test_both_runs_are_scored_on_held_out_text(document):
    assert document["results"].keys() == {
        "stacked single/0",
        "stacked swarm/0",
        "stacked single at higher rates/0",
    }
    for record in document["results"].values():
        assert 0 < record["valid"] < 6
        assert 0 < record["test"] < 6


def test_the_swarm_trains_on_no_more_bytes_than_the_single_worker(document):
    single, swarm = (document["results"][f"stacked {who}/0"] for who in ("single", "swarm"))
    assert 0 < swarm["tokens"] <= single["tokens"]
    assert swarm["settings"]["spec"]["train"]["windows"] * 2 == single["settings"]["spec"]["train"]["windows"]


def test_what_the_workers_moved_and_took_is_on_record(document):
    swarm = document["results"]["stacked swarm/0"]
    assert swarm["counted"] == "payloads"
    assert 0 < swarm["payload_down_bytes"] < swarm["payload_up_bytes"]  # int6 against int8
    assert swarm["rounds"] <= swarm["updates"] <= 2 * swarm["rounds"]
    assert swarm["worker_rss_peak_bytes"] > 0


def test_a_result_that_is_there_is_not_made_again(bench, out, document):
    bench("six_workers").main(["--quick", "--out", str(out)])
    assert json.loads((out / "six_workers.json").read_text()) == document
