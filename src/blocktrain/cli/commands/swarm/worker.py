"""blocktrain worker: joins a run by its invite and trains until the run is finished, or until Ctrl-C.
Next: swarm/worker/worker.py, which does the work."""

from __future__ import annotations

import math
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktrain.cli.console import quantity, say
from blocktrain.cli.options import (
    EXIT_INTERRUPTED,
    DeviceName,
    InviteText,
    MemorySize,
    Threads,
    chosen_device,
    chosen_memory,
    use_threads,
)
from blocktrain.cli.shared.metrics import metrics_file, metrics_server, report_to
from blocktrain.cli.shared.progress import LINE_EVERY_S
from blocktrain.cli.shared.signals import StopOnInterrupt
from blocktrain.errors import BlockTrainError, ConfigError, CoordinatorUnreachable, StorageError
from blocktrain.io.private import cache_home, read_private, write_private
from blocktrain.logs import visible
from blocktrain.wire.invite import read_invite

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from rich.status import Status

    from blocktrain.swarm.worker.worker import WorkReport
    from blocktrain.wire.invite import Invite

LONGEST_NAME = 100
NAP_S = 0.1  # a sleep notices Ctrl-C after at most this time
DONE = ("submitted", "refused", "evaluated")  # the last report of a lease


def worker(
    invite: InviteText,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name for the run's admins. Default: the machine's.")
    ] = None,
    home: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory for key and downloads. Default: ~/.cache/blocktrain.")
    ] = None,
    memory: MemorySize = None,
    cache_gb: Annotated[
        float, typer.Option(metavar="GB", help="Most text to keep on disk, if the run's text is prepared.")
    ] = 2.0,
    device: DeviceName = None,
    threads: Threads = None,
    once: Annotated[bool, typer.Option("--once", help="Stop after one lease.")] = False,
    metrics: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append every event to this file, one JSON line each.")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, max=65535, help="Serve /metrics for Prometheus; 0 is any free port."),
    ] = None,
) -> None:
    """Join a run by its invite and train for it.

    Ctrl-C finishes the current step, submits what is trained and stops."""
    address = read_invite(invite)
    if not 0 < cache_gb < math.inf:
        raise ConfigError(f"--cache-gb {cache_gb:g} is out of range: give gigabytes above 0")
    if name is not None and not 1 <= len(name) <= LONGEST_NAME:
        raise ConfigError(f"--name has {len(name)} characters: give 1 to {LONGEST_NAME}")

    from blocktrain.swarm.aliases import alias_of
    from blocktrain.swarm.worker.client import CoordinatorClient
    from blocktrain.swarm.worker.worker import Worker

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
        shift = Shift(report_to(show, log, counted), stop, once, address.url)
        with CoordinatorClient(address, patience_s=math.inf, sleep=shift.unreachable, failed=shift.failed) as client:
            Worker(
                client,
                home,
                key=key,
                name=name,
                memory_bytes=memory_bytes,
                cache_bytes=int(cache_gb * 10**9),
                device=own_device,
                report=shift.report,
                stop=shift.over,
                sleep=shift.sleep,
            ).run()
        _show_share(address, key.public_key().public_bytes_raw().hex())
    if stop():
        say("stopped: what was trained is submitted; run the same command to join again")
        raise typer.Exit(EXIT_INTERRUPTED)


def _show_share(address: Invite, id: str) -> None:
    from blocktrain.swarm.worker.client import CoordinatorClient

    with suppress(BlockTrainError), CoordinatorClient(address, patience_s=0.0) as client:
        for line in own_share(client.status(), id):
            say(line)


def own_share(status: Mapping[str, Any], id: str) -> list[str]:
    """What this worker has done for the run, in one line; nothing if it has done nothing."""
    ranked = sorted(status["workers"], key=lambda worker: -worker["tokens"])
    for place, worker in enumerate(ranked, start=1):
        if worker["id"] == id and worker["tokens"]:
            share = worker["tokens"] / sum(each["tokens"] for each in ranked)
            updates = f"{worker['updates']:,} update{'' if worker['updates'] == 1 else 's'}"
            return [
                f"this worker's share of the run: {share:.0%} of the text, {updates}, place {place} of {len(ranked)}"
            ]
    return []


class Shift:
    """Decides when the worker stops, and reports when the coordinator does not answer."""

    def __init__(self, show: Callable[[WorkReport], None], stop: Callable[[], bool], once: bool, url: str) -> None:
        self._show, self._stop, self._once, self._url = show, stop, once, url
        self._done, self._away, self._said = False, False, ""

    def over(self) -> bool:
        return self._stop() or (self._once and self._done)

    def report(self, report: WorkReport) -> None:
        if self._away:
            say(f"the coordinator at {self._url} answers again")
        self._away, self._said = False, ""
        self._done = self._done or report.kind in DONE
        self._show(report)

    def sleep(self, seconds: float) -> None:
        """Returns early on Ctrl-C, which does not interrupt time.sleep."""
        end_s = time.monotonic() + seconds
        while not self._stop() and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(NAP_S, left_s))

    def failed(self, error: CoordinatorUnreachable) -> None:
        """Prints why the coordinator cannot go on, if it says so: for example that its disk is full."""
        if error.answered and str(error) != self._said:
            self._said, self._away = str(error), True
            say(f"the coordinator at {self._url} cannot go on, trying again until it can (Ctrl-C stops): {error}")

    def unreachable(self, seconds: float) -> None:
        """Sleeps between two attempts. A Ctrl-C then ends the worker at once: the coordinator may never come back."""
        if not self._away:
            say(f"the coordinator at {self._url} does not answer: trying again until it does (Ctrl-C stops)")
        self._away = True
        self.sleep(seconds)
        if self._stop():
            raise KeyboardInterrupt


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
    """On a terminal: the same lines, but steps and waits change in place."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def __call__(self, report: WorkReport) -> None:
        self._status.update(line_of(report))
        if report.kind not in ("step", "wait"):
            self._status.console.print(line_of(report))


def line_of(report: WorkReport) -> str:
    has_loss = report.loss is not None and report.kind != "evaluated"  # its text is the loss
    kind = "" if report.kind == "step" else f"{report.kind}: "
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


@contextmanager
def own_key(home: Path) -> Iterator[tuple[Ed25519PrivateKey, int]]:
    """The first key of this directory that no other worker uses now, and its number. Makes one if needed: to the
    coordinator, two workers with the same key would be one."""
    from filelock import FileLock, Timeout

    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{home} cannot be created ({error.strerror}): choose another --home") from None
    for number in count(1):
        path = home / ("key" if number == 1 else f"key-{number}")
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        except OSError as error:
            raise StorageError(f"{home} cannot be written ({error.strerror}): choose another --home") from None
        try:
            yield _key(path), number
        finally:
            lock.release()
        return


def _key(path: Path) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )

    data = read_private(path)
    if data is None:
        made = Ed25519PrivateKey.generate()
        write_private(path, made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return made
    with suppress(ValueError, TypeError):
        key = load_pem_private_key(data, password=None)
        if isinstance(key, Ed25519PrivateKey):
            return key
    raise ConfigError(f"{path} is not an Ed25519 key in PEM format: restore it, or delete it to join as a new worker")
