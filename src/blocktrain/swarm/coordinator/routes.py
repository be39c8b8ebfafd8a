"""The coordinator over HTTP: a route decodes, asks the coordinator, encodes. Roles are settled here, decisions are not.
Next: coordinator.py, what is decided; doorkeeper.py, in front of all routes; refusals.py, what errors become."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Path, Query, Request, Response, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from blocktrain.errors import RequestRefused
from blocktrain.http.pages import add_dashboard
from blocktrain.http.rate_limit import Rate
from blocktrain.http.server import end_on_shutdown
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.doorkeeper import Doorkeeper
from blocktrain.swarm.coordinator.metrics import METRICS_TYPE, Answers, exposition
from blocktrain.swarm.coordinator.refusals import add_refusals, problems
from blocktrain.swarm.coordinator.status import Watching, contributions_for, status_for
from blocktrain.swarm.coordinator.status_stream import EventStream, Listeners, News, told
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import ROLES, Role
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import (
    WORKER_HEADER,
    AccessTokenRole,
    Curves,
    EvaluationNotice,
    EventEntry,
    EventPage,
    InviteText,
    LeaseReply,
    LeaseRequest,
    Message,
    ModelManifest,
    Page,
    Received,
    RunInfo,
    UpdateNotice,
    UpdateReceipt,
    Wait,
)

LONGEST_PATIENCE_S = 10.0  # that the answer to a worker without work is held back
ELSEWHERE_S = 1.0  # until it is looked whether another coordinator of the same ledger has work
WAITING = re.compile(r"\bwait=([0-9]{1,5})\b")
RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{0,15})")
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
LeaseId = Annotated[str, Path(min_length=1, max_length=100)]
BEARER = HTTPBearer(auto_error=False, description="The token of an invite")
BYTES: dict[str, Any] = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
METRICS: dict[str, Any] = {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}}
BLOB_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The whole", **BYTES},
    206: {"description": "The bytes of the Range", **BYTES},
}


def build_service(
    coordinator: Coordinator,
    ledger: Ledger,
    rate: Rate | None = None,
    clock: Callable[[], float] = time.monotonic,
    invite: Invite | None = None,
) -> FastAPI:
    """`rate` bounds the requests from one address with one token; the address as a whole may ask TOKENS times that.
    `invite` is the workers', for admins to hand on."""
    service = FastAPI(title="BlockTrain coordinator", version="1", docs_url=None, redoc_url=None)
    end_on_shutdown(service, coordinator.bell.end)
    answers = Answers()
    service.add_middleware(Doorkeeper, rate=rate or Rate(), clock=clock, answers=answers)
    add_refusals(service)

    @service.get("/healthz", responses=problems(411, 413, 429))
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    _add_work(service, coordinator, [Depends(_needs(ledger, "worker", "admin"))])
    role_of = Depends(_needs(ledger, *ROLES))  # whoever has a token, and what it may
    _add_model(service, coordinator, [role_of])
    _add_watching(service, coordinator.watching, answers, role_of)
    _add_stream(service, coordinator.watching, ledger, role_of)
    _add_ruling(service, coordinator, ledger, invite, [Depends(_needs(ledger, "admin"))])
    add_dashboard(service)
    return service


