"""A fleet on a real Ray cluster of two nodes on this machine: it trains what one machine trains, serves it, outlives
the kill of a node and of an actor, and loses nothing when it is made smaller or taken down."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch

from blocktrain.train.run import load_model

LIMIT_S = 500.0
POLL_S = 0.2
EXACT = ["swarm.update=fp32", "swarm.download=fp32"]  # then one worker trains what blocktrain train trains
RAY_SETTINGS = {
    "RAY_health_check_period_ms": "1000",  # a lost node is soon noticed
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_worker_niceness": "0",  # as all other tests: on a busy machine actors would hardly run at Ray's 15
}
Found = TypeVar("Found")

pytestmark = pytest.mark.timeout(1000)  # many processes, one after the other


class Nodes:
    """The processes of a Ray cluster. Each node is a session of its own, so that all its processes can be ended."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._nodes = folder, []
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_TMPDIR": str(folder), **RAY_SETTINGS}
        self.environment = {**os.environ, **ray}
        self.address = f"127.0.0.1:{free_port()}"

    def start(self, *options: str) -> None:
        resources = ["--num-cpus=3", "--num-gpus=0", f"--memory={8 * 10**9}", f"--object-store-memory={80 * 2**20}"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        with (self.folder / f"node-{len(self._nodes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *options, *resources],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.environment,
            )
        self._nodes.append(process)

    def started(self, number: int) -> bool:
        log = (self.folder / f"node-{number}.log").read_text()
        assert self._nodes[number].poll() is None, log
        return "Ray runtime started" in log

    def kill(self, number: int) -> None:
        """All at once, as when a machine loses its power, but for what its actors started."""
        process = self._nodes[number]
        for pid in session(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for number in range(len(self._nodes)):
            self.kill(number)
        for path in self.folder.glob("home/*/*/.process.lock"):  # of a fleet that a failed test left
            with suppress(ProcessLookupError, ValueError):
                os.killpg(int(path.read_text()), signal.SIGKILL)

    def fleet(self, *arguments: object, code: int = 0) -> str:
        """Runs a command of blocktrain fleet on this cluster. Returns its result; of a failing one, what it says."""
        command = [sys.executable, "-m", "blocktrain", "fleet", *map(str, arguments), "--ray", self.address]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    def status(self, name: str) -> dict[str, Any]:
        facts = json.loads(self.fleet("status", "--json", "--name", name))
        return {**facts, **{each["name"]: each for each in facts["members"]}}


def session(number: int) -> list[int]:
    """The processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) == number:
                found.append(int(path.parent.name))
    return found


def until(look: Callable[[], Found | bool | None], what: str) -> Found:
    give_up_s = time.monotonic() + LIMIT_S
    while not (found := look()):
        assert time.monotonic() < give_up_s, f"waited for {what}"
        time.sleep(POLL_S)
    return found  # type: ignore[return-value]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    folder = Path(tempfile.mkdtemp(prefix="bt-ray-", dir="/tmp"))  # short: Ray's sockets are in it
    nodes = Nodes(folder)
    try:
        port = nodes.address.rpartition(":")[2]
        client = f"--ray-client-server-port={free_port()}"
        nodes.start("--head", f"--port={port}", client, "--include-dashboard=false")
        until(lambda: nodes.started(0), "the first node")
        nodes.start(f"--address={nodes.address}")
        until(lambda: nodes.started(1), "the second node")
        yield nodes
    finally:
        nodes.stop()
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(*arguments: object) -> str:
    command = [sys.executable, "-m", "blocktrain", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def settings(text: Path, *changes: str) -> list[object]:
    return ["--preset", "tiny", "--corpus", text, *(part for change in changes for part in ("--set", change))]


def test_a_fleet_trains_what_one_machine_trains_and_serves_it_though_a_node_is_killed(nodes, tmp_path, text):
    what = settings(text, *EXACT, "train.steps=[20, 10, 10]")
    home = nodes.folder / "home" / "served"
    places = ["--dir", tmp_path / "run", "--home", home.parent, "--port", 0, "--poll", 1]
    said = nodes.fleet("up", *what, "--name", "served", "--workers", 1, "--stages", 2, *places)
    invite = said.split("'")[1]
    until(lambda: "every phase is trained" in log_of(home / "worker-1"), "the end of training")
    run("export", invite, tmp_path / "exported")
    run("train", *what, "--out", tmp_path / "trained")
    ours, alone = (load_model(tmp_path / name).state_dict() for name in ("exported", "trained"))
    assert all(torch.equal(tensor, alone[name]) for name, tensor in ours.items())
    before = until(lambda: written(home / "gateway"), "the gateway")
    assert nodes.status("served")["worker-1"]["state"] == "finished"
    nodes.kill(1)
    assert until(lambda: written(home / "gateway"), "the gateway after the kill") == before
    nodes.fleet("down", "--name", "served")
    assert "no fleet" in nodes.fleet("status", "--name", "served", code=2)
    run("verify", tmp_path / "run")


def written(gateway: Path) -> str | None:
    """What the gateway answers; None while there is none, or while a stage moves."""
    if not (gateway / "address.json").exists():
        return None
    url = json.loads((gateway / "address.json").read_text())["address"]
    body = {"model": "tiny", "prompt": "9 bottles", "max_tokens": 20, "temperature": 0}
    try:
        reply = httpx.post(f"{url}/completions", json=body, timeout=LIMIT_S)
    except httpx.TransportError:
        return None
    return str(reply.json()["choices"][0]["text"]) if reply.status_code == 200 else None


def test_workers_hand_in_what_they_have_done_when_they_are_killed_or_stopped(nodes, tmp_path, text):
    what = settings(text, "train.steps=50000", "swarm.round_steps=50000")
    home = nodes.folder / "home" / "long"
    nodes.fleet("up", *what, "--name", "long", "--dir", tmp_path / "run", "--home", home.parent, "--workers", 2)
    assert "already up" in nodes.fleet("up", *what, "--name", "long", code=2)
    for worker in ("worker-1", "worker-2"):
        until(lambda worker=worker: "nats/byte" in log_of(home / worker), f"{worker} to train")
    os.kill(nodes.status("long")["worker-1"]["process"], signal.SIGKILL)
    until(lambda: log_of(home / "worker-1").count("joins the run") == 2, "the worker to come back")
    assert "room for" in nodes.fleet("scale", "--workers", 99, "--name", "long", code=2)
    nodes.fleet("scale", "--workers", 1, "--name", "long")
    assert "worker-2" not in nodes.status("long")
    nodes.fleet("down", "--name", "long")
    updates = json.loads(run("ledger", "--dir", tmp_path / "run", "--json"))
    assert {each["worker_name"] for each in updates} == {"worker-1", "worker-2"}
    assert len({each["update"]["worker"] for each in updates}) == 2  # it came back with its key
    run("verify", tmp_path / "run")


def log_of(member: Path) -> str:
    return (member / "log").read_text() if (member / "log").exists() else ""
