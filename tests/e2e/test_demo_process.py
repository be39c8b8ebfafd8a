"""All of BlockTrain in one command, as real processes: a swarm trains, stages serve, and everything stops cleanly."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blocktrain.wire.invite import parse_invite

pytestmark = pytest.mark.timeout(600)  # a busy machine gives it a tenth of a core
BUDGET = ["--preset", "tiny", "--workers", "2", "--bytes", "12", "--leave"]
STEPS = ["--set", "train.steps=120", "--set", "swarm.round_steps=2"]


@pytest.fixture
def demo(tmp_path: Path, text: Path) -> Iterator[subprocess.Popen[str]]:
    options = ["--corpus", str(text), "--dir", str(tmp_path / "demo")]
    command = [sys.executable, "-m", "blocktrain", "demo", *BUDGET, *STEPS, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=200)


def assert_all_end(folder: Path) -> None:
    """The demo waits for its processes; a stage whose parent had to be killed ends a moment later."""
    give_up_s = time.monotonic() + 60.0
    while (left := living(folder)) and time.monotonic() < give_up_s:
        time.sleep(0.05)
    assert left == []


def living(folder: Path) -> list[str]:
    """The command lines of running processes that name this folder."""
    commands = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(entry.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [command for command in commands if str(folder) in command and f" {os.getpid()} " not in command]


def test_the_demo_trains_over_a_killed_worker_serves_over_a_killed_stage_and_races(demo, tmp_path):
    out, said = demo.communicate(timeout=560)
    assert demo.returncode == 0, said
    assert "Watch the training in a browser:\n  http://127.0.0.1:" in said
    assert re.search(r"^kill -9 \d+: worker-2 is dead", said, re.M)
    assert "worker-2 starts again" in said
    assert re.search(r"phase 3 of 3.+: step (\d+)/\1, held-out loss \d\.\d{3} nats/byte", said)
    samples = re.findall(r"^\d\.\d{3}  (.+?)\|", said, re.M)  # the same prompt after each evaluation
    assert len(samples) > 1
    assert len(set(samples)) == 1
    assert re.search(r"^kill -9 \d+: stage 1 is dead", said, re.M)
    assert re.search(r"\d+ bytes?, none lost", said)  # at most 12
    assert re.findall(r"^(\w+) +\d+ +[\d.]+ s +[\d.]+×", said, re.M) == ["autoregressive", "speculative", "sweep"]
    assert out.count(samples[0]) == 4
    assert "What to do next" in said
    assert (tmp_path / "demo" / "model" / "manifest.json").exists()
    assert_all_end(tmp_path / "demo")


@pytest.mark.skipif(not Path("/proc").exists(), reason="counts processes in /proc")
def test_an_interrupted_demo_leaves_no_process_behind_and_shows_no_secret_before(demo, tmp_path):
    assert any("Starting 2 workers" in line for line in demo.stderr)
    secret = parse_invite((tmp_path / "demo" / "swarm" / "invite").read_text()).access_token
    while not any(" worker " in command for command in living(tmp_path / "demo")):
        assert demo.poll() is None
    assert not any(secret in command for command in living(tmp_path / "demo"))
    demo.send_signal(signal.SIGINT)
    _, said = demo.communicate(timeout=200)
    assert demo.returncode == 130
    assert "run the same command again to continue" in said
    assert_all_end(tmp_path / "demo")
