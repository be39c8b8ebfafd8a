"""The coordinator's HTTP API. A route decodes the request, calls the coordinator and encodes the answer. Routes check
the role of the access token; they decide nothing else.
Next: coordinator.py, the decisions; http/middleware.py, around all routes; refusals.py, how errors look."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Path, Query, Request, Response, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Scope

from blocktrain.errors import LedgerUnavailable, RequestRefused
from blocktrain.http.middleware import BodyLimit, Middleware, limit_rate
from blocktrain.http.pages import DASHBOARD, add_page
from blocktrain.http.rate_limit import Rate
from blocktrain.http.server import end_on_shutdown
from blocktrain.http.sse import EventStream
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.blocks import own_blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.metrics import METRICS_TYPE, Answers, exposition
from blocktrain.swarm.coordinator.refusals import (
    add_error_handlers,
    problems,
    problems_without_token,
    render_refusal,
)
from blocktrain.swarm.coordinator.status import Watching, contributions_for, status_for
from blocktrain.swarm.coordinator.status_stream import STALLED_S, Listeners, StatusFeed, status_events
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import ROLES, Role
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import (
    UPLOAD_HEADER,
    WORKER_HEADER,
    AccessTokenRole,
    BanOrder,
    Curves,
    EvaluationNotice,
    EventEntry,
    EventPage,
    InviteReply,
    LeaseReply,
    LeaseRequest,
    Message,
    ModelManifest,
    OrderReply,
    Page,
    Received,
    RollbackOrder,
    RunInfo,
    UpdateNotice,
    UpdateReceipt,
    Wait,
)

DEFAULT_RATE = Rate.per_second(300)  # generous: hundreds of workers may share one address and one access token
BODY_LIMIT = BodyLimit(max_bytes=2**20, max_upload_bytes=2**40, length_required=True)  # intake.py limits each upload
SENDERS: tuple[Role, ...] = ("worker", "admin")  # who may send a body
READY_S = 2.0  # for the ledger to answer
LONGEST_WAIT_S = 10.0  # for a lease request when there is no work
RETRY_LEASE_S = 1.0  # another coordinator of the same ledger cannot wake this one, so it looks this often
PREFER_WAIT = re.compile(r"\bwait=([0-9]{1,5})\b")
PREFER_REDIRECT = re.compile(r"\bredirect\b")
RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{0,15})")
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
LeaseId = Annotated[str, Path(min_length=1, max_length=100)]
BEARER = HTTPBearer(auto_error=False, description="The access token of an invite")
BYTES: dict[str, Any] = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
METRICS: dict[str, Any] = {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}}
BLOB_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The whole blob", **BYTES},
    206: {"description": "The bytes of the Range", **BYTES},
    307: {"description": "The same bytes in a bucket, for a while; only with Prefer: redirect"},
}


def build_service(
    coordinator: Coordinator,
    ledger: Ledger,
    rate: Rate | None = None,
    clock: Callable[[], float] = time.monotonic,
    invite: Invite | None = None,
) -> FastAPI:
    """`rate` limits the requests with one access token from one address. `invite` is the invite for workers, which
    admins can read and pass on. `clock` measures rates and waiting times."""
    service = FastAPI(title="BlockTrain coordinator", version="1", docs_url=None, redoc_url=None)
    end_on_shutdown(service, coordinator.bell.end)
    answers, access = Answers(), Access(ledger)
    service.add_middleware(
        Middleware,
        body=BODY_LIMIT,
        checks=[limit_rate(rate or DEFAULT_RATE, clock)],
        authorize=access.before_body,
        render=render_refusal,
        count=answers.count,
    )
    add_error_handlers(service)

    _add_health_routes(service, ledger)
    any_role = Depends(access.require(*ROLES))
    _add_worker_routes(service, coordinator, [Depends(access.require(*SENDERS))], clock)
    _add_model_routes(service, coordinator, [any_role])
    _add_status_routes(service, coordinator.watching, answers, any_role)
    _add_stream_routes(service, coordinator.watching, ledger, any_role)
    _add_admin_routes(service, coordinator, ledger, invite, [Depends(access.require("admin"))])
    add_page(service, DASHBOARD)
    return service


def _add_health_routes(service: FastAPI, ledger: Ledger) -> None:
    """For supervisors of containers. A restart repairs no database, so a process that answers is healthy."""
    asking: set[asyncio.Future[Any]] = set()

    @service.get("/healthz", responses=problems_without_token())
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @service.get("/readyz", responses=problems_without_token(503))
    async def readyz() -> dict[str, str]:
        """One question to the ledger at a time, however many ask: threads that wait for it stay few."""
        if not asking:
            asked = asyncio.ensure_future(run_in_threadpool(ledger.run))
            asking.add(asked)
            asked.add_done_callback(asking.discard)
        done, _ = await asyncio.wait(asking, timeout=READY_S)
        if not done:
            raise LedgerUnavailable(f"the ledger did not answer in {READY_S:g} s: try again")
        for each in done:
            each.result()
        return {"status": "ok"}


def _add_worker_routes(
    service: FastAPI, coordinator: Coordinator, role: Sequence[Any], clock: Callable[[], float]
) -> None:
    """Leases, uploads and results."""
    intake = coordinator.intake

    @service.post("/v1/leases", dependencies=role, response_model=LeaseReply, responses=problems(409, 422, 426))
    async def lease(request: Request, asked: LeaseRequest, prefer: Annotated[str, Header()] = "") -> Response:
        """With `Prefer: wait=2` (RFC 7240) the answer comes as soon as there is work, at the latest after 2 s."""
        match = PREFER_WAIT.search(prefer)
        wait_s = min(float(match[1]), LONGEST_WAIT_S) if match else 0.0
        return _json(await _lease_or_wait(coordinator, asked, request, wait_s, clock))

    @service.get("/v1/leases/{lease_id}/uploads/{sha256}", dependencies=role, responses=problems(404, 422))
    def received(
        request: Request,
        response: Response,
        lease_id: LeaseId,
        sha256: Digest,
        size: Annotated[int | None, Query(ge=1, lt=2**53)] = None,
        prefer: Annotated[str, Header()] = "",
    ) -> Received:
        """With `?size=` and `Prefer: redirect`, a header names the URL for the bytes if workers may write directly."""
        arrived, token = intake.received(lease_id, sha256), request.headers.get("authorization", "")
        if size is not None and not arrived and PREFER_REDIRECT.search(prefer):
            url = intake.upload_url(lease_id, sha256, size, token)
            response.headers.update({} if url is None else {UPLOAD_HEADER: url, "Cache-Control": "no-store"})
        return Received(received=arrived)

    @service.put(
        "/v1/leases/{lease_id}/uploads/{sha256}",
        dependencies=role,
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
        announced, token = int(request.headers.get("content-length", "0")), request.headers.get("authorization", "")
        await run_in_threadpool(intake.expect, lease_id, offset + announced, size, token)
        with coordinator.blobs.receiving() as part:
            with suppress(ClientDisconnect):  # what came before the connection broke is kept
                async for chunk in request.stream():
                    part.write(chunk)
            received = await run_in_threadpool(intake.receive, lease_id, sha256, offset, size, part, token)
        return _json(Received(received=received))

    @service.post("/v1/updates", dependencies=role, response_model=UpdateReceipt, responses=problems(404, 409, 422))
    def update(notice: UpdateNotice) -> Response:
        return _json(coordinator.update(notice))

    @service.post("/v1/evaluations", dependencies=role, status_code=204, responses=problems(404, 422))
    def evaluation(notice: EvaluationNotice) -> None:
        intake.evaluation(notice)


def _json(message: Message) -> Response:
    """For the answers of every round. A message is validated when it is made; returned as it is, FastAPI would validate
    it again, in another thread."""
    return Response(message.model_dump_json(), media_type="application/json")


async def _lease_or_wait(
    coordinator: Coordinator, asked: LeaseRequest, request: Request, wait_s: float, clock: Callable[[], float]
) -> LeaseReply:
    """A worker that disconnects while it waits gets no lease, because its round would wait for it."""
    bell, end_at_s, admitted = coordinator.bell, clock() + wait_s, False
    token = request.headers.get("authorization", "").partition(" ")[2].strip()
    while True:
        rung = bell.rung
        reply = await run_in_threadpool(coordinator.lease, asked, admitted, token)
        left_s, admitted = end_at_s - clock(), True
        if not wait_s or not isinstance(reply, Wait):
            return reply
        if left_s <= 0 or bell.ended:
            return reply.model_copy(update={"seconds": 0.0})
        await bell.after(rung, min(left_s, RETRY_LEASE_S))
        if await request.is_disconnected():
            return reply


def _add_model_routes(service: FastAPI, coordinator: Coordinator, role: Sequence[Any]) -> None:
    """The run and its newest model."""

    @service.get("/v1/run", dependencies=role, responses=problems())
    def run() -> RunInfo:
        return coordinator.info()

    @service.get("/v1/manifest", dependencies=role, responses=problems())
    def manifest() -> ModelManifest:
        return coordinator.manifest()

    @service.get(
        "/v1/blobs/{sha256}",
        dependencies=role,
        response_class=Response,
        responses={**BLOB_ANSWERS, **problems(404, 416, 422)},
    )
    def blob(
        request: Request,
        sha256: Digest,
        range: Annotated[str | None, Header()] = None,
        prefer: Annotated[str, Header()] = "",
    ) -> Response:
        """With `Prefer: redirect` the answer may be the URL of the same bytes in the coordinator's bucket."""
        if PREFER_REDIRECT.search(prefer) and (url := coordinator.blobs.download_url(sha256)) is not None:
            coordinator.blobs.size(sha256)  # 404 if it is not there
            return Response(status_code=307, headers={"Location": url, "Cache-Control": "no-store"})
        named = request.headers.get(WORKER_HEADER, "")
        worker = named if re.fullmatch("[0-9a-f]{64}", named) else None
        return _blob_response(
            coordinator.blobs, sha256, range, partial(coordinator.watching.traffic.sent, worker=worker)
        )


