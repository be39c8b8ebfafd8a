"""Progress on stderr: one bar per phase on a terminal, a line every ten seconds elsewhere. No torch.
Next: training.py, which reports the steps of this machine; cli/commands/demo/training.py, which reports those of a
swarm."""

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
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from blocktrain.cli.console import WIDTH, counted, duration, quantity, say
from blocktrain.logs import visible
from blocktrain.spec import NUM_SYMBOLS

if TYPE_CHECKING:
    from blocktrain.data.prepare import PrepareReport
    from blocktrain.train.trainer import StepReport

LINE_EVERY_S = 10.0
WIDTH_BESIDE_BAR = 72  # what the columns of text need, so that all fit into 80 columns
SPEED_PERIOD_S = 300.0  # a round of a swarm takes a while: the time left comes from several
RECENT_STEPS = 50  # the speed is their median
UNTRAINED_LOSS = math.log(NUM_SYMBOLS)  # nats per byte of a model that knows nothing

Labels: TypeAlias = Mapping[int, str]  # what each phase is called, by its index
OnStep: TypeAlias = "Callable[[StepReport], None]"
OnPrepared: TypeAlias = "Callable[[PrepareReport], None]"
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


class RunPlan:
    """What is left of a run: `phases` gives the steps of each and the work of one step; `jobs` of them train at once.
    The speed is that of the newest steps, so the time of a phase that has not begun is known too."""

    def __init__(self, phases: Mapping[int, tuple[int, float]], jobs: int = 1) -> None:
        self._left, self._work, self._jobs = {k: steps for k, (steps, _) in phases.items()}, phases, jobs

    def time_left_s(self, step: StepReport, step_s: float) -> float | None:
        """None if the run has only this phase."""
        if step.phase not in self._work:
            return None
        self._left[step.phase] = step.steps - step.step
        work = sum(steps * self._work[phase][1] for phase, steps in self._left.items())
        at_once = min(self._jobs, max(1, sum(steps > 0 for steps in self._left.values())))
        return work / self._work[step.phase][1] * step_s / at_once if len(self._work) > 1 else None


NO_PLAN = RunPlan({})


@contextmanager
def training_progress(
    labels: Labels, plan: RunPlan = NO_PLAN, clock: Callable[[], float] = time.monotonic
) -> Iterator[OnStep]:
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
            left = [f"{duration((step.steps - step.step) * step_s)} left"]
            if (all_s := plan.time_left_s(step, step_s)) is not None:
                left.append(f"{duration(all_s)} for the whole run")
            lines.show(step.phase, step.step, step.steps, [loss(step), rate, *left])

        yield print_line
        return
    with _rich_progress() as progress:
        bars = Bars(labels, progress)

        def draw(step: StepReport) -> None:
            step_s, rate = speed(step)
            bars.show(step.phase, step.step, step.steps, [loss(step), rate])
            if (all_s := plan.time_left_s(step, step_s)) is not None:
                progress.footer = f"whole run: {duration(all_s)} left"

        yield draw


@contextmanager
def swarm_progress(labels: Labels) -> Iterator[OnStatus]:
    """For the status of a swarm: how the model continues the same prompt after each evaluation, and below it the
    progress. Lines are about the newest phase only."""
    samples = NewSamples()
    if not sys.stderr.isatty():
        lines = Lines(labels)

        def print_line(status: SwarmStatus, curves: SwarmCurves) -> None:
            for sample in samples.of(status):
                say(sample.plain)
            newest = status["phases"][-1]
            lines.show(newest["phase"], newest["step"], newest["steps"], [_whole_model(status, curves)])

        yield print_line
        return
    with _rich_progress() as progress:
        bars = Bars(labels, progress)

        def draw(status: SwarmStatus, curves: SwarmCurves) -> None:
            for sample in samples.of(status):
                progress.console.print(sample)
            losses = {x["phase"]: x["points"][-1]["nats_per_byte"] for x in curves["training"] if x["points"]}
            for each in status["phases"]:
                facts = [f"loss {losses[each['phase']]:.3f} nats/byte"] if each["phase"] in losses else []
                bars.show(each["phase"], each["step"], each["steps"], facts)
            progress.footer = _whole_model(status, curves)

        yield draw


