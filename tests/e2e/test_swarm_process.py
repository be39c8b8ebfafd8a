"""A swarm of real processes on this machine: it trains to the end, also if the coordinator is killed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blocktrain.cli.main import app

pytestmark = pytest.mark.timeout(300)  # its processes import torch, on a machine that may be busy
QUICK = ["swarm.deadline_floor_s=1", "swarm.deadline_ceiling_s=4"]  # so that a dead worker is soon done without


def invite_of(coordinator: Any, folder: Path) -> str:
    """From its directory, as soon as it listens."""
    return coordinator.file(folder / "invite").strip()


def set_paused(paused: bool, coordinator: Any, folder: Path) -> None:
    run_here("pause" if paused else "resume", coordinator.file(folder / "invite-admin").strip())


def rest_of(process: Any) -> str:
    """What it says until it ends, well."""
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return said


def kill(process: Any) -> None:
    process.kill()
    process.wait()


def run_here(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def held_out_loss(facts: dict) -> float:
    """Of the composition without fitted weights: what was trained, not what was fitted after it."""
    (last,) = [score for score in facts["evaluations"][-1]["scores"] if score["reading"] == "last"]
    return last["nats_per_byte"]


@dataclass(frozen=True)
class TrainedSwarm:
    """A run that two workers have trained to its end, and its coordinator, which still runs."""

    coordinator: Any
    invite: str
    text: Path
    home: Path
    said: list[str]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory, sentences: bytes, start_for_all, coordinator_of) -> TrainedSwarm:
    folder = tmp_path_factory.mktemp("swarm")
    text = folder / "text.txt"
    text.write_bytes(sentences)
    settings = ["train.steps=20", "swarm.round_steps=10"]
    coordinator = start_for_all(*coordinator_of(text, folder / "c", *settings))
    invite = invite_of(coordinator, folder / "c")
    set_paused(True, coordinator, folder / "c")  # until both have joined: the first might finish before
    workers = [start_for_all("worker", invite, "--home", folder / "home") for _ in range(2)]
    for worker in workers:
        worker.line_with("the run is paused")
    set_paused(False, coordinator, folder / "c")
    return TrainedSwarm(coordinator, invite, text, folder / "home", [rest_of(worker) for worker in workers])


def test_two_workers_train_a_model_that_can_be_exported_and_measured(tmp_path, swarm):
    assert all("finished: every phase is trained" in said for said in swarm.said)
    facts = json.loads(run_here("status", swarm.invite, "--json"))
    assert len(facts["workers"]) == 2  # with one home between them
    assert all(phase["finished"] for phase in facts["phases"])
    assert held_out_loss(facts) < 5.0
    run_here("export", swarm.invite, tmp_path / "model", "--home", swarm.home)
    scores = json.loads(run_here("eval", tmp_path / "model", "--json", "--corpus", swarm.text))
    assert scores["runs"][0]["answer"]["nats_per_byte"] < 5.0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what a process has loaded")
def test_a_coordinator_never_loads_torch(swarm):
    facts = json.loads(run_here("status", swarm.invite, "--json"))
    assert all(phase["step"] == phase["steps"] for phase in facts["phases"])  # merged, round by round
    loaded = Path(f"/proc/{swarm.coordinator.pid}/maps").read_text()
    assert "numpy" in loaded
    assert "libtorch" not in loaded


def test_a_killed_coordinator_does_not_end_a_run(tmp_path, text, start, coordinator_of):
    """That a killed worker does not either is in test_chaos.py."""
    command = coordinator_of(text, tmp_path / "c", "train.steps=[60, 20, 20]", "swarm.round_steps=60", *QUICK)
    coordinator = start(*command)
    invite = invite_of(coordinator, tmp_path / "c")
    survivor = start("worker", invite, "--home", tmp_path / "survivor")
    survivor.line_with("lease: ")
    set_paused(True, coordinator, tmp_path / "c")
    survivor.line_with("submitted: ")
    kill(coordinator)
    survivor.line_with("does not answer: trying again until it does")
    restarted = start(*command)
    survivor.line_with("answers again")
    set_paused(False, restarted, tmp_path / "c")
    said = rest_of(survivor)
    assert "finished: every phase is trained" in said
    facts = json.loads(run_here("status", invite, "--json"))
    assert all(phase["step"] == phase["steps"] for phase in facts["phases"])
    assert held_out_loss(facts) < 5.0
    restarted.terminate()
    said = rest_of(restarted)
    assert f"blocktrain worker '{invite}'\n" in said
    assert "run the same command again to continue" in said


def test_ctrl_c_hands_in_what_a_worker_has_done(tmp_path, text, start, coordinator_of):
    with interrupts_ignored():  # as by a shell script that starts it in the background
        coordinator = start(*coordinator_of(text, tmp_path / "c", "train.steps=5000", "swarm.round_steps=5000"))
    invite = invite_of(coordinator, tmp_path / "c")
    worker = start("worker", invite, "--home", tmp_path / "home")
    worker.line_with("nats/byte")
    worker.send_signal(signal.SIGINT)
    said, _ = worker.communicate()
    assert worker.returncode == 130, said
    assert "submitted: " in said
    assert 0 < json.loads(run_here("status", invite, "--json"))["workers"][0]["tokens"] < 5000 * 512
    coordinator.send_signal(signal.SIGINT)
    said, _ = coordinator.communicate()
    assert coordinator.returncode == 130, said


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Processes that are started meanwhile inherit it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
