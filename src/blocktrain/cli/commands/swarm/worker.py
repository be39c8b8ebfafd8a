"""blocktrain worker: joins a run by its invite and trains until the run is finished, or until Ctrl-C.
Next: swarm/worker/worker.py, which does the work."""

from __future__ import annotations

import math
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.commands.swarm.devices import be_nice, work_on_devices
from blocktrain.cli.console import duration, quantity, say
from blocktrain.cli.machine import chosen_device, chosen_memory, parse_size, use_threads
from blocktrain.cli.options import EXIT_INTERRUPTED, DeviceName, InviteText, MemorySize, Threads
from blocktrain.cli.shared.metrics import metrics_file, metrics_server, report_to
from blocktrain.cli.shared.progress import LINE_EVERY_S
from blocktrain.cli.shared.signals import StopOnInterrupt
from blocktrain.errors import ConfigError, CoordinatorUnreachable
from blocktrain.io.private import cache_home
from blocktrain.logs import visible
from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.worker.identity import own_key
from blocktrain.swarm.worker.schedule import WorkingHours, parse_schedule
from blocktrain.wire.invite import read_invite

if TYPE_CHECKING:
    import torch
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from rich.status import Status

    from blocktrain.swarm.worker.worker import WorkReport
    from blocktrain.wire.invite import Invite

LONGEST_NAME = 100
LOOK_S = 10.0  # between two looks at the clock outside of the hours of work
NAP_S = 0.1  # a sleep notices Ctrl-C after at most this time
STANDING_EVERY_S = 60.0
NO_LEASE = "this worker gets no lease of it"
IN_PLACE = ("step", "wait")
NEXT = {"lease": "fetching what the lease needs", "away": "waiting for the coordinator", "finished": "ending"}
DONE = ("submitted", "refused", "evaluated", "vetted")  # the last report of a lease


Name = Annotated[str | None, typer.Option(metavar="NAME", help="Name for the run's admins. Default: the machine's.")]
HomeFolder = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Directory for key and downloads. Default: ~/.cache/blocktrain.")
]
CacheSize = Annotated[str, typer.Option(metavar="SIZE", help="Disk space for the text of a prepared corpus.")]
DeviceNames = Annotated[
    str | None,
    typer.Option(metavar="NAMES", help="One process per device: all GPUs with all, or names like cuda:0,cuda:1."),
]
Schedule = Annotated[
    str | None,
    typer.Option(metavar="FROM-TO", help='Work only at these hours of the day, for example "22:00-07:00".'),
]
Nice = Annotated[bool, typer.Option("--nice", help="Run at low priority, so that other programs come first.")]
Once = Annotated[bool, typer.Option("--once", help="Stop after one lease.")]
MetricsFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Append every event to this file, one JSON line each.")
]
MetricsPort = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, max=65535, help="Serve /metrics for Prometheus; 0 is any free port."),
]


