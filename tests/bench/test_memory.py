"""The memory of workers at its quick size; one of them in a process of its own."""

import json

import pytest
import torch

from blocktrain.spec import preset

pytestmark = pytest.mark.timeout(300)  # it starts processes that import torch


@pytest.fixture(scope="module")
def memory(bench):
    return bench("memory")


@pytest.fixture(scope="module")
def written(memory, tmp_path_factory, small_text):
    """One quick run of the whole script."""
    out, threads = tmp_path_factory.mktemp("memory"), torch.get_num_threads()
    memory.main(["--quick", "--corpus", str(small_text), "--out", str(out)])
    assert torch.get_num_threads() == threads
    return out


@pytest.fixture(scope="module")
def document(written):
    return json.loads((written / "memory.json").read_text())


def test_the_result_says_what_was_run_on_which_machine(document, written):
    assert document["spec"]["name"] == "tiny"
    assert {"cores", "torch", "threads", "platform"} <= document["machine"].keys()
    assert (written / "memory.html").is_file()


def test_a_worker_holds_its_share_of_the_state(document):
    reference, scaffold = document["memory"]
    assert reference["state_ratio"] == 1
    assert scaffold["trained_blocks"] == [2, 3]
    assert 0.5 < scaffold["state_ratio"] < 0.62  # half, and read-outs of its own


def test_memory_adds_up(document):
    for row in document["memory"]:
        held = row["bytes"]
        assert held["weights"] >= held["gradients"] > 0
        assert held["state"] == held["weights"] + held["gradients"] + held["optimiser"] <= held["held"]
        assert held["tensor_peak"] > held["held"] - held["gradients"]


def test_a_worker_is_measured_in_a_process_of_its_own(bench, document, small_text):
    measure = bench("training.memory")
    case = measure.quick_cases(preset("tiny").with_(**{"corpus.source": str(small_text)}))[1]
    memory = measure.in_own_process(case, steps=2)
    assert memory.state == document["memory"][1]["bytes"]["state"]
    assert memory.rss_peak > 0


def test_a_worker_needs_less_memory_than_the_whole_model(document):
    assert all(row["tensor_peak_ratio"] < 1 for row in document["memory"][1:])


def test_no_kind_of_worker_is_excused_from_the_goal(memory, document):
    reference, scaffold = document["memory"]
    assert (reference["goal"], scaffold["goal"]) == (None, 0.35)
    alone = scaffold | {"name": "middle block", "trained_blocks": [2], "tensor_peak_ratio": 0.3}
    verdicts = memory.verdicts({"memory": [reference, alone, scaffold | {"tensor_peak_ratio": 0.5}]})
    assert [(v.ours, v.reached) for v in verdicts] == [
        (f"{alone['state_ratio']:.3f} (middle block)", alone["state_ratio"] <= 0.35),
        ("0.300 (middle block)", True),
        ("0.500 (middle, scaffold)", False),
        ("0.500 (middle, scaffold)", True),
    ]
    assert f"- goal: {verdicts[2].what} ≤ 0.35: " in memory.section(document)


def test_no_path_of_the_machine_gets_into_the_result(memory):
    spec = preset("tiny").with_(**{"corpus.source": "/home/somebody/texts"})
    assert memory.portable(spec)["corpus"]["source"] == "texts"
