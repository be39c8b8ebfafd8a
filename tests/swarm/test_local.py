"""A swarm in one process: it trains, gives its model, and leaves nothing when it ends."""

from __future__ import annotations

import re
import socket
import threading

import pytest
import torch

from blocktrain.errors import ConfigError, CorpusError
from blocktrain.swarm.local import local_swarm
from blocktrain.swarm.worker.worker import Worker
from blocktrain.train.run import load_model
from blocktrain.train.start import open_start
from blocktrain.wire.invite import parse_invite

PATIENCE_S = 100.0


@pytest.fixture
def spec(tiny_run):
    return tiny_run.with_(**{"train.steps": 4, "swarm.round_steps": 2})


def test_two_workers_train_a_run_to_its_end(spec):
    seen = set()
    with local_swarm(spec, workers=2, report=lambda name, report: seen.add((name, report.kind))) as swarm:
        assert swarm.wait(PATIENCE_S)
        assert all(phase["finished"] for phase in swarm.status()["phases"])
        assert len(swarm.model().blocks) == 4
    assert {("worker-1", "finished"), ("worker-2", "finished")} <= seen


def test_a_worker_tells_its_step_in_the_lease_and_in_the_phase(spec):
    told = []
    with local_swarm(spec, workers=1, report=lambda _, report: told.append((report.kind, report.text))) as swarm:
        assert swarm.wait(PATIENCE_S)
    steps = [re.sub(r"\d+ s left", "… s left", text) for kind, text in told if kind == "step"]
    assert steps[:2] == [f"step {n}/2 of the lease, … s left (phase 1: {n}/4)" for n in (1, 2)]
    assert steps[2] == "step 1/2 of the lease, … s left (phase 1: 3/4)"


def test_nothing_is_left_when_it_ends(spec):
    before = threading.active_count()
    with local_swarm(spec.with_(**{"train.steps": 10_000}), workers=1) as swarm:
        folder, port = swarm.folder, parse_invite(swarm.invite).port
        assert not swarm.wait(0.0)
    assert threading.active_count() == before
    assert not folder.exists()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port)).close()
    swarm.stop()  # again does nothing


def test_with_a_folder_it_goes_on_where_it_was(spec, tmp_path):
    with local_swarm(spec, workers=1, folder=tmp_path / "swarm") as swarm:
        assert swarm.wait(PATIENCE_S)
    with local_swarm(spec, workers=0, folder=tmp_path / "swarm") as again:
        assert all(phase["finished"] for phase in again.status()["phases"])


def test_a_worker_s_error_reaches_who_waits(spec, monkeypatch):
    def broken(self):
        raise CorpusError("the text is gone: restore it")

    monkeypatch.setattr(Worker, "run", broken)
    with local_swarm(spec, workers=1) as swarm, pytest.raises(CorpusError, match="restore it"):
        swarm.wait(PATIENCE_S)


def test_waiting_for_nobody_is_refused(spec):
    with local_swarm(spec, workers=0) as swarm, pytest.raises(ConfigError, match="add_worker"):
        swarm.wait()


def test_a_swarm_starts_from_a_model_and_leaves_its_frozen_blocks_alone(spec, trained_run):
    spec = spec.with_(**{"train.freeze": [0, 1]})
    with local_swarm(spec, workers=1, start=trained_run) as swarm:
        assert [block["state"] for block in swarm.status()["blocks"]][:2] == ["frozen", "frozen"]
        assert swarm.wait(PATIENCE_S)
        after, before = swarm.model(), load_model(trained_run)
    same = [
        all(torch.equal(ours, theirs) for ours, theirs in zip(*(x.parameters() for x in pair), strict=True))
        for pair in zip(after.blocks, before.blocks, strict=True)
    ]
    assert same == [True, True, False, False]
    assert after.spec.train.start_sha256 == open_start(trained_run).sha256


def test_a_swarm_with_frozen_blocks_needs_a_model(spec):
    with pytest.raises(ConfigError, match="give that model with --from"):
        local_swarm(spec.with_(**{"train.freeze": [0]}), workers=0)