def _add_status_routes(service: FastAPI, watching: Watching, answers: Answers, any_role: Any) -> None:
    """The state of the run, for people, dashboards and Prometheus. Only admins see the names of workers."""

    @service.get("/v1/status", responses=problems())
    def status(role: Role = any_role) -> dict[str, Any]:
        return status_for(role, watching.status())

    @service.get("/v1/events", dependencies=[any_role], responses=problems(422))
    def events(page: Annotated[EventPage, Query()]) -> list[EventEntry]:
        return watching.events(page)

    @service.get("/v1/curves", dependencies=[any_role], responses=problems())
    def curves() -> Curves:
        return watching.curves()

    @service.get("/v1/contributions", responses=problems(422))
    def contributions(page: Annotated[Page, Query()], role: Role = any_role) -> list[dict[str, Any]]:
        return contributions_for(role, watching.contributions(page))

    @service.get("/metrics", dependencies=[any_role], response_class=Response, responses={200: METRICS, **problems()})
    def metrics() -> Response:
        return Response(exposition(watching.status(), answers), media_type=METRICS_TYPE)


def _add_stream_routes(service: FastAPI, watching: Watching, ledger: Ledger, any_role: Any) -> None:
    """The status as it changes, and the role of the access token."""
    feed = StatusFeed(watching)
    service.state.listeners = listeners = Listeners()
    end_on_shutdown(service, listeners.end)

    @service.get("/v1/role", responses=problems())
    def role(role: Role = any_role) -> AccessTokenRole:
        return AccessTokenRole(role=role)

    @service.get("/v1/stream", include_in_schema=False)  # OpenAPI cannot describe endless answers
    async def stream(
        given: Annotated[HTTPAuthorizationCredentials, Security(BEARER)], role: Role = any_role
    ) -> Response:
        listeners.enter()
        events = status_events(feed, listeners, role, lambda: ledger.role_of(given.credentials) == role)
        return EventStream(events, stalled_s=STALLED_S, on_end=listeners.leave)


