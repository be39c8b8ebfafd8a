"""The first half of the demo: a coordinator and workers train a model. One worker is killed with kill -9 on the way,
before the user's eyes, and the training goes on. Next: serving.py, the second half."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from blocktrain.cli.commands.demo.processes import Process, start, tell
from blocktrain.cli.console import counted
from blocktrain.cli.shared.progress import num_finished, swarm_progress
from blocktrain.errors import BlockTrainError
from blocktrain.wire.invite import ADMIN_FILE, INVITE_FILE

if TYPE_CHECKING:
    from blocktrain.swarm.worker.client import CoordinatorClient
    from blocktrain.wire.invite import Invite

LOOK_EVERY_S = 0.2
KILL_AT = 0.2  # share of the steps; from here on the worker is killed in its next lease
KILL_ANYWAY_AT = 0.4  # also if it has no lease


@dataclass(frozen=True)
class Trained:
    model: Path
    prompt: str | None  # held-out text that the samples continued


def train(stack: ExitStack, folder: Path, settings: Sequence[str], workers: int, machine: Sequence[str]) -> Trained:
    from blocktrain.cli.commands.swarm.export import fetch
    from blocktrain.swarm.coordinator.server import known_invite
    from blocktrain.swarm.worker.client import CoordinatorClient

    swarm = folder / "swarm"
    tell(f"Starting a coordinator. Everything is saved in {folder}; logs are in {folder / 'logs'}.")
    coordinator = start(stack, folder, "coordinator", ["coordinator", *settings, "--dir", str(swarm)])
    coordinator.wait_until(lambda: _invite_that_answers(swarm / INVITE_FILE))
    admin = known_invite(swarm / ADMIN_FILE)
    assert admin is not None, "the coordinator writes it before it answers"
    tell(f"The coordinator is running. Watch the training in a browser:\n  {admin.page}")
    tell(f"More workers can join from another terminal:\n  blocktrain worker '@{swarm / INVITE_FILE}'")
    tell(f"Starting {counted(workers, 'worker')}. Below: the loss, and how the model continues the same prompt.")
    with ExitStack() as running, CoordinatorClient(admin) as client:
        client.pause(True)  # until all are there: none may miss the run, and one of them is to be killed in it

        def start_worker(name: str) -> Process:
            arguments = ["worker", f"@{swarm / INVITE_FILE}", "--name", name, "--home", str(folder / name), *machine]
            return start(running, folder, name, arguments, _threads_each(workers))

        processes = [start_worker(f"worker-{number}") for number in range(1, workers + 1)]
        _await_workers(client, coordinator, processes)
        client.pause(False)
        killing = Killing(processes.pop(), start_worker)
        status = _watch(client, [coordinator, *processes], killing)
    fetch(admin, folder / "model", folder / "worker-1" / "blobs")
    tell(f"\nThe model is trained, and saved in {folder / 'model'}.")
    samples = status["samples"]
    return Trained(folder / "model", samples[-1]["samples"][0]["prompt"] if samples else None)


def _invite_that_answers(path: Path) -> Invite | None:
    """The coordinator's invite once the coordinator answers. The file alone is not enough: it may be of an earlier
    start."""
    from blocktrain.swarm.coordinator.server import known_invite
    from blocktrain.swarm.worker.client import CoordinatorClient

    invite = known_invite(path)
    if invite is None:
        return None
    try:
        with CoordinatorClient(invite, patience_s=0.0) as client:
            client.run_info()
    except BlockTrainError:
        return None
    return invite


def _await_workers(client: CoordinatorClient, coordinator: Process, workers: Sequence[Process]) -> None:
    while not all(worker_id(status := client.status(), worker.name) for worker in workers):
        if num_finished(status) == status["num_phases"]:  # the run of an earlier demo
            return
        for process in (coordinator, *workers):
            process.check(may_end=False)
        time.sleep(LOOK_EVERY_S)


def _watch(client: CoordinatorClient, processes: Sequence[Process], killing: Killing) -> dict[str, Any]:
    """Shows progress until every phase is trained and the result is evaluated. Returns the last status."""
    from blocktrain.cli.shared.training import phase_label
    from blocktrain.spec import RunSpec

    spec = RunSpec.model_validate(client.run_info().spec)
    with swarm_progress({phase.index: phase_label(spec, phase) for phase in spec.phases}) as show:
        while True:
            status = client.status()
            show(status, client.curves())
            killing.look(status)  # also of a finished run: the worker that was killed comes back
            evaluated = status["evaluations"] and status["evaluations"][-1]["versions"] == status["versions"]
            if num_finished(status) == status["num_phases"] and evaluated:
                return status
            for process in processes:
                process.check(may_end=process.name != "coordinator")
            time.sleep(LOOK_EVERY_S)


class Killing:
    """Kills a worker in the middle of a lease, and starts it again when the others have gone on."""

    def __init__(self, worker: Process, start_again: Callable[[str], Process]) -> None:
        self._worker, self._start_again = worker, start_again
        self._state: Literal["planned", "dead", "back"] = "planned"
        self._lease: tuple[int, int] | None = None  # phase and round

    def look(self, status: Mapping[str, Any]) -> None:
        if self._state != "dead":
            self._worker.check(may_end=True)
        if self._state == "planned" and (where := place_to_kill(status, self._worker.name)) is not False:
            self._kill(where)
        elif self._state == "dead" and others_went_on(status, self._worker.name, self._lease):
            self._worker = self._start_again(self._worker.name)
            self._state = "back"
            tell(f"The others have gone on. {self._worker.name} starts again, with the same key.")

    def _kill(self, lease: tuple[int, int] | None) -> None:
        self._worker.kill()
        self._state, self._lease = "dead", lease
        doing = "between two leases" if lease is None else f"in the middle of phase {lease[0] + 1}, round {lease[1]}"
        lost = "Nothing is lost" if lease is None else "Only the steps of this lease are lost"
        tell(f"kill -9 {self._worker.pid}: {self._worker.name} is dead, {doing}. {lost}.")


def place_to_kill(status: Mapping[str, Any], name: str) -> tuple[int, int] | Literal[False] | None:
    """Phase and round of the lease in which this worker should be killed now; None: between two leases; False: not
    now."""
    share = sum(phase["step"] for phase in status["phases"]) / max(1, status["steps"])
    id = worker_id(status, name)
    if id is None or share < KILL_AT or num_finished(status) == status["num_phases"]:
        return False
    for phase in status["phases"]:
        for lease in phase["round"]["leases"] if phase["round"] else ():
            if lease["worker"] == id and lease["reported_s"] is None:
                return phase["phase"], phase["round"]["number"]
    return None if share >= KILL_ANYWAY_AT else False


def others_went_on(status: Mapping[str, Any], name: str, lease: tuple[int, int] | None) -> bool:
    """The round of the dead worker's lease is over, or has the updates of all others."""
    for phase in status["phases"]:
        if phase["round"] and (phase["phase"], phase["round"]["number"]) == lease:
            others = [x for x in phase["round"]["leases"] if x["worker"] != worker_id(status, name)]
            return all(other["reported_s"] is not None for other in others)
    return True


def worker_id(status: Mapping[str, Any], name: str) -> str | None:
    return next((worker["id"] for worker in status["workers"] if worker["name"] == name), None)


def _threads_each(workers: int) -> dict[str, str]:
    """The workers share the cores: if each used all of them, they would mostly wait for each other."""
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // workers))}