def worker(
    invite: InviteText,
    name: Name = None,
    home: HomeFolder = None,
    memory: MemorySize = None,
    cache: CacheSize = "2GB",
    device: DeviceName = None,
    devices: DeviceNames = None,
    threads: Threads = None,
    schedule: Schedule = None,
    nice: Nice = False,
    once: Once = False,
    metrics: MetricsFile = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Join a run by its invite and train for it.

    Ctrl-C finishes the current step, submits what is trained and stops."""
    address = read_invite(invite)
    cache_bytes = parse_size("--cache", cache)
    if name is not None and not 1 <= len(name) <= LONGEST_NAME:
        raise ConfigError(f"--name has {len(name)} characters: give 1 to {LONGEST_NAME}")
    hours = parse_schedule(schedule) if schedule is not None else None
    if devices is not None:
        if device is not None or metrics_port is not None:
            raise ConfigError("--devices excludes --device and --metrics-port: all may share --metrics FILE")
        same = {"--name": name, "--home": home, "--memory": memory, "--cache": cache, "--threads": threads}
        same |= {"--schedule": schedule, "--metrics": metrics}
        raise typer.Exit(work_on_devices(devices, str(address), same, [*["--nice"] * nice, *["--once"] * once]))

    if nice:
        be_nice()
    use_threads(threads)
    home, own_device = home or cache_home(), chosen_device(device)
    memory_bytes = chosen_memory(memory, own_device)
    with (
        own_key(home) as (key, number),
        metrics_file(metrics) as log,
        metrics_server(metrics_port) as counted,
        shown() as show,
        StopOnInterrupt() as stop,
    ):
        name = name or (platform.node() or "worker")[: LONGEST_NAME - 4] + (f"-{number}" if number > 1 else "")
        say(f"{name} on {own_device.type} with {quantity(memory_bytes, 'B')} of memory joins the run at {address.url}")
        say(f"others see this worker as {alias_of(key.public_key().public_bytes_raw().hex())}")
        shift = Shift(report_to(show, log, counted), stop, once, address.url, hours)
        _work(shift, address, key, home, name, memory_bytes, cache_bytes, own_device)
    if stop():
        say("stopped: what was trained is submitted; run the same command to join again")
        raise typer.Exit(EXIT_INTERRUPTED)


def _work(
    shift: Shift,
    address: Invite,
    key: Ed25519PrivateKey,
    home: Path,
    name: str,
    memory_bytes: int,
    cache_bytes: int,
    device: torch.device,
) -> None:
    """Until the shift is over."""
    from blocktrain.cli.shared.training import check_memory
    from blocktrain.swarm.worker.client import CoordinatorClient
    from blocktrain.swarm.worker.worker import Worker

    with CoordinatorClient(
        address, patience_s=math.inf, sleep=shift.unreachable, failed=shift.failed, say=say
    ) as client:
        shift.standing = StandingEverySoOften(client.status, key.public_key().public_bytes_raw().hex())
        while shift.begins():
            Worker(
                client,
                home,
                key=key,
                name=name,
                memory_bytes=memory_bytes,
                cache_bytes=cache_bytes,
                device=device,
                report=shift.report,
                joined=lambda spec: check_memory(spec, spec.phases, memory_bytes, NO_LEASE),
                stop=shift.over,
                sleep=shift.sleep,
            ).run()


class Shift:
    """Decides when the worker stops, and reports when the coordinator does not answer."""

    def __init__(
        self,
        show: Callable[[WorkReport], None],
        stop: Callable[[], bool],
        once: bool,
        url: str,
        hours: WorkingHours | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._show, self._stop, self._once, self._url = show, stop, once, url
        self._hours, self._now = hours, now
        self._done, self._finished, self._away, self._said = False, False, False, ""
        self.standing: Callable[[], str | None] = lambda: None

    def over(self) -> bool:
        return self._ended() or not self._is_open()

    def begins(self) -> bool:
        """Waits for the hours of work. False if there is nothing more to do."""
        if not self._ended() and not self._is_open():
            say(f"outside of the hours {self._hours}: what was trained is submitted, work goes on then")
        while not self._ended() and not self._is_open():
            self.sleep(LOOK_S)
        return not self._ended()

    def _ended(self) -> bool:
        return self._stop() or self._finished or (self._once and self._done)

    def _is_open(self) -> bool:
        return self._hours is None or self._hours.is_open(self._now().time())

    def report(self, report: WorkReport) -> None:
        self._finished = self._finished or report.kind == "finished"
        if self._away:
            say(f"the coordinator at {self._url} answers again")
        self._away, self._said = False, ""
        self._done = self._done or report.kind in DONE
        self._show(report)
        if report.kind == "submitted" and (text := self.standing()):
            self._show(replace(report, kind="standing", text=text, loss=None))

    def sleep(self, seconds: float) -> None:
        """Returns early on Ctrl-C, which does not interrupt time.sleep."""
        end_s = time.monotonic() + seconds
        while not self._stop() and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(NAP_S, left_s))

    def failed(self, error: CoordinatorUnreachable) -> None:
        """Prints why the coordinator cannot go on, if it says so: for example that its disk is full."""
        if error.answered and str(error) != self._said:
            self._said, self._away = str(error), True
            self._tell(
                f"the coordinator at {self._url} cannot go on, trying again until it can (Ctrl-C stops): {error}"
            )

    def _tell(self, text: str) -> None:
        from blocktrain.swarm.worker.worker import WorkReport

        self._show(WorkReport("away", text))

    def unreachable(self, seconds: float) -> None:
        """Sleeps between two attempts. A Ctrl-C then ends the worker at once: the coordinator may never come back."""
        if not self._away:
            self._tell(f"the coordinator at {self._url} does not answer: trying again until it does (Ctrl-C stops)")
        self._away = True
        self.sleep(seconds)
        if self._stop():
            raise KeyboardInterrupt


class StandingEverySoOften:
    """A worker's share of the run and its rank, which the coordinator is asked for at most every STANDING_EVERY_S: its
    answer tells of all workers."""

    def __init__(
        self, status: Callable[[], Mapping[str, Any]], worker: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._status, self._worker, self._clock, self._asked_s = status, worker, clock, -math.inf

    def __call__(self) -> str | None:
        if self._clock() < self._asked_s + STANDING_EVERY_S:
            return None
        self._asked_s = self._clock()
        facts = self._status()
        standing = standing_of(alias_of(self._worker), facts["workers"], facts.get("time_left_s"))
        left_out = left_out_of(self._worker, facts.get("events", ()))
        return "; ".join(filter(None, (standing, left_out))) or None


def left_out_of(worker: str, events: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the newest update of this worker that a merge left out was left out."""
    own = [x["text"] for x in events if x["kind"] == "left out" and x["data"].get("worker") == worker]
    return f"an update was left out, {own[-1].partition(' in ')[2]}" if own else None


def standing_of(alias: str, workers: Sequence[Mapping[str, Any]], left_s: float | None) -> str | None:
    """How much of what all workers have trained on is this worker's, and how many have trained on more."""
    tokens = {each["alias"]: int(each["tokens"]) for each in workers if each["tokens"]}
    if alias not in tokens:
        return None
    rank = 1 + sum(other > tokens[alias] for other in tokens.values())
    share = f"{tokens[alias] / sum(tokens.values()):.0%} of the run's training so far"
    left = f"; the run has {duration(left_s)} left" if left_s else ""
    return f"{share}, rank {rank} of {len(tokens)}{left}"


class WorkLines:
    """Prints one line per lease and submission, one per LINE_EVERY_S for steps, and a new reason to wait once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._step_said_s, self._waits_for = clock, -math.inf, ""

    def __call__(self, report: WorkReport) -> None:
        if self.is_due(report):
            say(line_of(report))

    def is_due(self, report: WorkReport) -> bool:
        if report.kind == "step":
            if self._clock() < self._step_said_s + LINE_EVERY_S:
                return False
            self._step_said_s = self._clock()
        waits_for = re.sub(r"[\d.]+", "", report.text) if report.kind == "wait" else ""  # the seconds count down
        is_news = report.kind != "wait" or waits_for != self._waits_for
        self._waits_for = waits_for
        return is_news


class WorkStatus:
    """On a terminal: the same lines, but steps and waits change in place. After any other line, what happens next."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def __call__(self, report: WorkReport) -> None:
        if report.kind in IN_PLACE:
            self._status.update(line_of(report))
        else:
            self._status.update(NEXT.get(report.kind, "asking for work"))
            self._status.console.print(line_of(report))


def line_of(report: WorkReport) -> str:
    has_loss = report.loss is not None and report.kind != "evaluated"  # its text is the loss
    kind = "" if report.kind in ("step", "away") else f"{report.kind}: "
    return visible(f"{kind}{report.text}") + (f", loss {report.loss:.3f} nats/byte" if has_loss else "")


@contextmanager
def shown() -> Iterator[Callable[[WorkReport], None]]:
    if not sys.stderr.isatty():
        yield WorkLines()
        return
    from rich.console import Console

    console = Console(file=sys.stderr, markup=False, highlight=False)
    with console.status("joining") as status:
        yield WorkStatus(status)
