"""Progress on stderr: one bar per phase on a terminal, a line every ten seconds elsewhere. No torch.
Next: training.py, which reports the steps of this machine; cli/commands/demo.py, which reports those of a swarm."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from blocktrain.cli.console import duration, quantity, say
from blocktrain.spec import NUM_SYMBOLS

if TYPE_CHECKING:
    from blocktrain.train.trainer import StepReport

LINE_EVERY_S = 10.0
WIDTH_BESIDE_BAR = 72  # what the columns of text need, so that all fit into 80 columns
SPEED_PERIOD_S = 300.0  # a round of a swarm takes a while: the time left comes from several
RECENT_STEPS = 50  # the speed is their median
UNTRAINED_LOSS = math.log(NUM_SYMBOLS)  # nats per byte of a model that knows nothing

Labels: TypeAlias = Mapping[int, str]  # what each phase is called, by its index
OnStep: TypeAlias = "Callable[[StepReport], None]"
OnWindows: TypeAlias = Callable[[int, int], None]  # (done now, total)
SwarmStatus: TypeAlias = Mapping[str, Any]  # the answer of /v1/status
SwarmCurves: TypeAlias = Mapping[str, Any]  # the answer of /v1/curves
OnStatus: TypeAlias = Callable[[SwarmStatus, SwarmCurves], None]


class Lines:
    """Prints the first step of a phase, its last one, and one step every LINE_EVERY_S. Repeats no line."""

    def __init__(self, labels: Labels, clock: Callable[[], float] = time.monotonic) -> None:
        self._labels, self._clock = labels, clock
        self._printed: dict[int, tuple[float, str]] = {}  # by phase: when, and the line

    def show(self, phase: int, step: int, steps: int, facts: Sequence[str]) -> None:
        line = f"{self._labels[phase]}: " + ", ".join([f"step {step}/{steps}", *facts])
        at_s, before = self._printed.get(phase, (-math.inf, ""))
        if line != before and (step == steps or self._clock() - at_s >= LINE_EVERY_S):
            self._printed[phase] = self._clock(), line
            say(line)


class Bars:
    """One bar per phase. Its clock starts with the phase's first report."""

    def __init__(self, labels: Labels, progress: Progress) -> None:
        self._progress, self._started = progress, set[int]()
        self._tasks = {
            phase: progress.add_task(label, total=1, start=False, facts="waiting") for phase, label in labels.items()
        }

    def show(self, phase: int, step: int, steps: int, facts: Sequence[str]) -> None:
        task = self._tasks[phase]
        if phase not in self._started:
            self._started.add(phase)
            self._progress.reset(task, total=steps, completed=step)
        self._progress.update(task, completed=step, facts="  ".join([f"{step}/{steps}", *facts]))


@contextmanager
def training_progress(labels: Labels, clock: Callable[[], float] = time.monotonic) -> Iterator[OnStep]:
    """For the steps of this machine."""
    seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT_STEPS))

    def speed(step: StepReport) -> tuple[float, str]:
        """Seconds per step, and bytes per second in words. The median: the first step may include a minute of
        compilation."""
        seconds[step.phase].append(step.seconds)
        step_s = max(median(seconds[step.phase]), 1e-9)
        return step_s, quantity(step.step_bytes / step_s, "B/s")

    def loss(step: StepReport) -> str:
        return f"loss {step.loss:.3f} nats/byte"

    if not sys.stderr.isatty():
        lines = Lines(labels, clock)

        def print_line(step: StepReport) -> None:
            step_s, rate = speed(step)
            left = f"{duration((step.steps - step.step) * step_s)} left"
            lines.show(step.phase, step.step, step.steps, [loss(step), rate, left])

        yield print_line
        return
    with _rich_progress() as progress:
        bars = Bars(labels, progress)
        yield lambda step: bars.show(step.phase, step.step, step.steps, [loss(step), speed(step)[1]])


@contextmanager
def swarm_progress(labels: Labels) -> Iterator[OnStatus]:
    """For the status of a swarm. Lines are about the newest phase only."""
    if not sys.stderr.isatty():
        lines = Lines(labels)

        def print_line(status: SwarmStatus, curves: SwarmCurves) -> None:
            newest = status["phases"][-1]
            lines.show(newest["phase"], newest["step"], newest["steps"], [_whole_model(status, curves)])

        yield print_line
        return
    with _rich_progress() as progress:
        bars = Bars(labels, progress)

        def draw(status: SwarmStatus, curves: SwarmCurves) -> None:
            losses = {x["phase"]: x["points"][-1]["nats_per_byte"] for x in curves["training"] if x["points"]}
            for each in status["phases"]:
                facts = [f"loss {losses[each['phase']]:.3f} nats/byte"] if each["phase"] in losses else []
                bars.show(each["phase"], each["step"], each["steps"], facts)
            progress.footer = _whole_model(status, curves)

        yield draw


def num_finished(status: SwarmStatus) -> int:
    return sum(phase["finished"] for phase in status["phases"])


def _whole_model(status: SwarmStatus, curves: SwarmCurves) -> str:
    """The held-out loss of the composed model, and who trains it."""
    held_out = curves["held_out"]
    loss = held_out[-1]["nats_per_byte"] if held_out else UNTRAINED_LOSS
    updates = sum(worker["updates"] for worker in status["workers"])
    return f"held-out loss {loss:.3f} nats/byte, {len(status['workers'])} workers, {updates} updates"


@contextmanager
def evaluation_progress(label: str) -> Iterator[OnWindows]:
    """Prints nothing without a terminal: an evaluation does not take long."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with _rich_progress(transient=True) as progress:
        task = progress.add_task(label, total=None, facts="")
        yield lambda done, total: progress.update(task, advance=done, total=total, facts=f"{total} windows")


class _ProgressWithFooter(Progress):
    """Bars, and one line below them."""

    footer = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.footer:
            yield Text(self.footer)


def _rich_progress(transient: bool = False) -> _ProgressWithFooter:
    console = Console(file=sys.stderr, highlight=False)
    return _ProgressWithFooter(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=min(40, max(8, console.width - WIDTH_BESIDE_BAR))),
        TextColumn("{task.fields[facts]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=console,
        speed_estimate_period=SPEED_PERIOD_S,
        transient=transient,
    )