class NewSamples:
    """What the model wrote since the last look: one line per evaluation, about the first prompt only."""

    def __init__(self) -> None:
        self._shown_s = -math.inf

    def of(self, status: SwarmStatus) -> list[Text]:
        new = [each for each in status.get("samples", ()) if each.get("at_s", 0.0) > self._shown_s]
        self._shown_s = max([self._shown_s, *(each.get("at_s", 0.0) for each in new)])
        return [_sample_line(each) for each in new if each["samples"]]


def _sample_line(written: Mapping[str, Any]) -> Text:
    loss, sample = written.get("nats_per_byte"), written["samples"][0]
    line = Text("      " if loss is None else f"{loss:.3f} ", style="cyan", no_wrap=True)
    line.append(f" {visible(sample['prompt'])}", style="dim").append("|", style="dim")
    line.append(visible(sample["text"]), style="default")
    line.truncate(WIDTH, overflow="ellipsis")
    return line


def num_finished(status: SwarmStatus) -> int:
    return sum(phase["finished"] for phase in status["phases"])


def _whole_model(status: SwarmStatus, curves: SwarmCurves) -> str:
    """The held-out loss of the composed model, who trains it, and how long that still takes."""
    held_out = curves["held_out"]
    loss = held_out[-1]["nats_per_byte"] if held_out else UNTRAINED_LOSS
    updates = sum(worker["updates"] for worker in status["workers"])
    people = f"{counted(len(status['workers']), 'worker')}, {counted(updates, 'update')}"
    left_s = status.get("time_left_s")
    left = f", {duration(left_s)} left" if left_s else ""
    return f"held-out loss {loss:.3f} nats/byte, {people}{left}"


@contextmanager
def evaluation_progress(label: str) -> Iterator[OnWindows]:
    """Prints nothing without a terminal: an evaluation does not take long."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with _rich_progress(transient=True) as progress:
        task = progress.add_task(label, total=None, facts="")
        yield lambda done, total: progress.update(task, advance=done, total=total, facts=counted(total, "window"))


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


@contextmanager
def preparing_progress(clock: Callable[[], float] = time.monotonic) -> Iterator[OnPrepared]:
    """For a corpus while it is prepared: how much text, how fast, and the time left. Silent if nothing is prepared."""
    if not sys.stderr.isatty():
        yield _PreparingLines(clock)
        return
    with _rich_progress(transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def draw(report: PrepareReport) -> None:
            if report.task not in tasks:
                tasks[report.task] = progress.add_task(report.task, total=None, facts="")
            facts = quantity(report.done_bytes, "B") if report.done_bytes else ""
            progress.update(tasks[report.task], completed=report.done_bytes, total=report.total_bytes, facts=facts)

        yield draw


class _PreparingLines:
    """A line when a task begins, every LINE_EVERY_S, and at its end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._task, self._began_s, self._printed_s = clock, "", 0.0, -math.inf
        self._began_bytes = 0

    def __call__(self, report: PrepareReport) -> None:
        now_s = self._clock()
        if report.task != self._task:
            self._task, self._began_s, self._began_bytes = report.task, now_s, report.done_bytes
        elif now_s - self._printed_s < LINE_EVERY_S and report.done_bytes != report.total_bytes:
            return
        self._printed_s = now_s
        facts = [f"{report.task}: {quantity(report.done_bytes, 'B')}" if report.done_bytes else report.task]
        speed = (report.done_bytes - self._began_bytes) / max(now_s - self._began_s, 1e-9)
        if report.total_bytes is not None and now_s > self._began_s and speed > 0:
            left_s = (report.total_bytes - report.done_bytes) / speed
            facts = [f"{facts[0]} of {quantity(report.total_bytes, 'B')}", quantity(speed, "B/s")]
            facts.append(f"{duration(left_s)} left")
        say(", ".join(facts))
