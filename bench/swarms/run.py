"""A whole run of a real swarm: a coordinator and workers as processes on hosts of their own, watched to the end; then
the model it made, scored, and the bytes on the hosts' cables. Next: hosts.py, the hosts; six_workers.py,
three_hosts.py, transport.py and diloco.py, which ask something of it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blocktrain.data.corpus import Corpus
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import build_block
from blocktrain.model.stack import BlockModel
from blocktrain.spec import Denoise, RunSpec
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.export import export_model
from blocktrain.train.evaluate import answer, evaluate, fit_combination
from blocktrain.train.run import load_model, train_run
from blocktrain.wire.invite import Invite, parse_invite
from serving.relay import links_to
from shared.experiment import proc_status
from swarms.hosts import Host, Network, Traffic, network
from swarms.processes import num_parameters, phase_tensors, running_coordinator, started

POLL_S = 0.5
ONLY_THE_LAST = 1_000_000  # rounds between evaluations: a worker that evaluates does not train meanwhile


@dataclass(frozen=True)
class Link:
    """What lies between a host and the coordinator."""

    rate_bits: float
    rtt_ms: float


@dataclass(frozen=True)
class Absence:
    """A worker killed without warning at one share of the run's steps, and started again at another."""

    worker: int
    gone_at: float
    back_at: float


@dataclass(frozen=True)
class Plan:
    """One run. `spec.train.windows` is what one replica takes a step."""

    spec: RunSpec
    workers: int
    link: Link | None = None
    absences: tuple[Absence, ...] = ()
    max_windows: int = 400  # of either held-out split

    @property
    def founded(self) -> RunSpec:
        return self.spec.with_(**{"swarm.evaluate_every": ONLY_THE_LAST})


def together(workers: int) -> dict[str, Any]:
    """Settings under which every round has an update of all of them. One that is gone is waited for, but not long."""
    return {"swarm.min_updates": workers, "swarm.deadline_floor_s": 2.0}


APART = {"objective": Denoise(), "swarm.min_updates": 1}  # no block reads another: every worker trains one of its own


def scores_of(model: BlockModel, corpus: Corpus, max_windows: int) -> dict[str, Any]:
    """The cross entropy of the composed answer on either held-out split; all readings on valid."""
    valid = evaluate(model, corpus.valid, max_windows=max_windows)
    test = evaluate(model, corpus.test, max_windows=max_windows)
    return {
        "valid": answer(valid).nats_per_byte,
        "valid_error": answer(valid).standard_error,
        "test": answer(test).nats_per_byte,
        "scores": [score.as_dict() for score in valid],
    }


def untrained(spec: RunSpec, corpus: Corpus, max_windows: int) -> float:
    """Nats a byte on valid before the first step."""
    model = BlockModel.from_tensors(spec, {k: build_block(spec, k).state_dict() for k in range(spec.model.blocks)})
    return answer(evaluate(model, corpus.valid, max_windows=max_windows)).nats_per_byte


def run_single(spec: RunSpec, corpus: Corpus, max_windows: int) -> dict[str, Any]:
    """The same training by one worker without a swarm."""
    started_s = time.monotonic()
    with TemporaryDirectory() as folder:
        run = RunDirectory.create(Path(folder) / "run", spec, corpus.sha256)
        train_run(run, corpus)
        scores = scores_of(load_model(run), corpus, max_windows)
    tokens = sum(phase.steps for phase in spec.phases) * spec.step_tokens
    return {**scores, "tokens": tokens, "seconds": time.monotonic() - started_s}


def run_swarm(plan: Plan, corpus: Corpus) -> dict[str, Any]:
    """Trained to the end by real processes: scores, bytes, rounds and the workers' memory."""
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        net = stack.enter_context(network(plan.workers))
        options = ["--host", net.listen, "--public", net.public, "--insecure"]
        coordinator = stack.enter_context(running_coordinator(plan.founded, folder, options=options, within=net.within))
        admin = parse_invite((folder / "state" / "invite-admin").read_text())
        with CoordinatorClient(admin) as client:
            swarm = Swarm(plan, net, client, coordinator.invite, folder, stack)
            swarm.gather()
            joined, started_s = net.traffic(), time.monotonic()
            swarm.train()
            seconds, traffic = time.monotonic() - started_s, net.traffic()
            model = exported(client, corpus, folder)
            measured = {**swarm.account(), **moved_bytes(joined, traffic, client.status())}
    return {**scores_of(model, corpus, plan.max_windows), **measured, "seconds": seconds}


def exported(client: CoordinatorClient, corpus: Corpus, folder: Path) -> BlockModel:
    model = load_model(export_model(client, client.manifest(), folder / "model", folder / "cache"))
    model.combine = model.combine or dict(fit_combination(model, corpus.valid))
    return model


