"""The world of one schedule: machines, volunteers, network and disk under one clock. It makes the faults happen, mends
everything at the end, and lets the run finish. After every event it asks whether the invariants hold.
Next: invariants.py, what must hold; schedule.py, what happens."""

from __future__ import annotations

import hashlib
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from blocktrain.data.corpus import load_corpus
from blocktrain.errors import BlockTrainError, ConfigError, RequestRefused
from blocktrain.sim.disk import SimDisk, SimFolder
from blocktrain.sim.invariants import Broken, Checker
from blocktrain.sim.machines import Machine, Surroundings
from blocktrain.sim.network import Handler, SimNetwork, Weather
from blocktrain.sim.schedule import CHAOS_S, Schedule, SimFault, Volunteering, spec_of_variant
from blocktrain.sim.tasks import Scheduler, Task
from blocktrain.sim.volunteers import make_worker
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.initial_blocks import initial_blocks_here
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.wire.safetensors import Array

EPOCH_S = 1_800_000_000.0  # when every simulation begins
RESTART_S = 2.0  # until a supervisor starts a process again
LONGEST_S = 3000.0  # of virtual time
IN_MEMORY = Path("/dev/shm")
TEXT = b"The simulator never reads this text. " * 40
MOST_EVENTS = 8_000


@dataclass(frozen=True)
class Template:
    """A run before its first coordinator, to be copied for each schedule."""

    folder: Path
    spec: RunSpec
    initial_blocks: dict[int, dict[str, Array]]


