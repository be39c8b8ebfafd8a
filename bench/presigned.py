"""What does a coordinator carry with and without presigned URLs? A real coordinator on a real bucket, and real workers
that train one step per round. Without presigned URLs the workers' bytes go through the coordinator; with them they go
to the bucket directly, and the coordinator still reads every update to check it.

    python bench/presigned.py [--workers 2] [--rounds 3] [--width 128]

Counted are the bytes between workers and coordinator and those of the bucket, each by a proxy, and the coordinator's
CPU time. The first round, in which workers also fetch the text and the first blocks, is left out."""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.spec import RunSpec, preset
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import Worker, WorkReport
from blocktrain.wire.invite import Invite
from scale_out import servers, services  # type: ignore[attr-defined]  # of the tests, found by scale_out
from shared.experiment import (
    RESULTS,
    Document,
    Verdict,
    at_most,
    goal_lines,
    machine,
    markdown,
    portable,
    table,
    write_json,
)
from swarms.counting_proxy import CountingProxy
from swarms.processes import CoordinatorProcess, running_coordinator

MEMORY_BYTES = 2**33
LIMIT_S = 300.0
MOST = 0.1  # of the bytes between workers and coordinator: the goal
WAYS = {False: "through the coordinator", True: "by presigned URLs"}


def spec_for(workers: int, width: int) -> RunSpec:
    """A run whose rounds are one step of every worker."""
    return preset("tiny").with_(
        **{
            "model.width": width,
            "swarm.round_steps": 1,
            "swarm.min_updates": workers,
            "swarm.deadline_floor_s": 600.0,
            "swarm.evaluate_every": 1000,
        }
    )


class Rounds:
    """Workers in threads. They meet after their first update, and again after so many more."""

    def __init__(self, invite: Invite, workers: int, rounds: int, folder: Path) -> None:
        self._invite, self._last, self._folder = invite, 1 + rounds, folder
        self.met = threading.Barrier(workers + 1, timeout=LIMIT_S)
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(workers)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        submitted = 0

        def report(work: WorkReport) -> None:
            nonlocal submitted
            if work.kind == "submitted":
                submitted += 1
                if submitted in (1, self._last):
                    self.met.wait()  # all have submitted
                    self.met.wait()  # the counters are read

        with CoordinatorClient(self._invite, patience_s=LIMIT_S) as client:
            Worker(
                client,
                self._folder / str(number),
                key=Ed25519PrivateKey.generate(),
                name=f"worker {number}",
                memory_bytes=MEMORY_BYTES,
                report=report,
                stop=lambda: submitted >= self._last,
            ).run()


def measured(spec: RunSpec, presigned: bool, workers: int, rounds: int, bucket: CountingProxy) -> dict[str, Any]:
    blobs = ["--blobs", f"s3://{services.BUCKET}/{uuid.uuid4().hex}", "--presigned" if presigned else "--no-presigned"]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_coordinator(spec, Path(folder) / "coordinator", options=[*blobs, "--rate", "1000000"]) as coordinator,
        closing(CountingProxy(coordinator.invite.port)) as between,
    ):
        work = Rounds(replace(coordinator.invite, port=between.port), workers, rounds, Path(folder) / "homes")
        work.start()
        readings = []
        for _ in range(2):
            work.met.wait()
            readings.append(_reading(coordinator, between, bucket))
            work.met.wait()
        work.join()
    before, after = readings
    return {name: (after[name] - before[name]) / (workers * rounds) for name in after} | {"presigned": presigned}


def _reading(coordinator: CoordinatorProcess, between: CountingProxy, bucket: CountingProxy) -> dict[str, float]:
    workers_side, bucket_side = between.read(), bucket.read()
    return {
        "cpu_ms": 1000 * coordinator.cpu_s(),
        "requests": workers_side.requests.total(),
        "bytes_from_workers": workers_side.bytes_in,
        "bytes_to_workers": workers_side.bytes_out,
        "bucket_requests": bucket_side.requests.total(),
        "bytes_to_bucket": bucket_side.bytes_in,
        "bytes_from_bucket": bucket_side.bytes_out,
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(argv)
    workers, rounds, width = (1, 1, 32) if options.quick else (options.workers, options.rounds, options.width)
    spec = spec_for(workers, width)
    with servers() as bucket:
        rows = [measured(spec, presigned, workers, rounds, bucket) for presigned in WAYS]
    document = {
        "machine": machine(),
        "spec": portable(spec),
        "workers": workers,
        "rounds": rounds,
        "load_average": os.getloadavg()[0],
        "per_update": rows,
    }
    write_json(options.out / "presigned.json", document)
    print(table(*_cells(document)), goal_lines(verdicts(document)), sep="\n\n")


def _carried(row: Document) -> float:
    return float(row["bytes_from_workers"] + row["bytes_to_workers"])


def verdicts(document: Document) -> list[Verdict]:
    through, direct = document["per_update"]
    return [
        at_most(
            "bytes between workers and coordinator with presigned URLs, of those without",
            _carried(direct) / _carried(through),
            MOST,
            ".3f",
        )
    ]


def _cells(document: Document) -> tuple[list[str], list[list[str]]]:
    head = ["bytes of blobs", "coordinator's CPU, ms", "requests", "kB from workers", "kB to workers"]
    head += ["bucket requests", "kB to the bucket", "kB from the bucket"]
    rows = [
        [
            WAYS[row["presigned"]],
            f"{row['cpu_ms']:.0f}",
            f"{row['requests']:.1f}",
            *(f"{row[name] / 1e3:,.1f}" for name in ("bytes_from_workers", "bytes_to_workers")),
            f"{row['bucket_requests']:.1f}",
            *(f"{row[name] / 1e3:,.1f}" for name in ("bytes_to_bucket", "bytes_from_bucket")),
        ]
        for row in document["per_update"]
    ]
    return head, rows


def section(document: Document) -> str:
    return "\n".join(
        [
            "## Presigned URLs\n",
            f"What a coordinator carries per update: {document['workers']} workers, {document['rounds']} rounds of one "
            f"step, after a first round that is not counted. The bucket's columns have the bytes of the workers too, "
            f"when these go there directly. Each update has its share of the merge in it. The machine's load was "
            f"{document['load_average']:.0f}, so CPU times are rough.\n",
            markdown(*_cells(document)),
            goal_lines(verdicts(document)),
        ]
    )


def figures(document: Document) -> dict[str, go.Figure]:
    return {}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="that are counted")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the result file goes")
    parser.add_argument("--quick", action="store_true", help="one worker, one round, a tiny model")
    return parser


if __name__ == "__main__":
    main()
