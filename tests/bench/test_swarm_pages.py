"""The pages of the experiments with whole swarms, made of sample documents: what they say follows from the figures."""

import pytest

from blocktrain.spec import preset
from blocktrain.train.flops import run_flops

SPEC = preset("tiny").with_(**{"swarm.round_steps": 2})


def a_record(name, **changes):
    settings = {
        "spec": SPEC.model_dump(mode="json"),
        "link": {"rate_bits": 100e6, "rtt_ms": 80.0},
        "absences": [],
        "workers": 2,
    }
    return {
        "name": name,
        "seed": 0,
        "settings": settings,
        "valid": 1.5,
        "test": 1.6,
        "untrained": 5.5,
        "tokens": 1000,
        "workers": 2,
        "rounds": 10,
        "updates": 20,
        "moved_parameters": 1000,
        "payload_up_bytes": 3900,
        "payload_down_bytes": 3900,
        "up_bytes": 4000,
        "down_bytes": 4000,
        "joining_bytes": 10_000,
        "counted": "cables",
        "worker_rss_peak_bytes": 4 * 10**8,
        "tensor_peak_bytes": 10**7,
        "flops": 10**12,
        "seconds": 60.0,
        "virtual_s": 100.0,
        "curve": [[0.0, 5.5], [50.0, 3.0], [100.0, 1.5]],
        **changes,
    }


def a_document(*records):
    return {"results": {f"{record['name']}/{record['seed']}": record for record in records}}


@pytest.mark.parametrize("swarm, said", [(1.509, "reached (+0.0090"), (1.511, "not reached (+0.0110")])
def test_six_workers_may_lose_a_hundredth(bench, swarm, said):
    document = a_document(
        a_record("stacked single", valid=1.7),
        a_record("stacked single at higher rates"),  # better: it is the one that counts
        a_record("stacked swarm", valid=swarm, workers=6),
    )
    page = bench("six_workers").section(document)
    assert page.startswith("## Six workers\n\n6 worker processes")
    assert f": {said}" in page
    assert bench("six_workers").figures(document).keys() == {"six_workers"}


@pytest.mark.parametrize("valid, said", [(1.80, ": reached (5.500 → 1.800"), (1.82, "not reached (5.500 → 1.820")])
def test_three_hosts_must_come_as_far_as_the_paper(bench, valid, said):
    document = a_document(a_record("full participation", valid=valid))
    assert said in bench("three_hosts").section(document)
    assert bench("three_hosts").figures(document).keys() == {"three_hosts"}


def test_transport_is_counted_against_fp32_in_the_same_document(bench):
    document = a_document(a_record("fp32"), a_record("vector", up_bytes=40, down_bytes=400, updates=20))
    page = bench("transport").section(document)
    assert "not reached (100.0 times up, 10.0 times down)" in page
    assert bench("transport").figures(document).keys() == {"transport"}


def test_full_replicas_do_the_same_work_as_the_blocks(bench):
    diloco = bench("diloco")
    runs = diloco.runs(preset("tiny"))
    works = {name: run_flops(spec) for name, spec in runs.items()}
    assert works[diloco.FULL] == works[diloco.DILOCO] == pytest.approx(works[diloco.OURS], rel=0.03)
    assert runs[diloco.FULL].model.blocks == 1
    assert runs[diloco.FULL].model.total_layers == preset("tiny").model.total_layers


def test_blocks_are_held_against_full_replicas(bench):
    diloco = bench("diloco")
    document = a_document(a_record(diloco.OURS, tensor_peak_bytes=4 * 10**6), a_record(diloco.DILOCO, valid=1.4))
    page = diloco.section(document)
    assert "not reached (1.5000 against 1.4000)" in page
    assert ": reached (0.40 of it)" in page
    assert diloco.figures(document).keys() == {"diloco"}
