"""Progress for other tools: TensorBoard logs, JSON lines, Prometheus counters. Their packages are imported only when a
user asks for them. Next: training.py and cli/commands/swarm/worker.py, which report to these."""

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
from blocktrain.http.limits import LOOPBACK

if TYPE_CHECKING:
    from blocktrain.swarm.worker.worker import WorkReport
    from blocktrain.train.trainer import StepReport

Report = TypeVar("Report")


def report_to(*listeners: Callable[[Report], None] | None) -> Callable[[Report], None]:
    """One listener that passes reports to all of these that are not None."""
    present = [listener for listener in listeners if listener is not None]

    def pass_on(report: Report) -> None:
        for listener in present:
            listener(report)

    return pass_on


@contextmanager
def tensorboard_log(folder: Path | None) -> Iterator[Callable[[StepReport], None] | None]:
    """One tag per phase and quantity. The step is that of the phase."""
    if folder is None:
        yield None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "--tensorboard needs the package tensorboard, which is not installed: pip install 'blocktrain[tensorboard]'"
        ) from None
    try:
        writer = SummaryWriter(str(folder))
    except OSError as error:
        raise StorageError(f"{folder} cannot be written ({error.strerror}): choose another --tensorboard") from None

    def log(step: StepReport) -> None:
        for name in ("loss", "grad_norm", "lr_factor", "seconds"):
            writer.add_scalar(f"phase {step.phase + 1}/{name}", getattr(step, name), step.step)

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def metrics_file(
    path: Path | None, clock: Callable[[], float] = time.time
) -> Iterator[Callable[[WorkReport], None] | None]:
    """Appends one JSON line per report, each in one write."""
    if path is None:
        yield None
        return
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror}): choose another --metrics") from None
    with file:

        def append(report: WorkReport) -> None:
            file.write(json.dumps({"at_s": clock(), **asdict(report)}).encode() + b"\n")

        yield append


class WorkCounters:
    """Counts what a worker has done since it started."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        self.registry = CollectorRegistry()
        self._reports = Counter(
            "blocktrain_worker_reports",
            "Reports of a worker by kind: lease, step, submitted, wait, …",
            ["kind"],
            registry=self.registry,
        )
        self._loss = Gauge(
            "blocktrain_worker_loss_nats_per_byte", "Training loss of the last step", registry=self.registry
        )
        self._heard = Gauge(
            "blocktrain_worker_last_report_seconds", "Unix time of the last report", registry=self.registry
        )

    def __call__(self, report: WorkReport) -> None:
        self._reports.labels(report.kind).inc()
        self._heard.set_to_current_time()
        if report.kind == "step" and report.loss is not None:
            self._loss.set(report.loss)


@contextmanager
def metrics_server(port: int | None) -> Iterator[WorkCounters | None]:
    """Listens on this machine only: what a worker does is private to its owner."""
    if port is None:
        yield None
        return
    from prometheus_client import start_http_server

    counters = WorkCounters()
    try:
        server, thread = start_http_server(port, LOOPBACK, counters.registry)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on --metrics-port {port} ({error.strerror}): give another port, or 0 for any free port"
        ) from None
    say(f"metrics: http://{LOOPBACK}:{server.server_port}/metrics")
    try:
        yield counters
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