def moved_bytes(joined: Traffic, traffic: Traffic, status: Mapping[str, Any]) -> dict[str, Any]:
    """All workers together, after they had joined, which is told apart: it is the corpus. By the cables where they are
    counted, else by the coordinator, which counts payloads alone."""
    payloads = {
        "payload_up_bytes": status["traffic"]["up_bytes"],
        "payload_down_bytes": sum(worker["down_bytes"] for worker in status["workers"]),
    }
    if not traffic:
        up, down = payloads.values()
        return {**payloads, "counted": "payloads", "up_bytes": up, "down_bytes": down, "joining_bytes": None}
    up, down = (sum(traffic[host][way] - joined[host][way] for host in traffic) for way in (0, 1))
    joining = sum(map(sum, joined.values()))
    return {**payloads, "counted": "cables", "up_bytes": up, "down_bytes": down, "joining_bytes": joining}


@dataclass
class Swarm:
    """The workers of a plan, and what is seen of them from outside."""

    plan: Plan
    net: Network
    client: CoordinatorClient
    invite: Invite
    folder: Path
    stack: ExitStack
    _workers: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    _peaks: dict[int, int] = field(default_factory=dict)
    _relays: dict[int, Invite] = field(default_factory=dict)

    def gather(self) -> None:
        """Everybody is there before anybody is given work: the first round has all replicas."""
        self.client.pause(True)
        for number in range(self.plan.workers):
            self._relays[number] = self.stack.enter_context(
                reached(self.invite, self.net.hosts[number], self.plan.link)
            )
            self._start(number)
        while len(self.client.status()["workers"]) < self.plan.workers:
            self._look()
            time.sleep(POLL_S)
        self.client.pause(False)

    def train(self) -> None:
        """Until all workers have been told that the run is finished."""
        planned = list(self.plan.absences)
        while any(process.poll() is None for process in self._workers.values()):
            self._look()
            planned = [absence for absence in planned if not self._obeyed(absence)]
            time.sleep(POLL_S)
        self._look()

    def account(self) -> dict[str, Any]:
        """What was merged, by the coordinator's own record. `moved_parameters` counts those of the trained blocks once
        for every update: bytes divided by it are bytes a parameter and round."""
        spec, merged = self.plan.spec, list(self._merged())
        sizes = {phase.index: num_parameters(phase_tensors(spec, phase.index)) for phase in spec.phases}
        return {
            "workers": self.plan.workers,
            "rounds": len({(update["merged_phase"], update["merged_round"]) for update in merged}),
            "updates": len(merged),
            "tokens": sum(update["tokens"] for update in merged),
            "moved_parameters": sum(sizes[update["phase"]] for update in merged),
            "worker_rss_peak_bytes": max(self._peaks.values()),
        }

    def _merged(self) -> Iterator[dict[str, Any]]:
        """Every update that went into a version, page after page of the ledger."""
        after = 0
        while page := [contribution["update"] for contribution in self.client.contributions(after)]:
            yield from (update for update in page if update["merged_round"] is not None)
            after = page[-1]["number"]

    def _start(self, number: int) -> None:
        host, home = self.net.hosts[number], self.folder / f"home-{number}"
        program = [*host.within, sys.executable, "-m", "blocktrain"]
        command = [*program, "worker", str(self._relays[number]), "--home", str(home), "--name", host.name]
        said = self.stack.enter_context(self._said(number).open("a"))
        self._workers[number] = self.stack.enter_context(started(command, stderr=said))

    def _said(self, number: int) -> Path:
        return self.folder / f"worker-{number}.txt"

    def _look(self) -> None:
        """Note every worker's peak so far; one that ended with an error ends the experiment."""
        for number, process in self._workers.items():
            if process.poll():
                raise RuntimeError(f"worker {number} ended with {process.returncode}: {_end_of(self._said(number))}")
            with suppress(OSError, StopIteration):  # it has just ended
                self._peaks[number] = max(self._peaks.get(number, 0), proc_status("VmHWM", process.pid))

    def _obeyed(self, absence: Absence) -> bool:
        """Whether it is over; what is due of it now is done."""
        status = self.client.status()
        share = sum(phase["step"] for phase in status["phases"]) / status["steps"]
        if absence.worker in self._workers and share >= absence.gone_at:
            process = self._workers.pop(absence.worker)
            process.kill()
            process.wait()
        if absence.worker not in self._workers and share >= absence.back_at:
            self._start(absence.worker)
            return True
        return False


@contextmanager
def reached(invite: Invite, host: Host, link: Link | None) -> Iterator[Invite]:
    """The invite as the host uses it: with a link, through the relay that makes it as slow and as far."""
    direct = replace(invite, host=host.coordinator)
    if link is None:
        yield direct
        return
    target = f"tcp://{direct.host}:{direct.port}"
    with links_to([target], link.rate_bits, listen=host.listen, within=host.within) as links:
        links.set_rtt(link.rtt_ms)
        yield replace(invite, host=host.listen, port=int(links.addresses[0].rpartition(":")[2]))


def _end_of(said: Path) -> str:
    return said.read_text()[-1000:].strip()
