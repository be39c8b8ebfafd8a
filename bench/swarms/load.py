"""How many workers can one coordinator serve? Hundreds of connections from a process of their own ask for leases and
submit small updates as fast as they are answered; beside them, the same connections ask a bare FastAPI route.

    python bench/swarms/load.py SETTINGS     the connections; prints latencies as JSON; swarm.py starts it

The client is a few lines on asyncio's streams: a full one would take more of the two than the servers do."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from blocktrain.spec import RunSpec
from blocktrain.wire.invite import Invite, parse_invite
from blocktrain.wire.messages import Blob, TrainLease

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is also a process of its own
from shared.experiment import cpu_s
from swarms.bare import BARE_PATH
from swarms.processes import Member, phase_tensors, random_update, run_id, running_coordinator, started

NO_RUN = "0" * 64  # the bare server checks no signature
LINE_END, HEAD_END = b"\r\n", b"\r\n\r\n"
FEW_CLIENTS = 8


# --- the connections -------------------------------------------------------------------------------------------------


class Connection:
    """One keep-alive connection: a request at a time, answers with a Content-Length."""

    def __init__(self, invite: Invite) -> None:
        self._invite = invite
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._common = f"Host: {invite.host}\r\nAuthorization: Bearer {invite.access_token}\r\n"

    async def close(self) -> None:
        if self._writer:
            self._writer.close()
            await self._writer.wait_closed()

    async def reopen(self) -> None:
        await self.close()
        self._reader, self._writer = await asyncio.open_connection(self._invite.host, self._invite.port)

    async def ask(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> bytes:
        """The body of the answer, which must be a success."""
        assert self._reader is not None, "reopen it first"
        assert self._writer is not None
        head = f"{method} {path} HTTP/1.1\r\n{self._common}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(HEAD_END)
        status, *headers = answer.split(LINE_END)
        length = next(int(line[15:]) for line in headers if line.lower().startswith(b"content-length:"))
        content = await self._reader.readexactly(length)
        if not status.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(f"{method} {path}: {status.decode()} {content[:300].decode()}")
        return content


@dataclass(frozen=True)
class Driven:
    """One client: its connection, and who it is."""

    connection: Connection
    member: Member

    async def ask_bare(self) -> None:
        await self.connection.ask("POST", BARE_PATH, self.member.request().model_dump_json().encode())

    async def ask_health(self) -> None:
        await self.connection.ask("GET", "/healthz")

    async def lease(self) -> TrainLease:
        answer = await self.connection.ask("POST", "/v1/leases", self.member.request().model_dump_json().encode())
        return TrainLease.model_validate_json(answer)

    async def hand_in(self, lease: TrainLease, payload: bytes) -> None:
        """In one request, as a worker does with a small update."""
        blob = Blob(sha256=hashlib.sha256(payload).hexdigest(), num_bytes=len(payload))
        notice = self.member.notice(lease, blob).model_dump_json().encode()
        path = f"/v1/updates?notice={len(notice)}"
        await self.connection.ask("PUT", path, notice + payload, "application/octet-stream")

    async def hand_in_parts(self, lease: TrainLease, payload: bytes) -> None:
        """As a worker does with a large update, here with one part: how much is there, the bytes, the notice."""
        blob = Blob(sha256=hashlib.sha256(payload).hexdigest(), num_bytes=len(payload))
        path = f"/v1/leases/{lease.lease}/uploads/{blob.sha256}"
        await self.connection.ask("GET", path)
        where = f"{path}?offset=0&size={len(payload)}"
        await self.connection.ask("PUT", where, payload, "application/octet-stream")
        notice = self.member.notice(lease, blob)
        await self.connection.ask("POST", "/v1/updates", notice.model_dump_json().encode())


Work = Callable[[Sequence[Driven], RunSpec, "Session"], Awaitable[dict[str, Any]]]
HandIn = Callable[[Driven, TrainLease, bytes], Awaitable[None]]


async def drive(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The works one after the other, by the same clients."""
    spec, invite = RunSpec.model_validate(settings["spec"]), parse_invite(settings["invite"])
    run, numbers = settings["run"], range(settings["clients"])
    clients = [Driven(Connection(invite), Member(spec, run, f"member {n}")) for n in numbers]
    try:
        return {
            work: await WORK[work](clients, spec, Session(settings["server_pid"], settings["seconds"]))
            for work in settings["works"]
        }
    finally:
        await asyncio.gather(*(client.connection.close() for client in clients))


class Session:
    """What a stretch of asking came to: how long each answer took, and the server's CPU time for all of them."""

    def __init__(self, server_pid: int, seconds: float) -> None:
        self._pid, self._seconds = server_pid, seconds
        self.latencies_s: list[float] = []

    def begin(self) -> None:
        self._cpu_s, self._start_s = cpu_s(self._pid), time.perf_counter()

    @property
    def passed_s(self) -> float:
        return time.perf_counter() - self._start_s

    @property
    def over(self) -> bool:
        return self.passed_s > self._seconds

    async def timed(self, work: Awaitable[Any]) -> None:
        begun_s = time.perf_counter()
        await work
        self.latencies_s.append(time.perf_counter() - begun_s)

    def seen(self, **more: Any) -> dict[str, Any]:
        cpu = cpu_s(self._pid) - self._cpu_s
        return {"latencies_s": self.latencies_s, "seconds": self.passed_s, "server_cpu_s": cpu, **more}