def _add_work(service: FastAPI, coordinator: Coordinator, needs: Sequence[Any]) -> None:
    """What workers ask and send."""
    intake = coordinator.intake

    @service.post("/v1/leases", dependencies=needs, response_model=LeaseReply, responses=problems(409, 422, 426))
    async def lease(request: Request, asked: LeaseRequest, prefer: Annotated[str, Header()] = "") -> Response:
        """`Prefer: wait=2` (RFC 7240): work as soon as there is some within two seconds, else the reason to wait."""
        return _said(await _work(coordinator, asked, request, _patience_s(prefer)))

    @service.get("/v1/leases/{lease_id}/uploads/{sha256}", dependencies=needs, responses=problems(404, 422))
    def received(lease_id: LeaseId, sha256: Digest) -> Received:
        return Received(received=intake.received(lease_id, sha256))

    @service.put(
        "/v1/leases/{lease_id}/uploads/{sha256}",
        dependencies=needs,
        response_model=Received,
        responses=problems(404, 409, 422),
        openapi_extra={"requestBody": {"required": True, **BYTES}},
    )
    async def receive(
        lease_id: LeaseId,
        sha256: Digest,
        offset: Annotated[int, Query(ge=0, lt=2**53)],
        size: Annotated[int, Query(ge=1, lt=2**53)],
        request: Request,
    ) -> Response:
        announced = int(request.headers.get("content-length", "0"))
        await run_in_threadpool(intake.expect, lease_id, offset + announced, size)
        with coordinator.blobs.receiving() as part:
            with suppress(ClientDisconnect):  # what came before the connection broke need not come again
                async for chunk in request.stream():
                    part.write(chunk)
            received = await run_in_threadpool(intake.receive, lease_id, sha256, offset, size, part)
        return _said(Received(received=received))

    @service.post("/v1/updates", dependencies=needs, response_model=UpdateReceipt, responses=problems(404, 409, 422))
    def update(notice: UpdateNotice) -> Response:
        return _said(coordinator.update(notice))

    @service.post("/v1/evaluations", dependencies=needs, status_code=204, responses=problems(404, 422))
    def evaluation(notice: EvaluationNotice) -> None:
        intake.evaluation(notice)


def _said(message: Message) -> Response:
    """An answer that every round needs: a message is checked when it is made, FastAPI would check it again, and that
    in another thread."""
    return Response(message.model_dump_json(), media_type="application/json")


async def _work(coordinator: Coordinator, asked: LeaseRequest, request: Request, patience_s: float) -> LeaseReply:
    """A worker that has gone meanwhile gets none: its round would wait for it."""
    bell, end_s, admitted = coordinator.bell, time.monotonic() + patience_s, False
    while True:
        rung = bell.rung
        reply = await run_in_threadpool(coordinator.lease, asked, admitted)
        left_s, admitted = end_s - time.monotonic(), True
        if not patience_s or not isinstance(reply, Wait):
            return reply
        if left_s <= 0 or bell.ended:
            return reply.model_copy(update={"seconds": 0.0})
        await bell.after(rung, min(left_s, ELSEWHERE_S))
        if await request.is_disconnected():
            return reply


def _patience_s(prefer: str) -> float:
    match = WAITING.search(prefer)
    return min(float(match[1]), LONGEST_PATIENCE_S) if match else 0.0


def _add_model(service: FastAPI, coordinator: Coordinator, needs: Sequence[Any]) -> None:
    """The run and its newest model, for whoever has a token."""

    @service.get("/v1/run", dependencies=needs, responses=problems())
    def run() -> RunInfo:
        return coordinator.info()

    @service.get("/v1/manifest", dependencies=needs, responses=problems())
    def manifest() -> ModelManifest:
        return coordinator.manifest()

    @service.get(
        "/v1/blobs/{sha256}",
        dependencies=needs,
        response_class=Response,
        responses={**BLOB_ANSWERS, **problems(404, 416, 422)},
    )
    def blob(request: Request, sha256: Digest, range: Annotated[str | None, Header()] = None) -> Response:
        sent = partial(coordinator.watching.traffic.sent, worker=_fetcher(request))
        return _blob(coordinator.blobs, sha256, range, sent)


def _add_watching(service: FastAPI, watching: Watching, answers: Answers, role_of: Any) -> None:
    """How it goes, for people, dashboards and Prometheus. What workers call themselves is for admins."""
    needs = [role_of]

    @service.get("/v1/status", responses=problems())
    def status(role: Role = role_of) -> dict[str, Any]:
        return status_for(role, watching.status())

    @service.get("/v1/events", dependencies=needs, responses=problems(422))
    def events(page: Annotated[EventPage, Query()]) -> list[EventEntry]:
        return watching.events(page)

    @service.get("/v1/curves", dependencies=needs, responses=problems())
    def curves() -> Curves:
        return watching.curves()

    @service.get("/v1/contributions", responses=problems(422))
    def contributions(page: Annotated[Page, Query()], role: Role = role_of) -> list[dict[str, Any]]:
        return contributions_for(role, watching.contributions(page))

    @service.get("/metrics", dependencies=needs, response_class=Response, responses={200: METRICS, **problems()})
    def metrics() -> Response:
        return Response(exposition(watching.status(), answers), media_type=METRICS_TYPE)


