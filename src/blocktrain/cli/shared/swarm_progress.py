"""What a user sees of a swarm at work, on stderr: a bar a phase on a terminal, a line now and then elsewhere.
Next: demo.py, which shows it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.progress import Progress

from blocktrain.cli.commands.swarm.status import num_finished
from blocktrain.cli.console import say
from blocktrain.cli.shared.progress import LINE_EVERY_S, bars
from blocktrain.cli.shared.training import phase_label
from blocktrain.spec import NUM_SYMBOLS, RunSpec

Facts = Mapping[str, Any]  # of /v1/status
Curves = Mapping[str, Any]  # of /v1/curves
Show = Callable[[Facts, Curves], None]
UNTRAINED = math.log(NUM_SYMBOLS)  # nats/byte of who knows nothing


@contextmanager
def swarm_progress(spec: RunSpec) -> Iterator[Show]:
    if not sys.stderr.isatty():
        yield Lines(spec)
        return
    with bars() as progress:
        yield Bars(spec, progress)


class Lines:
    """One every LINE_EVERY_S, and the last."""

    def __init__(self, spec: RunSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec, self._clock = spec, clock
        self._said_s, self._last = float("-inf"), ""

    def __call__(self, facts: Facts, curves: Curves) -> None:
        line = self._line(facts, curves)
        if line != self._last and (all_finished(facts) or self._clock() - self._said_s >= LINE_EVERY_S):
            self._said_s, self._last = self._clock(), line
            say(line)

    def _line(self, facts: Facts, curves: Curves) -> str:
        newest = facts["phases"][-1]
        phase = self._spec.phases[newest["phase"]]
        return f"{phase_label(self._spec, phase)}: step {newest['step']}/{newest['steps']}, {told(facts, curves)}"


class Bars:
    """A bar a phase, and one line of what the whole is at."""

    def __init__(self, spec: RunSpec, progress: Progress) -> None:
        self._progress = progress
        self._tasks = {
            phase.index: progress.add_task(phase_label(spec, phase), total=phase.steps, start=False, facts="waiting")
            for phase in spec.phases
        }
        self._whole = progress.add_task("the composed model", total=None, start=False, facts="")

    def __call__(self, facts: Facts, curves: Curves) -> None:
        of_phase = losses(curves)
        for phase in facts["phases"]:
            task = self._tasks[phase["phase"]]
            if phase["step"] or phase["round"]:
                self._progress.start_task(task)
            loss = of_phase.get(phase["phase"])
            facts_of = f"{phase['step']}/{phase['steps']}" + (f"  loss {loss:.3f} nats/byte" if loss else "")
            self._progress.update(task, completed=phase["step"], facts=facts_of)
        self._progress.update(self._whole, facts=told(facts, curves))


def all_finished(facts: Facts) -> bool:
    return num_finished(facts) == int(facts["num_phases"])


def told(facts: Facts, curves: Curves) -> str:
    """The held-out loss and who is at work, in a few words."""
    held_out = curves["held_out"]
    loss = f"held out {held_out[-1]['nats_per_byte'] if held_out else UNTRAINED:.3f} nats/byte"
    updates = sum(worker["updates"] for worker in facts["workers"])
    return f"{loss}, {len(facts['workers'])} workers, {updates} updates"


def losses(curves: Curves) -> dict[int, float]:
    """The newest training loss of each phase."""
    return {curve["phase"]: curve["points"][-1]["nats_per_byte"] for curve in curves["training"] if curve["points"]}