def _again_and_again(ask: Callable[[Driven], Awaitable[Any]]) -> Work:
    """All clients ask until the time is up, each as soon as it was answered."""

    async def work(clients: Sequence[Driven], spec: RunSpec, session: Session) -> dict[str, Any]:
        async def ask_on(client: Driven) -> None:
            while not session.over:
                await session.timed(ask(client))

        await _reopened(clients)
        session.begin()
        await asyncio.gather(*map(ask_on, clients))
        return session.seen()

    return work


async def _reopened(clients: Sequence[Driven]) -> None:
    """A server may close connections that were idle while others were still being answered."""
    for client in clients:
        await client.connection.reopen()


async def _updates(
    clients: Sequence[Driven], spec: RunSpec, session: Session, hand_in: HandIn = Driven.hand_in
) -> dict[str, Any]:
    """Each client submits one update, all of them at once; the last one in is answered when the round is merged."""
    before = phase_tensors(spec)
    seeds = [int(client.member.id[:8], 16) for client in clients]  # other processes send other bytes
    payloads = [random_update(before, spec, seed) for seed in seeds]
    await _reopened(clients)
    leases = await asyncio.gather(*map(Driven.lease, clients))
    await _reopened(clients)
    session.begin()
    await asyncio.gather(*(session.timed(work) for work in map(hand_in, clients, leases, payloads)))
    return session.seen(payload_bytes=len(payloads[0]))


WORK: dict[str, Work] = {
    "bare": _again_and_again(Driven.ask_bare),
    "health": _again_and_again(Driven.ask_health),
    "leases": _again_and_again(Driven.lease),  # a worker has one a round: asking again renews it
    "updates": _updates,
    "updates in parts": partial(_updates, hand_in=Driven.hand_in_parts),
}


# --- in swarm.py: the rows -------------------------------------------------------------------------------------------


def load_part(spec: RunSpec, num_clients: int, seconds: float, folder: Path) -> dict[str, Any]:
    load = Load(spec, num_clients, seconds)
    rows = [*load.on_bare(), *load.on_coordinator(folder / "coordinator")]
    for row in rows:
        row["of_bare"] = row["per_s"] / rows[0]["per_s"]
        row["cpu_of_bare"] = row["server_cpu_ms"] / rows[0]["server_cpu_ms"]
    return {"clients": num_clients, "model": spec.model.model_dump(mode="json"), "rows": rows}


@dataclass(frozen=True)
class Load:
    spec: RunSpec
    clients: int
    seconds: float

    def on_bare(self) -> list[dict[str, Any]]:
        with started([sys.executable, str(Path(__file__).with_name("bare.py"))]) as process:
            assert process.stdout is not None
            invite = Invite("127.0.0.1", int(process.stdout.readline()), "a-token-that-nobody-asks-for")
            return self._driven(["bare"], invite, process.pid)

    def on_coordinator(self, folder: Path) -> list[dict[str, Any]]:
        unlimited = ["--rate", "1000000"]  # all of them ask from one address
        with running_coordinator(self.spec, folder, options=unlimited) as coordinator:
            return self._driven(["health", "leases", "updates"], coordinator.invite, coordinator.pid)

    def _driven(self, works: Sequence[str], invite: Invite, server_pid: int) -> list[dict[str, Any]]:
        settings = {
            "works": works,
            "spec": self.spec.model_dump(mode="json"),
            "invite": str(invite),
            "server_pid": server_pid,
            "clients": self.clients,
            "run": NO_RUN if "bare" in works else run_id(invite),
            "seconds": self.seconds,
        }
        return [load_row(work, of_work) for work, of_work in driven(settings).items()]


def driven(settings: Mapping[str, Any]) -> dict[str, Any]:
    """By a process of so many connections; a few of them do not need one."""
    if settings["clients"] <= FEW_CLIENTS:
        return asyncio.run(drive(settings))
    with started([sys.executable, __file__, json.dumps(settings)]) as process:
        said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the connections for {', '.join(settings['works'])} ended with {process.returncode}")
    return dict(json.loads(said))


def load_row(work: str, seen: Mapping[str, Any]) -> dict[str, Any]:
    latencies_ms = 1000 * np.array(seen["latencies_s"])
    return {
        "work": work,
        "done": len(latencies_ms),
        "seconds": seen["seconds"],
        "per_s": len(latencies_ms) / seen["seconds"],
        "server_cpu_ms": 1000 * seen["server_cpu_s"] / len(latencies_ms),
        "p50_ms": float(np.percentile(latencies_ms, 50)),
        "p99_ms": float(np.percentile(latencies_ms, 99)),
        "payload_bytes": seen.get("payload_bytes"),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(drive(json.loads(sys.argv[1])))))