def _add_stream(service: FastAPI, watching: Watching, ledger: Ledger, role_of: Any) -> None:
    """The same as it changes, and what the one who asks may do."""
    news = News(watching)
    service.state.listeners = listeners = Listeners()
    end_on_shutdown(service, listeners.end)

    @service.get("/v1/role", responses=problems())
    def role(role: Role = role_of) -> AccessTokenRole:
        return AccessTokenRole(role=role)

    @service.get("/v1/stream", include_in_schema=False)  # a schema tells no end
    async def stream(
        given: Annotated[HTTPAuthorizationCredentials, Security(BEARER)], role: Role = role_of
    ) -> Response:
        listeners.enter()
        events = told(news, listeners, role, lambda: ledger.role_of(given.credentials) == role)
        return EventStream(events, listeners.leave)


def _add_ruling(
    service: FastAPI, coordinator: Coordinator, ledger: Ledger, invite: Invite | None, needs: Sequence[Any]
) -> None:
    """What an admin alone may do."""

    @service.get("/v1/invite", dependencies=needs, responses=problems(404))
    def show_invite() -> InviteText:
        if invite is None or ledger.role_of(invite.access_token) != "worker":
            remedy = "blocktrain token add makes one"
            raise RequestRefused(f"there is no invite for workers here, or it was revoked: {remedy}", code="invite")
        return InviteText(invite=str(invite))

    @service.post("/v1/pause", dependencies=needs, status_code=204, responses=problems())
    def pause() -> None:
        coordinator.pause(True)

    @service.post("/v1/resume", dependencies=needs, status_code=204, responses=problems())
    def resume() -> None:
        coordinator.pause(False)


def _needs(ledger: Ledger, *roles: Role) -> Callable[..., Role]:
    def check(given: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]) -> Role:
        role = ledger.role_of(given.credentials) if given else None
        if role is None:
            raise RequestRefused("the token is unknown or revoked: ask whoever runs the swarm for an invite", "token")
        if role not in roles:
            raise RequestRefused(f"a token of role {role} may not do this: ask for one of role {roles[0]}", "role")
        return role

    return check


def _fetcher(request: Request) -> str | None:
    """The worker that a fetch says it is for."""
    said = request.headers.get(WORKER_HEADER, "")
    return said if re.fullmatch("[0-9a-f]{64}", said) else None


def _blob(blobs: Blobs, sha256: str, range: str | None, sent: Callable[[int], None]) -> Response:
    """The whole, or the bytes of one Range; content-addressed, so its name is its ETag and it never changes."""
    size = blobs.size(sha256)
    headers = {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes", "Cache-Control": "immutable, max-age=31536000"}
    first, last, status = 0, size - 1, 200
    if range is not None:
        match = RANGE.fullmatch(range)
        first, last = (int(match[1]), min(int(match[2] or size), size - 1)) if match else (size, 0)
        status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{size}"
        if first > last:
            raise RequestRefused(
                f"Range {range[:40]} does not fit a blob of {size} bytes: ask for bytes=a-b in it", "range"
            )
    headers["Content-Length"] = str(last + 1 - first)
    chunks = _counted(blobs.stream(sha256, first, last + 1), sent)
    return StreamingResponse(chunks, status, headers, "application/octet-stream")


def _counted(chunks: Iterator[bytes], sent: Callable[[int], None]) -> Iterator[bytes]:
    for chunk in chunks:
        sent(len(chunk))
        yield chunk
