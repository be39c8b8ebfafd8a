"""What do many clients at once get, while bad ones are among them? Workers that submit updates without training and
clients of completions ask a real coordinator and a real `blocktrain serve` for some minutes; bad clients drip headers,
send garbage, announce bodies that never come and leave in the middle. Counted: how long honest requests took, how many
failed, and the memory and open files of coordinator and gateway on the way. Linux only.

    python bench/load.py [--workers 300] [--completions 200] [--minutes 10] [--bad 20] [--quick]

All clients are in one process, which shares the machine with the servers: the times are those of a busy machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import plotly.graph_objects as go

from blocktrain.figures import Line, line_figure
from blocktrain.spec import RunSpec, preset
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import TrainLease
from serving.models import trained
from serving.stages import address_of, blocktrain_process
from shared.experiment import (
    RESULTS,
    Document,
    Verdict,
    at_most,
    goal_lines,
    machine,
    markdown,
    proc_status,
    write_json,
    write_pictures,
)
from swarms.load import Connection, Driven
from swarms.processes import Member, phase_tensors, random_update, run_id, running_coordinator

WORK_S = (0.5, 2.0)  # that a worker pretends to train
LONGEST_ANSWER_S = 120.0
SAMPLES = 30  # of memory and files
MOST_GROWTH = 1.2  # of memory and files from the first third of the time to the last
TEXT = b"Many clients ask at once, and some of them mean no good. " * 200


@dataclass
class LoadCount:
    """What became of the requests of one kind of client."""

    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def row(self) -> dict[str, Any]:
        ms = 1000 * np.array(self.seconds or [0.0])
        return {
            "done": len(self.seconds),
            "errors": sum(self.errors.values()),
            "first_errors": dict(self.errors.most_common(5)),
            "p50_ms": float(np.percentile(ms, 50)),
            "p99_ms": float(np.percentile(ms, 99)),
        }

    async def timed(self, work: Awaitable[Any]) -> Any:
        """None if it failed."""
        begun_s = time.perf_counter()
        try:
            answer = await asyncio.wait_for(work, LONGEST_ANSWER_S)
        except (OSError, RuntimeError, TimeoutError, asyncio.IncompleteReadError, StopIteration) as error:
            self.errors[f"{type(error).__name__}: {error}"[:120]] += 1
            return None
        self.seconds.append(time.perf_counter() - begun_s)
        return answer


def main(argv: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--workers", type=int, default=300)
    options.add_argument("--completions", type=int, default=200, help="clients that ask for completions at once")
    options.add_argument("--bad", type=int, default=20, help="bad clients of each of the two services")
    options.add_argument("--minutes", type=float, default=10.0)
    options.add_argument("--quick", action="store_true", help="a few workers for seconds, no completions")
    options.add_argument("--out", type=Path, default=RESULTS, help="where the result file and picture go")
    args = options.parse_args(argv)
    if args.quick:
        args.workers, args.completions, args.bad, args.minutes = 4, 0, 2, 0.05
    with TemporaryDirectory() as folder:
        document = measured(args, Path(folder))
    write_json(args.out / "load.json", document)
    print(section(document))
    write_pictures(figures(document), args.out)


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    (folder / "text.txt").write_bytes(TEXT)
    base = preset("tiny").with_(**{"corpus.source": str(folder / "text.txt")})
    endless = {"train.steps": 10**6, "swarm.evaluate_every": 10**6, "swarm.keep_versions": 8}
    spec = base.with_(**endless, **{"swarm.deadline_floor_s": 2.0, "swarm.deadline_ceiling_s": 20.0})
    with ExitStack() as servers:
        rate = ["--rate", "100000"]  # all clients ask from this machine
        coordinator = servers.enter_context(running_coordinator(spec, folder / "coordinator", options=rate))
        pids, gateway = {"coordinator": coordinator.pid}, None
        if args.completions:
            model = trained(base.with_(**{"train.steps": 4}), folder)
            command = ("serve", str(model), "--stages", "1", "--port", "0")
            serving = servers.enter_context(blocktrain_process(*command))
            host, _, port = urlsplit(address_of(serving)).netloc.partition(":")
            pids, gateway = pids | {"gateway": serving.pid}, Invite(host, int(port), "no-key-is-needed-here")
        load = Load(args, spec, coordinator.invite, gateway, pids)
        asyncio.run(load.run())
        return load.document()


class Load:
    def __init__(
        self, args: argparse.Namespace, spec: RunSpec, coordinator: Invite, gateway: Invite | None, pids: dict[str, int]
    ) -> None:
        self._args, self._spec, self._coordinator, self._gateway, self._pids = args, spec, coordinator, gateway, pids
        self.counts = {"lease": LoadCount(), "update": LoadCount(), "completion": LoadCount()}
        self.bad: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []

    @property
    def _places(self) -> list[Invite]:
        return [self._coordinator] if self._gateway is None else [self._coordinator, self._gateway]

    @property
    def _is_over(self) -> bool:
        return bool(time.perf_counter() > self._end_s)

    async def run(self) -> None:
        self._begin_s = time.perf_counter()
        self._end_s, run = self._begin_s + 60 * self._args.minutes, run_id(self._coordinator)
        clients = [self._work(number, run) for number in range(self._args.workers)]
        if self._gateway is not None:
            clients += [self._complete(self._gateway, number) for number in range(self._args.completions)]
        for number in range(self._args.bad):
            clients += [self._misbehave(place, number) for place in self._places]
        await asyncio.gather(self._watch(), *clients)

    # Honest clients

    async def _work(self, number: int, run: str) -> None:
        client = Driven(Connection(self._coordinator), Member(self._spec, run, f"worker {number}"))
        before, draw = phase_tensors(self._spec), random.Random(number)
        sent = 0
        while not self._is_over:
            with suppress(OSError):
                await client.connection.reopen()
            ask = client.connection.ask("POST", "/v1/leases", client.member.request().model_dump_json().encode())
            answer = json.loads(await self.counts["lease"].timed(ask) or b"{}")
            if answer.get("kind") != "train":
                await asyncio.sleep(answer.get("seconds", 1.0))
                continue
            lease = TrainLease.model_validate(answer)
            await asyncio.sleep(draw.uniform(*WORK_S))
            sent += 1
            payload = random_update(before, self._spec, 1000 * number + sent % 1000)
            with suppress(OSError):
                await client.connection.reopen()
            await self.counts["update"].timed(client.hand_in(lease, payload))
        await client.connection.close()

    async def _complete(self, gateway: Invite, number: int) -> None:
        connection = Connection(gateway)
        asked = {"prompt": f"Client {number} ", "max_tokens": 16, "seed": number}
        while not self._is_over:
            with suppress(OSError):
                await connection.reopen()
            await self.counts["completion"].timed(connection.ask("POST", "/v1/completions", json.dumps(asked).encode()))
        await connection.close()

    # Bad clients

    async def _misbehave(self, place: Invite, number: int) -> None:
        """Each time in another way. What they are answered counts nowhere."""
        draw = random.Random(f"bad {number}")
        source = ("127.0.9.9", 0)  # an address of their own
        while not self._is_over:
            how = draw.choice(list(BAD))
            self.bad[how] += 1
            with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                reader, writer = await asyncio.open_connection(place.host, place.port, local_addr=source)
                try:
                    await asyncio.wait_for(BAD[how](reader, writer, place, draw), 5.0)
                finally:
                    writer.close()
            await asyncio.sleep(draw.random())

    async def _watch(self) -> None:
        pause_s = 60 * self._args.minutes / SAMPLES
        while not self._is_over:
            sample = {"at_s": time.perf_counter() - self._begin_s}
            for name, pid in self._pids.items():
                sample[f"{name}_bytes"] = proc_status("VmRSS", pid)
                sample[f"{name}_files"] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            self.samples.append(sample)
            await asyncio.sleep(pause_s)

    def document(self) -> dict[str, Any]:
        return {
            "machine": machine(),
            "workers": self._args.workers,
            "completions": self._args.completions,
            "bad_clients": len(self._places) * self._args.bad,
            "minutes": self._args.minutes,
            "honest": {name: count.row() for name, count in self.counts.items() if count.seconds or count.errors},
            "bad": dict(self.bad),
            "samples": self.samples,
            "load": os.getloadavg(),
        }


Bad = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Invite, random.Random], Awaitable[None]]


async def _drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Invite, draw: random.Random) -> None:
    for letter in b"GET /healthz HTTP/1.1\r\nHost: x":
        writer.write(bytes([letter]))
        await writer.drain()
        await asyncio.sleep(0.5)


async def _garbage(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Invite, draw: random.Random
) -> None:
    writer.write(draw.randbytes(4096))
    await reader.read(100)


async def _large_head(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Invite, draw: random.Random
) -> None:
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 10**6)
    await reader.read(100)


async def _no_body(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Invite, draw: random.Random
) -> None:
    """Announces a body, with a token that may send one, and sends none."""
    for path in ("/v1/updates", "/v1/completions"):
        head = f"POST {path} HTTP/1.1\r\nHost: {place.host}\r\nAuthorization: Bearer {place.access_token}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: 900\r\n\r\n".encode())
        await reader.read(100)


async def _malformed(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Invite, draw: random.Random
) -> None:
    body = json.dumps({"prompt": [[1e308]], "max_tokens": -1, "lease": "x" * 5000}).encode()
    for path in ("/v1/updates", "/v1/leases", "/v1/completions"):
        head = f"POST {path} HTTP/1.1\r\nHost: {place.host}\r\nAuthorization: Bearer {place.access_token}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await reader.read(2000)


async def _leave(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, place: Invite, draw: random.Random
) -> None:
    """Asks for a stream and leaves before it comes."""
    body = json.dumps({"prompt": "x", "max_tokens": 64, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {place.host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


BAD: dict[str, Bad] = {
    "drips headers": _drip,
    "sends garbage": _garbage,
    "sends a large header": _large_head,
    "sends no body": _no_body,
    "sends malformed messages": _malformed,
    "leaves a stream": _leave,
}


HEAD = ["honest requests", "answered", "errors", "p50", "p99"]


def section(document: Document) -> str:
    intro, rows = "## Load\n\n", []
    if document.get("honest"):
        intro += (
            f"{document['workers']} workers that do not train and {document['completions']} clients of completions at "
            f"once for {document['minutes']:g} minutes, with {document['bad_clients']} bad clients among them "
            f"({sum(document['bad'].values())} attempts). Clients and servers share one machine; load average "
            f"{document['load'][0]:.0f} at the end, so the times say little about a quiet one.\n\n"
        )
        rows = [
            [name, str(x["done"]), str(x["errors"]), f"{x['p50_ms']:.0f} ms", f"{x['p99_ms']:.0f} ms"]
            for name, x in document["honest"].items()
        ]
    return f"{intro}{markdown(HEAD, rows)}\n{goal_lines(verdicts(document))}"


def _served(document: Document) -> list[str]:
    last = document.get("samples", [{}])[-1]
    return [name for name in ("coordinator", "gateway") if f"{name}_bytes" in last]


def growth(document: Document, what: str) -> float:
    """From the mean of the second third of the time to that of the last: the first one warms up."""
    samples = [sample[what] for sample in document["samples"]]
    third = max(1, len(samples) // 3)
    return float(np.mean(samples[-third:]) / np.mean(samples[-2 * third : -third] or samples))


def verdicts(document: Document) -> list[Verdict]:
    if not document.get("honest"):
        return []
    errors = sum(x["errors"] for x in document["honest"].values())
    found = [at_most("errors of honest clients", float(errors), 0.0, ".0f")]
    for name in _served(document):
        for what, unit in (("memory", "bytes"), ("open files", "files")):
            found.append(
                at_most(f"growth of the {name}'s {what}", growth(document, f"{name}_{unit}"), MOST_GROWTH, ".2f")
            )
    return found


def figures(document: Document) -> dict[str, go.Figure]:
    samples = document.get("samples", ())
    minutes = [sample["at_s"] / 60 for sample in samples]
    lines = [Line(name, minutes, [x[f"{name}_bytes"] / 1e6 for x in samples]) for name in _served(document)]
    figure = line_figure(lines, title="Memory under load", x_title="minutes", y_title="MB")
    return {"load": figure}


if __name__ == "__main__":
    main()
