"""Whole runs of a real swarm at their quick size: of the experiments on swarms/run.py the one that starts processes;
their pages are made of sample documents in test_swarm_pages.py."""

import json

import pytest

pytestmark = pytest.mark.timeout(600)  # it starts processes that import torch, on a machine that may be busy


@pytest.fixture(scope="module")
def quick_run(bench, tmp_path_factory, small_text):
    """One quick run of the whole script, on hosts that need no root."""
    out = tmp_path_factory.mktemp("six_workers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench("swarms.run"), "network", bench("swarms.hosts").loopback)
        arguments = ["--quick", "--corpus", str(small_text), "--out", str(out)]
        bench("six_workers").main(arguments)
    return arguments, out / "six_workers.json"


@pytest.fixture(scope="module")
def document(quick_run):
    return json.loads(quick_run[1].read_text())


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


def test_a_result_that_is_there_is_not_made_again(bench, quick_run, document):
    arguments, result = quick_run
    bench("six_workers").main(arguments)
    assert json.loads(result.read_text()) == document
