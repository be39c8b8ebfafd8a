"""A fleet on a real Ray cluster of two nodes on this machine: it trains what one machine trains, serves it, outlives
the kill of a node and of an actor, moves to another node with its database and bucket, and loses nothing when it is
made smaller or taken down."""

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
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import torch
from typer.testing import CliRunner

import services
from blocktrain.cli.main import app
from blocktrain.fleet.cluster import LEAN, START
from blocktrain.fleet.supervisor import LOCK_FILE
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.train.run import load_model

LIMIT_S = 500.0
POLL_S = 0.2
EXACT = ["swarm.update=fp32", "swarm.download=fp32"]  # then one worker trains what blocktrain train trains
RAY_SETTINGS = {
    "RAY_health_check_period_ms": "1000",  # a lost node is soon noticed
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_failure_threshold": "2",
    "RAY_worker_niceness": "0",  # as all other tests: on a busy machine actors would hardly run at Ray's 15
    "RAY_prestart_worker_first_driver": "0",  # no processes for tasks that nobody has
    "RAY_OVERRIDE_RESOURCES": '{"CPU": 3, "GPU": 0, "memory": 8000000000, "object_store_memory": 80000000}',
}
# Runs one command after the other: an import of Ray for each would take longer than the commands. A line names the
# address of the machine that a command is given on, since each node of the test is on the same one, and its words.
CONSOLE = """
import json
import sys
from functools import partial

import ray
from typer.testing import CliRunner

from blocktrain.cli.main import app

init = ray.init
for line in sys.stdin:
    node, *words = json.loads(line)
    ray.init = partial(init, _node_ip_address=node) if node else init
    done = CliRunner().invoke(app, words)
    print(json.dumps([done.exit_code, done.stdout, done.stderr]), flush=True)
"""
SECOND = "127.0.0.2"  # the address of the second node
Found = TypeVar("Found")

pytestmark = pytest.mark.timeout(1000)  # many processes, one after the other


class Nodes:
    """The processes of a Ray cluster. Each node is a session of its own, so that all its processes can be ended."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._nodes = folder, list[subprocess.Popen[bytes]]()
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_TMPDIR": str(folder), **RAY_SETTINGS}
        self.environment = {**os.environ, **services.bucket_environment(), **ray}
        self.address = f"127.0.0.1:{free_port()}"

    @cached_property
    def _console(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CONSOLE]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment)

    def start(self, *options: str) -> int:
        with (self.folder / f"node-{len(self._nodes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [*START, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.environment,
            )
        self._nodes.append(process)
        number = len(self._nodes) - 1
        until(lambda: self.started(number), f"node {number}")
        return number

    def start_second(self) -> int:
        return self.start(f"--address={self.address}", f"--node-ip-address={SECOND}", "--include-log-monitor=false")

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

    def preempt(self, number: int) -> None:
        """As a provider ends a machine: SIGTERM comes first, for all processes."""
        for pid in session(self._nodes[number].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        self._nodes[number].wait()
        self.kill(number)

    def stop(self) -> None:
        with self._console as console:
            console.kill()
        for number in range(len(self._nodes)):
            self.kill(number)
        for path in self.folder.glob(f"home/*/*/{LOCK_FILE}"):  # of a fleet that a failed test left
            with suppress(ProcessLookupError, ValueError):
                os.killpg(int(path.read_text()), signal.SIGKILL)

    def fleet(self, *arguments: object, code: int = 0, at: str | None = None) -> str:
        """Runs a command of blocktrain fleet on this cluster. Returns its result; of a failing one, what it says."""
        assert self._console.stdin is not None
        assert self._console.stdout is not None
        print(
            json.dumps([at, "fleet", *map(str, arguments), "--ray", self.address]), file=self._console.stdin, flush=True
        )
        ended, result, said = json.loads(self._console.stdout.readline())
        assert ended == code, said
        return str(said if code else result)

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
        nodes.start("--head", f"--port={nodes.address.rpartition(':')[2]}", *LEAN)
        yield nodes
    finally:
        nodes.stop()
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(*arguments: object) -> str:
    """A command in this process, which has loaded torch."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def settings(text: Path, *changes: str) -> list[object]:
    return ["--preset", "tiny", "--corpus", text, *(part for change in changes for part in ("--set", change))]


