"""What a command does, for other tools to follow: TensorBoard logs, JSON lines, Prometheus counters. Their packages are
imported when they are asked for. Next: training.py and worker.py, which report to these."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from blocktrain.cli.console import say
from blocktrain.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from blocktrain.swarm.worker.worker import WorkReport
    from blocktrain.train.trainer import StepReport

Report = TypeVar("Report")
LOOPBACK = "127.0.0.1"


def told_to(*listeners: Callable[[Report], None] | None) -> Callable[[Report], None]:
    """One listener for all of them that there are."""
    present = [listener for listener in listeners if listener is not None]

    def tell(report: Report) -> None:
        for listener in present:
            listener(report)

    return tell


@contextmanager
def tensorboard_log(folder: Path | None) -> Iterator[Callable[[StepReport], None] | None]:
    """A tag a phase and quantity; the step is the phase's own."""
    if folder is None:
        yield None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "--tensorboard needs the package of that name, which is not here: pip install 'blocktrain[tensorboard]'"
        ) from None
    try:
        writer = SummaryWriter(str(folder))
    except OSError as error:
        raise StorageError(f"{folder} cannot be written ({error.strerror}): choose another --tensorboard") from None

    def log(step: StepReport) -> None:
        for name in ("loss", "grad_norm", "lr_factor", "seconds"):
            writer.add_scalar(f"phase {step.phase}/{name}", getattr(step, name), step.step)

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def metrics_file(
    path: Path | None, clock: Callable[[], float] = time.time
) -> Iterator[Callable[[WorkReport], None] | None]:
    """A JSON line a report, appended in one write."""
    if path is None:
        yield None
        return
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror}): choose another --metrics") from None
    with file:
        yield lambda report: _append(file.write, {"at_s": clock(), **asdict(report)})


def _append(write: Callable[[bytes], object], record: dict[str, object]) -> None:
    write(json.dumps(record).encode() + b"\n")


class WorkCounters:
    """What a worker has done since it started."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self.registry = CollectorRegistry()
        self._reports = Counter(
            "blocktrain_worker_reports",
            "Leases, steps, hand-ins and the like",
            ["kind"],
            registry=self.registry,
        )
        self._loss = Gauge("blocktrain_worker_loss_nats_per_byte", "Of the last step", registry=self.registry)
        self._heard = Gauge("blocktrain_worker_last_report_seconds", "When, in Unix time", registry=self.registry)

    def __call__(self, report: WorkReport) -> None:
        self._reports.labels(report.kind).inc()
        self._heard.set_to_current_time()
        if report.kind == "step" and report.loss is not None:
            self._loss.set(report.loss)


@contextmanager
def metrics_server(port: int | None) -> Iterator[WorkCounters | None]:
    """On this machine only: what a worker does is its owner's business."""
    if port is None:
        yield None
        return
    from prometheus_client import start_http_server

    counters = WorkCounters()
    try:
        server, thread = start_http_server(port, LOOPBACK, counters.registry)
    except OSError as error:
        raise ConfigError(
            f"--metrics-port {port} cannot be listened on ({error.strerror}): give another, or 0 for a free one"
        ) from None
    say(f"metrics at http://{LOOPBACK}:{server.server_port}/metrics")
    try:
        yield counters
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
