"""Chaos on real processes: a coordinator and workers behind a proxy in bad weather. A seed draws who is killed,
stopped or started again, and when the weather changes. Then everything is mended, the run must finish, every
acknowledged update must be there, and verify must find everything whole.

    python tests/e2e/chaos.py --seconds 3600 [--seed 0]
    make chaos
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # as a script; pytest does the same
from proxy import FAIR, STORM, Proxy

from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.verify import VerifyReport, verify
from blocktrain.swarm.worker.worker import RECEIPTS_FILE
from blocktrain.wire.invite import Invite, parse_invite

PROGRESS_S = 4.0  # that progress is waited for between two events; without any the next one comes all the same
STOPPED_S = 2.0
FINISH_S = 240.0  # after everything is mended, from one update to the next, even on a busy machine
POLL_S = 0.05
SETTINGS = ("swarm.deadline_floor_s=1", "swarm.deadline_ceiling_s=4", "swarm.keep_versions=200", "swarm.averaging=mean")
EVENTS = ("kill worker", "kill coordinator", "stop worker", "stop coordinator", "kill all", "storm", "fair")


@dataclass(frozen=True)
class Plan:
    seed: int
    workers: int = 3
    events: tuple[str, ...] = ()
    steps: int = 40
    round_steps: int = 4

    @classmethod
    def drawn(cls, seed: int, num_events: int) -> Plan:
        return cls(seed, events=tuple(random.Random(f"chaos {seed}").choices(EVENTS, k=num_events)), steps=200)


class ChaosSwarm:
    """The processes, each started again when it ends before the run does."""

    def __init__(self, plan: Plan, text: Path, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._draw = random.Random(f"whom {plan.seed}")
        settings = (*SETTINGS, f"train.steps={plan.steps}", f"swarm.round_steps={plan.round_steps}")
        changes = [part for setting in settings for part in ("--set", setting)]
        self._coordinate = ["coordinator", "--preset", "tiny", "--corpus", str(text), "--dir", str(self.run), *changes]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._done: set[str] = set()
        self.num_kills = 0
        self._start("coordinator")
        invite = self._invite()
        self.proxy = Proxy(invite.port, plan.seed)
        (folder / "invite").write_text(f"{replace(invite, port=self.proxy.port)}\n")
        for name in self._workers:
            self._start(name)

    @property
    def run(self) -> Path:
        return self._folder / "run"

    @property
    def _workers(self) -> list[str]:
        return [f"worker-{number}" for number in range(self._plan.workers)]

    def _invite(self) -> Invite:
        path = self.run / "invite"
        assert wait_until(path.exists, FINISH_S), f"no coordinator: {self.log('coordinator')}"
        return parse_invite(path.read_text().strip())

    def _command(self, name: str) -> list[str]:
        if name == "coordinator":
            return self._coordinate
        return ["worker", f"@{self._folder / 'invite'}", "--home", str(self._folder / name), "--name", name]

    def _start(self, name: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "blocktrain", *self._command(name)]
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._running[name] = subprocess.Popen(command, **streams)  # type: ignore[call-overload]

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-2000:]

    def supervise(self) -> None:
        """Starts again what has ended. A worker that has ended well has finished."""
        for name, process in list(self._running.items()):
            if process.poll() is None or name in self._done:
                continue
            if process.returncode == 0 and name != "coordinator":
                self._done.add(name)
            else:
                self._start(name)

    def receipts(self) -> list[str]:
        """The updates that coordinators have signed for."""
        files = [self._folder / name / RECEIPTS_FILE for name in self._workers]
        lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
        return [json.loads(line)["update"] for line in lines if line.endswith("}")]  # a kill may tear the last one

    def happen(self, event: str) -> None:
        worker = self._draw.choice(self._workers)
        match event.split():
            case ["storm"]:
                self.proxy.weather = STORM
            case ["fair"]:
                self.proxy.weather = FAIR
            case ["kill", "all"]:
                for name in self._running:
                    self._signal(name, signal.SIGKILL)
            case [what, who]:
                name = worker if who == "worker" else "coordinator"
                self._signal(name, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
                if what == "stop":
                    before = len(self.receipts())
                    wait_until(lambda: len(self.receipts()) > before, STOPPED_S)
                    self._signal(name, signal.SIGCONT)

    def _signal(self, name: str, number: signal.Signals) -> None:
        if self._running[name].poll() is None:
            self._running[name].send_signal(number)
            if number == signal.SIGKILL:
                self.num_kills += 1
                self._running[name].wait()

    def is_finished(self) -> bool:
        self.supervise()
        return self._done.issuperset(self._workers)

    def stop(self) -> None:
        self.proxy.close()
        for process in self._running.values():
            process.kill()
            process.wait()


def wait_until(holds: Callable[[], bool], at_most_s: float) -> bool:
    give_up_s = time.monotonic() + at_most_s
    while not holds():
        if time.monotonic() > give_up_s:
            return False
        time.sleep(POLL_S)
    return True


@contextmanager
def chaos(plan: Plan, text: Path, folder: Path) -> Iterator[ChaosSwarm]:
    swarm = ChaosSwarm(plan, text, folder)
    try:
        yield swarm
    finally:
        swarm.stop()


def finishes(swarm: ChaosSwarm) -> bool:
    """False if no update arrives for long. A busy machine may take long for all of them."""
    while not swarm.is_finished():
        if not advances(swarm, len(swarm.receipts()), FINISH_S):
            return False
    return True


def advances(swarm: ChaosSwarm, num_receipts: int, at_most_s: float) -> bool:
    return wait_until(lambda: swarm.is_finished() or len(swarm.receipts()) > num_receipts, at_most_s)


def run_plan(plan: Plan, text: Path, folder: Path) -> tuple[VerifyReport, dict[str, int]]:
    """What verify found, and what happened. AssertionError if the run does not finish, or has lost an update."""
    with chaos(plan, text, folder) as swarm:
        for event in plan.events:
            before = len(swarm.receipts())
            swarm.happen(event)
            advances(swarm, before, PROGRESS_S)
        swarm.proxy.weather = FAIR
        assert finishes(swarm), f"seed {plan.seed} does not finish: {swarm.log('worker-0')}"
        counts = {**swarm.proxy.counts, "kills": swarm.num_kills, "receipts": len(swarm.receipts())}
        acknowledged = set(swarm.receipts())
    report = verify(swarm.run)
    ledger = Ledger(swarm.run / "ledger.db")
    try:
        there = set(updates_of(ledger))
    finally:
        ledger.close()
    assert acknowledged <= there, f"seed {plan.seed} lost {len(acknowledged - there)} acknowledged updates"
    assert report.good, f"seed {plan.seed}: {report.faults}"
    return report, counts


def updates_of(ledger: Ledger) -> Iterator[str]:
    after = 0
    while page := ledger.contributions(after):
        yield from (x.update.id for x in page)
        after = page[-1].update.number


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long; the last run is finished")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; each run has the next one")
    parser.add_argument("--events", type=int, default=25, help="of each run")
    args = parser.parse_args(argv)
    began_s, seed = time.monotonic(), args.seed
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    while time.monotonic() < began_s + args.seconds:
        with tempfile.TemporaryDirectory(prefix="blocktrain-chaos-") as folder:
            text = Path(folder) / "text.txt"
            text.write_bytes(b"Whatever happens, an acknowledged update is not lost. " * 400)
            report, counts = run_plan(Plan.drawn(seed, args.events), text, Path(folder))
        print(f"seed {seed}: {report.updates} updates, {report.versions} versions whole; {counts}", flush=True)
        seed += 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
