"""Seeds: runs the schedule of a seed, and finds the shortest schedule that still fails. Equal seeds give equal courses.
Next: schedule.py, what a seed stands for; world.py, which runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree

from blocktrain.sim.invariants import Broken
from blocktrain.sim.schedule import Schedule, schedule_of
from blocktrain.sim.world import scratch_folder, template, world_of

MOST_TRIES = 80  # to make a schedule shorter


@dataclass(frozen=True)
class Course:
    """What became of a schedule."""

    schedule: Schedule
    invariant: str | None  # that was broken; None if all held
    text: str
    digest: str
    events: int
    acknowledged: int
    merges: int
    virtual_s: float


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for simulations, removed at the end."""
    folder = scratch_folder()
    try:
        yield folder
    finally:
        template.cache_clear()
        rmtree(folder, ignore_errors=True)


def run_schedule(schedule: Schedule, folder: Path) -> Course:
    with world_of(schedule, folder) as world:
        invariant, text = None, ""
        try:
            world.run()
        except Broken as broken:
            invariant, text = broken.invariant, str(broken)
        return Course(
            schedule=schedule,
            invariant=invariant,
            text=text,
            digest=world.digest(),
            events=world.events,
            acknowledged=world.checker.num_acknowledged,
            merges=world.checker.num_merges,
            virtual_s=world.scheduler.now_s,
        )


def run_seed(seed: int, folder: Path) -> Course:
    return run_schedule(schedule_of(seed), folder)


def shortest(failed: Course, folder: Path) -> Course:
    """The same failure with as few faults, volunteers, machines and gaps as could be found."""
    best, left = failed, MOST_TRIES

    def still_fails(schedule: Schedule) -> bool:
        nonlocal best, left
        left -= 1
        course = run_schedule(schedule, folder)
        if course.invariant == failed.invariant:
            best = course
            return True
        return False

    changed = True
    while changed and left > 0:
        changed = any(still_fails(simpler) for simpler in _simpler(best.schedule) if left > 0)
    return best


def _simpler(schedule: Schedule) -> Iterator[Schedule]:
    """Half of the faults first, then all but one; then fewer volunteers and machines."""
    faults = schedule.faults
    if len(faults) > 3:
        half = len(faults) // 2
        yield schedule.only(range(half))
        yield schedule.only(range(half, len(faults)))
    for number in range(len(faults)):
        yield schedule.only([*range(number), *range(number + 1, len(faults))])
    if schedule.gaps:
        yield replace(schedule, gaps=0.0)
    needed = {fault.who for fault in faults}
    for volunteer in schedule.volunteers:
        honest = [x for x in schedule.volunteers if not x.lie]
        if volunteer.name not in needed and (volunteer.lie or len(honest) > 2):
            yield replace(schedule, volunteers=tuple(x for x in schedule.volunteers if x != volunteer))
    if len(schedule.machines) > 1 and schedule.machines[1] not in needed:
        yield replace(schedule, machines=schedule.machines[:1])


def report(failed: Course, folder: Path, say: Callable[[str], None]) -> Course:
    """Says what failed, and the shortest schedule that fails in the same way."""
    short = shortest(failed, folder)
    found = short.schedule
    say(f"seed {failed.schedule.seed} breaks an invariant: {failed.text}")
    say(f"the shortest schedule found has {len(found.faults)} of {len(failed.schedule.faults)} faults: {short.text}")
    for line in _lines(found):
        say(f"    {line}")
    return short


def _lines(schedule: Schedule) -> Sequence[str]:
    volunteers = [f"{x.name} ({x.lie or 'honest'}, {x.steps_per_s:.2g} steps/s)" for x in schedule.volunteers]
    return [
        f"variant {schedule.variant}, {', '.join(schedule.machines)}, gaps {schedule.gaps:g}",
        ", ".join(volunteers),
        *map(str, schedule.faults),
    ]