def test_a_fleet_trains_what_one_machine_trains_and_serves_it_though_a_node_is_killed(nodes, tmp_path, text):
    what = settings(text, *EXACT, "train.steps=[20, 10, 10]")
    home, second = nodes.folder / "home" / "served", nodes.start_second()
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
    nodes.kill(second)
    assert until(lambda: written(home / "gateway"), "the gateway after the kill") == before
    for secret in (invite.partition("#")[2], key_of(home / "stage-1")):
        assert [path for path in logs(nodes.folder) if secret in path.read_text(errors="replace")] == []
    nodes.fleet("down", "--name", "served")
    assert "no fleet" in nodes.fleet("status", "--name", "served", code=2)
    run("verify", tmp_path / "run")


def test_auto_starts_a_cluster_where_none_runs_and_down_ends_it(text):
    with tempfile.TemporaryDirectory(prefix="bt-auto-", dir="/tmp") as name:  # short: Ray's sockets are in it
        folder = Path(name)
        home, answers = folder / "home", dict[str, str]()
        alone = {**os.environ, "RAY_TMPDIR": name, "HOME": name, **RAY_SETTINGS}
        where = ["--ray", "auto", "--name", "alone"]
        up = ["up", *settings(text), *where, "--dir", folder / "run", "--home", home, "--workers", 1, "--stages", 0]
        for words in (up, ["status", *where], ["down", *where]):
            command = [sys.executable, "-m", "blocktrain", "fleet", *map(str, words)]
            answers[words[0]] = subprocess.check_output(command, env=alone, text=True)
        assert "blocktrain worker" in answers["up"]
        assert "running" in answers["status"]
        assert (folder / "run" / "ledger.db").exists()
        until(lambda: not processes_with(name), "the end of the cluster")


def processes_with(words: str) -> list[int]:
    """Those whose command names this."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if words.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def key_of(member: Path) -> str:
    return str(tomllib.loads((member / "chain.key").read_text())["secret"])


def logs(folder: Path) -> list[Path]:
    """Of Ray and of all members."""
    found = [path for path in [*folder.glob("home/*/*/log"), *folder.glob("ray/session_*/logs/**/*")] if path.is_file()]
    assert len(found) > 5
    return found


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


def test_a_fleet_with_a_database_loses_nothing_when_actors_and_the_coordinators_node_die(
    nodes, tmp_path, text, postgres, bucket
):
    what = settings(text, "train.steps=50000", "swarm.round_steps=50000")
    home, second, name = nodes.folder / "home" / "long", nodes.start_second(), ("--name", "long")
    places = ["--dir", tmp_path / "run", "--home", home.parent, "--ledger", postgres, "--blobs", bucket]
    nodes.fleet("up", *what, *name, *places, "--workers", 2, at=SECOND)
    assert "already up" in nodes.fleet("up", *what, *name, code=2)
    workers = [home / worker for worker in ("worker-1", "worker-2")]
    for worker in workers:
        until(lambda worker=worker: trains(worker), f"{worker.name} to train")
    members = nodes.status("long")
    assert members["coordinator"]["node"] == SECOND
    os.kill(members["worker-1"]["process"], signal.SIGKILL)
    until(lambda: log_of(workers[0]).count("joins the run") == 2, "the worker to come back")
    lengths = [len(log_of(worker)) for worker in workers]
    nodes.preempt(second)
    until(lambda: "joins the run" in log_of(workers[0])[lengths[0] :], "worker-1 to follow; its update is in")
    until(lambda: trains(workers[1], since=lengths[1]), "worker-2 to train again")
    assert "room for" in nodes.fleet("scale", "--workers", 99, *name, code=2)
    nodes.fleet("scale", "--workers", 1, *name)
    members = nodes.status("long")
    assert members["coordinator"]["node"] != SECOND
    assert "worker-2" not in members
    nodes.fleet("down", *name)
    with closing(Ledger(postgres)) as ledger:
        updates = ledger.contributions()
    assert {each.worker_name for each in updates} == {"worker-1", "worker-2"}
    assert len({each.update.worker for each in updates}) == 2  # they came back with their keys


def trains(worker: Path, since: int = 0) -> bool:
    """Whether it has joined and then trained, by what its log says after so many characters. From then on it gives way
    to all that the test waits for: it trains without end."""
    if "nats/byte" not in log_of(worker)[since:].partition("joins the run")[2]:
        return False
    os.setpriority(os.PRIO_PGRP, int((worker / LOCK_FILE).read_text()), 19)
    return True


def log_of(member: Path) -> str:
    return (member / "log").read_text() if (member / "log").exists() else ""