def scratch_folder() -> Path:
    """In memory where the system has such a folder: a simulation syncs thousands of files."""
    return Path(tempfile.mkdtemp(prefix="blocktrain-sim-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None))


@cache
def template(variant: int, scratch: Path) -> Template:
    return found_template(spec_of_variant(variant), scratch / f"template-{variant}")


def found_template(spec: RunSpec, folder: Path) -> Template:
    folder.mkdir(parents=True)
    (folder / "text.txt").write_bytes(TEXT)
    spec = spec.with_(**{"corpus.source": str(folder / "text.txt")})
    disk = SimDisk(folder)
    ledger = Ledger(disk.ledger_path)
    blobs = Blobs(SimFolder(disk, lambda: EPOCH_S))
    found_run(spec, load_corpus(spec.corpus, spec.model.context), ledger, blobs, EPOCH_S)
    ledger.close()
    make = initial_blocks_here(spec)
    return Template(folder, spec, {block: dict(make(block)) for block in range(spec.model.blocks)})


class Volunteer:
    """One volunteer's machine: a process that is started, killed and started again, and its home."""

    def __init__(self, who: Volunteering, world: World) -> None:
        self.who, self._world, self.is_gone = who, world, False
        self.home = world.folder / "homes" / who.name
        self.clock_offset_s, self.sleeps_until_s = 0.0, 0.0
        self.task: Task | None = None

    def start(self) -> None:
        if self.is_gone or (self.task and not self.task.is_over):
            return
        world, who = self._world, self.who

        def wall() -> float:
            return world.true_wall() + self.clock_offset_s

        def work() -> None:
            worker = make_worker(who.name, who.lie, who.steps_per_s, self.home, world.network, world.scheduler, wall)
            take_time = worker._take_time

            def slept() -> None:
                take_time()
                world.steps_taken += 1
                world.scheduler.sleep(self.sleeps_until_s - world.scheduler.now_s)

            worker._take_time = slept
            worker.run()

        self.task = world.scheduler.start(who.name, work)

    def kill(self) -> None:
        if self.task:
            self._world.scheduler.kill(self.task)


class World:
    def __init__(self, schedule: Schedule, folder: Path, made: Template) -> None:
        self.schedule, self.folder, self.spec = schedule, folder, made.spec
        self.scheduler = Scheduler(self._task_failed)
        self.trace = hashlib.sha256()
        self.story: list[str] = []
        self.disk = SimDisk(folder)
        self.network = SimNetwork(self.scheduler, schedule.seed, self._route)
        around = Surroundings(
            scheduler=self.scheduler,
            disk=self.disk,
            spec=made.spec,
            initial_blocks=made.initial_blocks,
            seed=schedule.seed,
            gaps=schedule.gaps,
            true_wall=self.true_wall,
            acknowledged=lambda receipt: self.checker.acknowledged(receipt.update),
            defect=self._defect,
            detected_loss=lambda text: self.checker.loss_was_noticed(),
        )
        self.machines = {name: Machine(name, around) for name in schedule.machines}
        self.volunteers = {each.name: Volunteer(each, self) for each in schedule.volunteers}
        self.checker = Checker(self.spec, self.disk, self.scheduler, made.initial_blocks)
        self._asked = 0
        self.is_calm = False
        self.events = self.steps_taken = 0

    def true_wall(self) -> float:
        return EPOCH_S + self.scheduler.now_s

    # The course of a schedule

    def begin(self) -> None:
        for machine in self.machines.values():
            self._start(machine)
        for number, volunteer in enumerate(self.volunteers.values()):
            self.scheduler.after(0.1 * number, volunteer.start)
        for fault in self.schedule.faults:
            self.scheduler.at(fault.at_s, lambda fault=fault: self._happen(fault))  # type: ignore[misc]

    def run(self) -> None:
        """Raises Broken if an invariant does not hold."""
        self.begin()
        last_s = max((x.at_s + x.for_s for x in self.schedule.faults), default=0.0)
        self.scheduler.at(last_s + 1.0 if self.schedule.faults else CHAOS_S / 4, self._mend)
        while not (self.is_calm and self.checker.is_finished):
            if not self.scheduler.step():
                raise Broken("progress", "nothing is left to happen, and the run is not finished")
            self.events += 1
            self.checker.look(self._is_healthy(), self.is_calm, self.machines.values())
            if self.scheduler.now_s > LONGEST_S or self.events > MOST_EVENTS:
                raise Broken("progress", f"the run is not finished after {self.scheduler.now_s:.0f} s")
        self._end()

    def _end(self) -> None:
        for volunteer in self.volunteers.values():
            volunteer.kill()
        for name, machine in self.machines.items():
            if name != self.schedule.machines[0]:
                machine.kill()
        survivor = self.machines[self.schedule.machines[0]]
        for _ in range(4):  # hours pass: what nothing needs is deleted
            survivor.hours_later(self._let_hours_pass)
        self.checker.at_the_end(survivor)

    def _let_hours_pass(self) -> None:
        self.scheduler.now_s += 2 * 3600.0

    def _is_healthy(self) -> bool:
        running = [x for x in self.machines.values() if x.coordinator and not x.trouble]
        return bool(running) and not (self.disk.is_full or self.disk.is_ledger_full)

    def _route(self, sender: str) -> Handler | None:
        """The machines in turn, as a load balancer does."""
        running = [machine for machine in self.machines.values() if machine.coordinator]
        self._asked += 1
        return running[self._asked % len(running)].handle if running else None

    def _start(self, machine: Machine) -> None:
        if not machine.start():
            self.scheduler.after(RESTART_S, lambda: self._start(machine))
            return
        self.checker.coordinator_started()
        if self.is_calm and machine.ledger and machine.ledger.standing().paused:
            machine.ledger.set_paused(False, self.true_wall())  # the order to resume came while it was down

    def _mend(self) -> None:
        """From now on all is well, and everybody but the liars works."""
        self._tell("everything is repaired")
        self.network.weather, self.is_calm = Weather(), True
        self.network.cut.clear()
        self.disk.is_full = self.disk.is_ledger_full = False
        for machine in self.machines.values():
            self._start(machine)
        honest = [x for x in self.volunteers.values() if not x.who.lie]
        for volunteer in honest:
            volunteer.is_gone, volunteer.sleeps_until_s = False, 0.0
            volunteer.start()

    # Faults

    def _happen(self, fault: SimFault) -> None:
        self._tell(str(fault))
        self.checker.disturbed()
        draw = random.Random(f"{self.schedule.seed} {fault}")
        happen: dict[str, Callable[[], None]] = {
            "worker killed": lambda: self._kill_worker(fault),
            "worker sleeps": lambda: self._set_asleep(fault),
            "worker leaves for good": lambda: self._leave(fault.who),
            "worker joins": lambda: self._join(fault),
            "worker's cache damaged": lambda: self._damage_cache(fault.who, draw),
            "worker's clock set": lambda: self._set_worker_clock(fault),
            "partition": lambda: self._partition(fault),
            "coordinator killed": lambda: self._kill_machine(fault),
            "coordinator's clock set": lambda: self._set_machine_clock(fault),
            "power cut": lambda: self._cut_power(fault.for_s, draw),
            "fsync lies until power cut": lambda: self._lie(fault.for_s, draw),
            "disk full": lambda: self._for_a_while(fault, "is_full"),
            "ledger's disk full": lambda: self._for_a_while(fault, "is_ledger_full"),
            "misdirected write": lambda: self._misdirect(draw),
            "messages lost": lambda: self._weather(fault, "lost"),
            "messages twice": lambda: self._weather(fault, "twice"),
            "messages overtake": lambda: self._weather(fault, "swapped_s"),
            "connections break": lambda: self._weather(fault, "broken"),
            "run paused": lambda: self._pause(fault.for_s),
        }
        happen[fault.kind]()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.scheduler.after(delay_s, action)

    def _kill_worker(self, fault: SimFault) -> None:
        volunteer = self.volunteers[fault.who]
        volunteer.kill()
        self._later(fault.for_s, volunteer.start)

    def _set_asleep(self, fault: SimFault) -> None:
        self.volunteers[fault.who].sleeps_until_s = self.scheduler.now_s + fault.for_s

    def _leave(self, name: str) -> None:
        """At the end it comes back: enough honest workers must be there then."""
        self.volunteers[name].is_gone = True
        self.volunteers[name].kill()

    def _join(self, fault: SimFault) -> None:
        name = f"joined-{len(self.volunteers)}"
        self.volunteers[name] = Volunteer(Volunteering(name, fault.amount, fault.who), self)
        self.volunteers[name].start()

    def _damage_cache(self, name: str, draw: random.Random) -> None:
        """While it is not running: mapped files must not be shortened under a process."""
        volunteer = self.volunteers[name]
        volunteer.kill()
        files = sorted((volunteer.home / "blobs").glob("*"))
        for file in draw.sample(files, min(2, len(files))):
            data = file.read_bytes()
            file.write_bytes(data[: len(data) // 2] if draw.random() < 0.5 else draw.randbytes(len(data)))
        self._later(RESTART_S, volunteer.start)

    def _set_worker_clock(self, fault: SimFault) -> None:
        self.volunteers[fault.who].clock_offset_s += fault.amount

    def _partition(self, fault: SimFault) -> None:
        self.network.cut.add(fault.who)
        self._later(fault.for_s, lambda: self.network.cut.discard(fault.who))

    def _kill_machine(self, fault: SimFault) -> None:
        machine = self.machines[fault.who]
        machine.kill()
        self._later(fault.for_s, lambda: self._start(machine))

    def _set_machine_clock(self, fault: SimFault) -> None:
        self.machines[fault.who].clock_offset_s += fault.amount

    def _cut_power(self, for_s: float, draw: random.Random) -> None:
        lied = self.disk.lies
        for machine in self.machines.values():
            machine.kill()
        self.disk.cut_power(draw)
        self.checker.reopen(forgiving=lied)
        for machine in self.machines.values():
            self._later(for_s, lambda machine=machine: self._start(machine))  # type: ignore[misc]

    def _lie(self, for_s: float, draw: random.Random) -> None:
        self.disk.begin_to_lie()
        self._later(for_s, lambda: self._cut_power(RESTART_S, draw))

    def _for_a_while(self, fault: SimFault, what: str) -> None:
        setattr(self.disk, what, True)
        self._later(fault.for_s, lambda: setattr(self.disk, what, False))

    def _misdirect(self, draw: random.Random) -> None:
        """Into a version that can be merged again. Nothing can repair what is kept once."""
        if blobs := self.checker.repairable_blobs():
            self.disk.misdirect(draw.choice(blobs), draw)

    def _weather(self, fault: SimFault, what: str) -> None:
        self.network.change(**{what: fault.amount})
        self._later(fault.for_s, lambda: self.network.change(**{what: 0.0}))

    def _pause(self, for_s: float) -> None:
        def set_paused(paused: bool) -> None:
            for machine in self.machines.values():
                if machine.coordinator and not self.disk.is_ledger_full:
                    machine.coordinator.pause(paused)
                    return

        set_paused(True)
        self._later(for_s, lambda: set_paused(False))

    # What goes wrong

    def _tell(self, text: str) -> None:
        self.story.append(f"{self.scheduler.now_s:8.3f} s  {text}")
        self.trace.update(f"{self.scheduler.now_s!r} {text}\n".encode())

    def _defect(self, where: str, error: BaseException) -> None:
        self.checker.defect(f"{where}: {type(error).__name__}: {error}")

    def _task_failed(self, task: Task) -> None:
        """A worker's process ended with an error. A supervisor starts it again."""
        volunteer = self.volunteers.get(task.name)
        if volunteer is None or not isinstance(task.error, BlockTrainError):
            self.checker.defect(f"{task.name}: {type(task.error).__name__}: {task.error}")
            return
        if not volunteer.who.lie and isinstance(task.error, RequestRefused | ConfigError):
            self.checker.defect(f"honest {task.name} was turned away: {task.error}")
        self._later(RESTART_S, volunteer.start)

    def digest(self) -> str:
        """Equal for equal courses."""
        self.trace.update(self.checker.facts())
        return self.trace.hexdigest()


@contextmanager
def world_of(schedule: Schedule, scratch: Path, made: Template | None = None) -> Iterator[World]:
    """Without a template, that of the schedule's variant."""
    made = made or template(schedule.variant, scratch)
    folder = Path(tempfile.mkdtemp(prefix="world-", dir=scratch))
    shutil.copytree(made.folder, folder, dirs_exist_ok=True)
    state = random.getstate()
    random.seed(f"pauses {schedule.seed}")  # of the client's retries
    world = World(schedule, folder, made)
    try:
        yield world
    finally:
        random.setstate(state)
        for volunteer in world.volunteers.values():
            volunteer.kill()
        for machine in world.machines.values():
            machine.kill()
        world.checker.close()
        shutil.rmtree(folder, ignore_errors=True)
