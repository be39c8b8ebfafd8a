"""The coordinator's HTTP API. A route decodes the request, calls the coordinator and encodes the answer. Routes check
the role of the access token; they decide nothing else.
Next: coordinator.py, the decisions; http/middleware.py, around all routes; refusals.py, how errors look."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from blocktrain.http.middleware import BodyLimit, Middleware, limit_rate
from blocktrain.http.pages import DASHBOARD, add_page
from blocktrain.http.rate_limit import Rate
from blocktrain.http.server import end_on_shutdown
from blocktrain.swarm.coordinator.api.access import SENDERS, Access
from blocktrain.swarm.coordinator.api.downloads import BYTES, PREFER_REDIRECT, Digest, add_model_routes
from blocktrain.swarm.coordinator.api.people import (
    add_admin_routes,
    add_health_routes,
    add_status_routes,
    add_stream_routes,
)
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.intake import require_announced
from blocktrain.swarm.coordinator.refusals import (
    add_error_handlers,
    problems,
    render_refusal,
)
from blocktrain.swarm.coordinator.waiting import WaitingRequest
from blocktrain.swarm.coordinator.watching.leaderboard import Leaderboard, add_leaderboard, limit_public
from blocktrain.swarm.coordinator.watching.metrics import Answers
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import ROLES
from blocktrain.wire.attached import HOLDS_HEADER, MEDIA_TYPE, Held
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import (
    NO_NUL,
    UPLOAD_HEADER,
    EvaluationNotice,
    LeaseReply,
    LeaseRequest,
    Message,
    Received,
    TrainLease,
    UpdateNotice,
    UpdateReceipt,
    VetNotice,
)

DEFAULT_RATE = Rate.per_second(300)  # generous: hundreds of workers may share one address and one access token
BODY_LIMIT = BodyLimit(  # intake.py limits each upload; a message with many wrong fields takes long to refuse
    max_bytes=2**20,
    max_upload_bytes=2**40,
    length_required=True,
    of_path={"/v1/leases": 2**14, "/v1/vettings": 2**14},
)
MAX_NOTICE_BYTES = 2**20
LeaseId = Annotated[str, Path(min_length=1, max_length=100, pattern=NO_NUL)]


def build_service(
    coordinator: Coordinator,
    ledger: Ledger,
    rate: Rate | None = None,
    clock: Callable[[], float] = time.monotonic,
    invite: Invite | None = None,
    leaderboard: Leaderboard | None = None,
) -> FastAPI:
    """`rate` limits the requests with one access token from one address. `invite` is the invite for workers, which
    admins can read and pass on. `leaderboard` is shown to everybody. `clock` measures rates and waiting times."""
    service = FastAPI(title="BlockTrain coordinator", version="1", docs_url=None, redoc_url=None)
    end_on_shutdown(service, coordinator.bell.end)
    answers, access = Answers(), Access(ledger)
    service.add_middleware(
        Middleware,
        body=BODY_LIMIT,
        checks=[limit_rate(rate or DEFAULT_RATE, clock), limit_public(clock)],
        authorize=access.before_body,
        render=render_refusal,
        count=answers.count,
    )
    add_error_handlers(service)

    add_health_routes(service, ledger)
    any_role = Depends(access.require(*ROLES))
    worker = [Depends(access.require(*SENDERS))]
    _add_lease_route(service, coordinator, worker, clock)
    _add_upload_routes(service, coordinator, worker)
    _add_result_routes(service, coordinator, worker)
    add_model_routes(service, coordinator, [any_role])
    add_status_routes(service, coordinator.watching, coordinator.history, answers, any_role)
    add_stream_routes(service, coordinator.watching, ledger, any_role)
    add_admin_routes(service, coordinator, ledger, invite, [Depends(access.require("admin"))])
    add_page(service, DASHBOARD)
    if leaderboard is not None:
        add_leaderboard(service, leaderboard)
    return service


def _add_lease_route(
    service: FastAPI, coordinator: Coordinator, role: Sequence[Any], clock: Callable[[], float]
) -> None:
    leases = APIRouter(route_class=_LeaseRoute)

    @leases.post(
        "/v1/leases",
        dependencies=role,
        response_model=LeaseReply,
        responses={200: BYTES, **problems(409, 422, 426)},
    )
    async def lease(asked: LeaseRequest, request: Request, prefer: Annotated[str, Header()] = "") -> Response:
        """With `Prefer: wait=2` (RFC 7240) the answer comes as soon as there is work, at the latest after 2 s. With
        `BlockTrain-Holds`, small blobs that a lease names and the worker lacks come with it."""
        reply, body = await _lease_or_wait(coordinator, asked, request, prefer, clock)
        return _json(reply) if body is None else Response(body, media_type=MEDIA_TYPE)

    service.include_router(leases)


def _add_upload_routes(service: FastAPI, coordinator: Coordinator, role: Sequence[Any]) -> None:
    """The bytes of an update, in parts."""
    intake = coordinator.intake

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
            url = intake.upload_url(lease_id, size, token)
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


def _add_result_routes(service: FastAPI, coordinator: Coordinator, role: Sequence[Any]) -> None:
    """What a lease ends with: an update, an evaluation or a vetting."""
    intake = coordinator.intake

    @service.post("/v1/updates", dependencies=role, response_model=UpdateReceipt, responses=problems(404, 409, 422))
    def update(notice: UpdateNotice) -> Response:
        return _json(coordinator.update(notice))

    @service.put(
        "/v1/updates",
        dependencies=role,
        response_model=UpdateReceipt,
        responses=problems(400, 404, 409, 422),
        openapi_extra={"requestBody": {"required": True, **BYTES}},
    )
    async def whole_update(request: Request, notice: Annotated[int, Query(ge=1, le=MAX_NOTICE_BYTES)]) -> Response:
        """A notice of so many bytes and, right after it, the payload. Of a broken connection nothing is kept."""
        token, body = request.headers.get("authorization", ""), request.stream()
        with coordinator.blobs.receiving() as part:
            try:
                told, payload = await _notice_of(body, notice)
                expected = int(request.headers.get("content-length", "0")) - notice
                require_announced(told.payload, expected)
                await run_in_threadpool(intake.expect, told.lease, expected, expected, token)
                part.write(payload)
                async for chunk in body:
                    part.write(chunk)
            except ClientDisconnect:
                return Response(status_code=400)
            return _json(await run_in_threadpool(coordinator.update, told, part))

    @service.post("/v1/evaluations", dependencies=role, status_code=204, responses=problems(404, 422))
    def evaluation(notice: EvaluationNotice) -> None:
        intake.evaluation(notice)

    @service.post("/v1/vettings", dependencies=role, status_code=204, responses=problems(404, 422))
    def vetting(notice: VetNotice) -> None:
        coordinator.vetted(notice)


class _LeaseRoute(APIRoute):
    """Calls the endpoint with the request's message and its Prefer header. For any endpoint, FastAPI finds out what it
    takes at every request: a fifth of a lease's processor time. The middleware has checked the access token's role."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def handle(request: Request) -> Response:
            try:
                asked = LeaseRequest.model_validate_json(await request.body())
            except ClientDisconnect:
                return Response(status_code=400)
            except ValidationError as error:
                raise RequestValidationError(
                    [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
                ) from None
            response: Response = await self.endpoint(asked, request, request.headers.get("prefer", ""))
            return response

        return handle


async def _notice_of(body: AsyncIterator[bytes], num_bytes: int) -> tuple[UpdateNotice, bytes]:
    """The notice at the beginning of a body, and what has come with it of the rest."""
    begun = bytearray()
    async for chunk in body:
        begun += chunk
        if len(begun) >= num_bytes:
            break
    try:
        return UpdateNotice.model_validate_json(begun[:num_bytes]), bytes(begun[num_bytes:])
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def _json(message: Message) -> Response:
    """For the answers of every round. A message is validated when it is made; returned as it is, FastAPI would validate
    it again, in another thread."""
    return Response(message.model_dump_json(), media_type="application/json")


async def _lease_or_wait(
    coordinator: Coordinator, asked: LeaseRequest, request: Request, prefer: str, clock: Callable[[], float]
) -> tuple[LeaseReply, bytes | None]:
    """The reply, and the same with blobs if it comes with some. A worker that disconnects while it waits gets no lease,
    because its round would wait for it."""
    token, holds = request.headers.get("authorization", "").partition(" ")[2].strip(), request.headers.get(HOLDS_HEADER)
    waiting = WaitingRequest(coordinator, asked, prefer, clock, token)

    def ask() -> tuple[LeaseReply, bytes | None]:
        reply = waiting.ask()
        if holds is None or not isinstance(reply, TrainLease):
            return reply, None
        return reply, coordinator.with_blobs(reply, Held.parse(holds), asked.worker)

    while True:
        answer = await run_in_threadpool(ask)
        if waiting.ask_again_in_s is None:
            return answer
        await coordinator.bell.after(waiting.rung, waiting.ask_again_in_s)
        if await request.is_disconnected():
            return answer