def _add_admin_routes(
    service: FastAPI, coordinator: Coordinator, ledger: Ledger, invite: Invite | None, role: Sequence[Any]
) -> None:

    @service.get("/v1/invite", dependencies=role, responses=problems(404))
    def show_invite() -> InviteReply:
        if invite is None or ledger.role_of(invite.access_token) != "worker":
            remedy = "make one with blocktrain token add"
            raise RequestRefused(f"the invite for workers is missing or revoked: {remedy}", code="invite")
        return InviteReply(invite=str(invite))

    @service.post("/v1/pause", dependencies=role, status_code=204, responses=problems())
    def pause() -> None:
        coordinator.pause(True)

    @service.post("/v1/bans", dependencies=role, responses=problems(422))
    def ban(order: BanOrder) -> OrderReply:
        return OrderReply(done=coordinator.ban(order))

    @service.post("/v1/rollbacks", dependencies=role, responses=problems(422))
    def rollback(order: RollbackOrder) -> OrderReply:
        return OrderReply(done=coordinator.roll_back(order))

    @service.post("/v1/resume", dependencies=role, status_code=204, responses=problems())
    def resume() -> None:
        coordinator.pause(False)


class Access:
    """The role of a request's access token, read from the ledger once per request."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def before_body(self, scope: Scope, headers: Headers) -> None:
        """A request that may have a body needs an access token that may send one: its body is read only then."""
        if scope["method"] in ("GET", "HEAD"):
            return  # no such route reads a body
        scheme, _, token = headers.get("authorization", "").partition(" ")
        role = await self._role_of(token.strip()) if scheme.lower() == "bearer" else None
        scope.setdefault("state", {})["role"] = _checked(role, SENDERS)

    def require(self, *roles: Role) -> Callable[..., Coroutine[Any, Any, Role]]:
        async def check(
            request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]
        ) -> Role:
            known: Role | None = getattr(request.state, "role", None)
            return _checked(known or (await self._role_of(given.credentials) if given else None), roles)

        return check

    async def _role_of(self, access_token: str) -> Role | None:
        return await run_in_threadpool(self._ledger.role_of, access_token)


def _checked(role: Role | None, roles: Sequence[Role]) -> Role:
    if role is None:
        message = "the access token is unknown or revoked: ask the operator of the swarm for an invite"
        raise RequestRefused(message, "token")
    if role not in roles:
        message = f"an access token of role {role} may not do this: ask for one of role {roles[0]}"
        raise RequestRefused(message, "role")
    return role


def _blob_response(blobs: Blobs, sha256: str, range: str | None, sent: Callable[[int], None]) -> Response:
    """The whole blob or one Range of it. A blob never changes, so its hash is its ETag. `sent` counts the bytes."""
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
    with own_blobs():  # it is there: that it is damaged is not the caller's fault
        data = blobs.stream(sha256, first, last + 1)

    def chunks() -> Iterator[bytes]:
        for chunk in data:
            sent(len(chunk))
            yield chunk

    return StreamingResponse(chunks(), status, headers, "application/octet-stream")
