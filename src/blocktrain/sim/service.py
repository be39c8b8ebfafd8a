"""Answers a worker's request as coordinator/routes.py does, without an event loop and threads: decodes it, calls the
real coordinator, and encodes the answer or the refusal. A task may be killed between any two transactions.
Next: ../swarm/coordinator/routes.py, the routes; machines.py, which runs this."""

from __future__ import annotations

import re
from typing import Protocol

import httpx
from pydantic import ValidationError

from blocktrain.errors import BlockTrainError
from blocktrain.sim.network import Delivery
from blocktrain.swarm.coordinator.api.downloads import RANGE
from blocktrain.swarm.coordinator.api.waiting import WaitingRequest
from blocktrain.swarm.coordinator.blocks import own_blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.intake import require_announced
from blocktrain.swarm.coordinator.refusals import render_refusal
from blocktrain.wire.attached import HOLDS_HEADER, MEDIA_TYPE, Held
from blocktrain.wire.messages import (
    EvaluationNotice,
    LeaseReply,
    LeaseRequest,
    Message,
    Received,
    TrainLease,
    UpdateNotice,
    VetNotice,
)

UPLOAD = re.compile(r"/v1/leases/([^/]+)/uploads/([0-9a-f]{64})")
BLOB = re.compile(r"/v1/blobs/([0-9a-f]{64})")


class Bells(Protocol):
    """The part of a machine that lease requests wait with."""

    @property
    def now_s(self) -> float: ...
    def wait_for_work(self, rung: int, longest_s: float) -> None: ...


def answer(coordinator: Coordinator, delivery: Delivery, bells: Bells) -> httpx.Response:
    """Errors that are not ours are raised: they are defects."""
    try:
        return _answered(coordinator, delivery, bells)
    except BlockTrainError as error:
        refusal = render_refusal(error)
        assert refusal is not None
        return httpx.Response(refusal.status_code, headers=dict(refusal.headers), content=bytes(refusal.body))
    except ValidationError as error:
        return httpx.Response(422, json={"code": "malformed", "message": str(error)[:300], "retry": False})


def _answered(coordinator: Coordinator, delivery: Delivery, bells: Bells) -> httpx.Response:
    request = delivery.request
    method, path = request.method, request.url.path
    if path == "/v1/run":
        return _json(coordinator.info())
    if path == "/v1/leases":
        return _lease(coordinator, delivery, bells)
    if path == "/v1/updates" and method == "PUT":
        return _take_whole(coordinator, delivery)
    if path == "/v1/updates":
        return _json(coordinator.update(UpdateNotice.model_validate_json(delivery.body)))
    if path == "/v1/evaluations":
        coordinator.intake.evaluation(EvaluationNotice.model_validate_json(delivery.body))
        return httpx.Response(204)
    if path == "/v1/vettings":
        coordinator.vetted(VetNotice.model_validate_json(delivery.body))
        return httpx.Response(204)
    if match := UPLOAD.fullmatch(path):
        take = _take_part if method == "PUT" else _received
        return _json(Received(received=take(coordinator, delivery, match[1], match[2])))
    if match := BLOB.fullmatch(path):
        return _blob(coordinator, match[1], request.headers.get("Range", ""))
    raise AssertionError(f"no worker asks for {method} {path}")


def _json(message: Message) -> httpx.Response:
    return httpx.Response(200, headers={"Content-Type": "application/json"}, content=message.model_dump_json().encode())


def _lease(coordinator: Coordinator, delivery: Delivery, bells: Bells) -> httpx.Response:
    asked, holds = LeaseRequest.model_validate_json(delivery.body), delivery.request.headers.get(HOLDS_HEADER)
    reply = _lease_or_wait(coordinator, asked, delivery, bells)
    if holds is not None and isinstance(reply, TrainLease):
        body = coordinator.with_blobs(reply, Held.parse(holds), asked.worker)
        if body is not None:
            return httpx.Response(200, headers={"Content-Type": MEDIA_TYPE}, content=b"".join(body))
    return _json(reply)


def _lease_or_wait(coordinator: Coordinator, asked: LeaseRequest, delivery: Delivery, bells: Bells) -> LeaseReply:
    prefer = delivery.request.headers.get("Prefer", "")
    waiting = WaitingRequest(coordinator, asked, prefer, lambda: bells.now_s)
    while True:
        reply = waiting.ask()
        if waiting.ask_again_in_s is None:
            return reply
        bells.wait_for_work(waiting.rung, waiting.ask_again_in_s)


def _take_part(coordinator: Coordinator, delivery: Delivery, lease: str, sha256: str) -> int:
    params, access_token = delivery.request.url.params, delivery.request.headers.get("authorization", "")
    offset, size = int(params["offset"]), int(params["size"])
    coordinator.intake.expect(lease, offset + int(delivery.request.headers["content-length"]), size, access_token)
    with coordinator.blobs.receiving() as part:
        part.write(delivery.body)  # what came before the connection broke is kept
        return coordinator.intake.receive(lease, sha256, offset, size, part, access_token)


def _take_whole(coordinator: Coordinator, delivery: Delivery) -> httpx.Response:
    num_bytes = int(delivery.request.url.params["notice"])
    access_token = delivery.request.headers.get("authorization", "")
    announced = int(delivery.request.headers["content-length"])
    if len(delivery.body) < announced:  # the connection broke
        return httpx.Response(400)
    notice = UpdateNotice.model_validate_json(delivery.body[:num_bytes])
    require_announced(notice.payload, announced - num_bytes)
    coordinator.intake.expect(notice.lease, announced - num_bytes, announced - num_bytes, access_token)
    with coordinator.blobs.receiving() as part:
        part.write(delivery.body[num_bytes:])
        return _json(coordinator.update(notice, part))


def _received(coordinator: Coordinator, delivery: Delivery, lease: str, sha256: str) -> int:
    return coordinator.intake.received(lease, sha256)


def _blob(coordinator: Coordinator, sha256: str, wanted: str) -> httpx.Response:
    size = coordinator.blobs.size(sha256)
    match = RANGE.fullmatch(wanted)
    first, last = (int(match[1]), min(int(match[2] or size), size - 1)) if match else (0, size - 1)
    with own_blobs():
        data = b"".join(coordinator.blobs.stream(sha256, first, last + 1))
    return httpx.Response(206 if match else 200, content=data)
