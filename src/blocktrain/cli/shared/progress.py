"""What a user sees while it works, on stderr: a bar a phase on a terminal, a line now and then elsewhere.
Next: training.py, which reports to it."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from blocktrain.cli.console import duration, quantity, say

if TYPE_CHECKING:
    from blocktrain.train.trainer import StepReport

LINE_EVERY_S = 10.0
RECENT_STEPS = 50  # speed is their median

OnStep: TypeAlias = "Callable[[StepReport], None]"
OnWindows: TypeAlias = Callable[[int, int], None]  # (done now, of all)


class Speed:
    """How fast a phase has been of late."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)

    def add(self, step: StepReport) -> None:
        self._seconds.append(step.seconds)

    @property
    def step_s(self) -> float:
        """The median: the first step may have compiled for a minute."""
        return max(median(self._seconds), 1e-9)

    def of_bytes(self, step: StepReport) -> str:
        return quantity(step.step_bytes / self.step_s, "B/s")


class Lines:
    """The first step of a phase, its last, and one every LINE_EVERY_S."""

    def __init__(self, labels: Mapping[int, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._labels, self._clock = labels, clock
        self._speeds: dict[int, Speed] = {}
        self._said_s: dict[int, float] = {}

    def __call__(self, step: StepReport) -> None:
        speed = self._speeds.setdefault(step.phase, Speed())
        speed.add(step)
        if step.step == step.steps or self._due(step.phase):
            self._said_s[step.phase] = self._clock()
            left_s = (step.steps - step.step) * speed.step_s
            say(
                f"{self._labels[step.phase]}: step {step.step}/{step.steps}, loss {step.loss:.3f} nats/byte, "
                f"{speed.of_bytes(step)}, {duration(left_s)} left"
            )

    def _due(self, phase: int) -> bool:
        return phase not in self._said_s or self._clock() - self._said_s[phase] >= LINE_EVERY_S


class Bars:
    """A bar a phase; it starts to move, and to be timed, with the phase's first step in this process."""

    def __init__(self, labels: Mapping[int, str], progress: Progress) -> None:
        self._progress = progress
        self._speeds: dict[int, Speed] = {}
        self._tasks = {
            phase: progress.add_task(label, total=None, start=False, facts="waiting") for phase, label in labels.items()
        }

    def __call__(self, step: StepReport) -> None:
        task = self._tasks[step.phase]
        if step.phase not in self._speeds:
            self._speeds[step.phase] = Speed()
            self._progress.reset(task, total=step.steps, completed=step.step - 1)
        speed = self._speeds[step.phase]
        speed.add(step)
        facts = f"{step.step}/{step.steps}  loss {step.loss:.3f} nats/byte  {speed.of_bytes(step)}"
        self._progress.update(task, completed=step.step, facts=facts)


@contextmanager
def training_progress(labels: Mapping[int, str]) -> Iterator[OnStep]:
    """`labels` names the phases, by their index, that will report."""
    if not sys.stderr.isatty():
        yield Lines(labels)
        return
    with bars() as progress:
        yield Bars(labels, progress)


@contextmanager
def evaluation_progress(label: str) -> Iterator[OnWindows]:
    """Quiet where there is no terminal: it does not take long."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with bars(transient=True) as progress:
        task = progress.add_task(label, total=None, facts="")
        yield lambda done, total: progress.update(task, advance=done, total=total, facts=f"{total} windows")


def bars(transient: bool = False) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[facts]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=Console(file=sys.stderr, highlight=False),
        transient=transient,
    )
