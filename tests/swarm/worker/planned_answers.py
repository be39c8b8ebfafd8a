"""A coordinator that answers as planned, and a clock that only sleeping moves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import httpx

from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import Blob, Problem

TOKEN = "a-token-for-the-workers"
DATA = bytes(range(256)) * 10
BLOB = Blob(sha256=hashlib.sha256(DATA).hexdigest(), num_bytes=len(DATA))


Answerer = Callable[[httpx.Request], httpx.Response]


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s, self.pauses_s = 0.0, list[float]()

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.now_s += seconds


class Broken(httpx.SyncByteStream):
    """Some bytes, and then the connection is gone."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __iter__(self) -> Iterator[bytes]:
        yield self.data
        raise httpx.ReadError("connection reset")


def client_of(answer: Answerer, time: Time | None = None, patience_s: float = 10.0) -> CoordinatorClient:
    time = time or Time()
    transport = httpx.MockTransport(answer)
    invite = Invite("coordinator.test", 80, TOKEN)
    return CoordinatorClient(invite, patience_s=patience_s, transport=transport, clock=time.clock, sleep=time.sleep)


def problem(status: int, code: str = "planned", retry: bool = False) -> httpx.Response:
    return httpx.Response(status, json=Problem(code=code, message="as planned", retry=retry).model_dump())


def silence(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


def one_after_the_other(*answers: httpx.Response | Answerer) -> tuple[Answerer, list[httpx.Request]]:
    """What the coordinator answers, in turn, and what it was asked."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        planned = answers[len(asked) - 1]
        return planned(request) if callable(planned) else planned

    return answer, asked
