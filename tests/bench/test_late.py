"""Late and lost updates at their quick size: a virtual clock, the swarm's own code."""

import json

import pytest


@pytest.fixture(scope="module")
def document(bench, tmp_path_factory, small_text):
    out = tmp_path_factory.mktemp("late")
    bench("late").main(["--quick", "--corpus", str(small_text), "--out", str(out)])
    return json.loads((out / "late.json").read_text())


def test_every_manner_trains_to_the_end_in_its_own_time(document):
    ours, waiting = (document["results"][f"stacked, {manner}, 50 %/0"] for manner in ("ours", "waiting"))
    assert ours["settings"]["faults"] == waiting["settings"]["faults"]
    for record in (ours, waiting):
        times = [at_s for at_s, _ in record["curve"]]
        assert times == sorted(times)
        assert times[-1] == record["virtual_s"]
        assert 0 < record["valid"] < 6


def test_the_page_compares_at_the_time_when_ours_was_at_its_end(bench, document):
    late = bench("late")
    assert late.section(document).startswith("## Late and lost updates\n\n")
    assert late.figures(document).keys() == {"late"}
    record = {"curve": [[0.0, 5.5], [10.0, 3.0], [20.0, 2.0]]}
    assert [late.at_time(record, seconds) for seconds in (0, 19.9, 20, 99)] == [5.5, 3.0, 2.0, 2.0]


def test_faults_are_a_function_of_what_they_befall(bench):
    faults = bench("swarms.virtual").Faults(0.25, seed=1, delay_s=(2.0, 4.0))
    drawn = [faults.drawn(worker, number) for worker in range(10) for number in range(100)]
    assert drawn == [faults.drawn(worker, number) for worker in range(10) for number in range(100)]
    late, lost = sum(delay_s > 0 for delay_s, _ in drawn), sum(lost for _, lost in drawn)
    assert 200 < late < 300
    assert 0.4 < lost / late < 0.6
    assert all(delay_s == 0 or 2 <= delay_s <= 4 for delay_s, _ in drawn)


def test_virtual_time_passes_only_when_all_sleep(bench):
    clock, heard = bench("swarms.virtual").VirtualClock(), []

    def worker(name, nap_s):
        def work():
            for _ in range(2):
                clock.sleep(nap_s)
                heard.append((name, clock.now_s))

        return work

    clock.start(worker("slow", 3.0))
    clock.start(worker("quick", 2.0))
    clock.run()
    assert heard == [("quick", 2.0), ("slow", 3.0), ("quick", 4.0), ("slow", 6.0)]
