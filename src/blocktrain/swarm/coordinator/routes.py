"""The coordinator's HTTP API. A route decodes the request, calls the coordinator and encodes the answer. Routes check
the role of the access token; they decide nothing else.
Next: coordinator.py, the decisions; http/middleware.py, around all routes; refusals.py, how errors look."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

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
from blocktrain.swarm.coordinator.api.waiting import WaitingRequest
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.intake import require_announced
from blocktrain.swarm.coordinator.refusals import (
    add_error_handlers,
    problems,
    render_refusal,
)
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
from blocktrain.wire.safetensors import Encoded

DEFAULT_RATE = Rate.per_second(300)  # generous: hundreds of workers may share one address and one access token
BODY_LIMIT = BodyLimit(  # intake.py limits each upload; a message with many wrong fields takes long to refuse
    max_bytes=2**20,
    max_upload_bytes=2**40,
    length_required=True,
    of_path={"/v1/leases": 2**14, "/v1/vettings": 2**14},
)
MAX_NOTICE_BYTES = 2**20
NOTICE_BYTES = re.compile("[0-9]{1,7}")
ASKED = {"content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{LeaseRequest.__name__}"}}}}
PREFER = {"name": "prefer", "in": "header", "schema": {"type": "string"}}
NOTICE = {
    "name": "notice",
    "in": "query",
    "required": True,
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_NOTICE_BYTES},
}
Asked = TypeVar("Asked", bound=Message)
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
    direct = dict[tuple[str, str], ASGIApp]()
    answers, access = Answers(), Access(ledger, direct)
    service.add_middleware(
        Middleware,
        direct=direct,
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
    _add_lease_route(service, coordinator, access, worker, clock)
    _add_upload_routes(service, coordinator, worker)
    _add_update_route(service, coordinator, access, worker)
    _add_result_routes(service, coordinator, worker)
    own = [route for route in service.routes if isinstance(route, _OwnRoute)]
    direct |= {(method, route.path): route.alone for route in own for method in route.methods or ()}
    add_model_routes(service, coordinator, [any_role])
    add_status_routes(service, coordinator.watching, coordinator.history, answers, any_role)
    add_stream_routes(service, coordinator.watching, ledger, any_role)
    add_admin_routes(service, coordinator, ledger, invite, [Depends(access.require("admin"))])
    add_page(service, DASHBOARD)
    if leaderboard is not None:
        add_leaderboard(service, leaderboard)
    return service


def _add_lease_route(
    service: FastAPI, coordinator: Coordinator, access: Access, role: Sequence[Any], clock: Callable[[], float]
) -> None:
    async def lease(request: Request) -> Response:
        """With `Prefer: wait=2` (RFC 7240) the answer comes as soon as there is work, at the latest after 2 s. With
        `BlockTrain-Holds`, small blobs that a lease names and the worker lacks come with it."""
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=400)

        def admitted() -> WaitingRequest:
            access.require_sender(request.headers)
            asked, token = _read(LeaseRequest, body, "body"), request.headers.get("authorization", "")
            prefer = request.headers.get("prefer", "")
            return WaitingRequest(coordinator, asked, prefer, clock, token.partition(" ")[2].strip())

        reply, chunks = await _lease_or_wait(coordinator, admitted, request)
        return _json(reply) if chunks is None else _Chunks(chunks, MEDIA_TYPE)

    service.router.add_api_route(
        "/v1/leases",
        lease,
        methods=["POST"],
        dependencies=role,
        response_model=LeaseReply,
        responses={200: BYTES, **problems(409, 422, 426)},
        openapi_extra={"parameters": [PREFER], "requestBody": {"required": True, **ASKED}},
        route_class_override=_OwnRoute,
    )


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


def _add_update_route(service: FastAPI, coordinator: Coordinator, access: Access, role: Sequence[Any]) -> None:
    """An update in one request."""
    intake = coordinator.intake

    async def whole_update(request: Request) -> Response:
        """A notice of so many bytes and, right after it, the payload. Of a broken connection nothing is kept."""
        text_bytes, token = request.query_params.get("notice", ""), request.headers.get("authorization", "")
        num_bytes, body = int(text_bytes) if NOTICE_BYTES.fullmatch(text_bytes) else 0, request.stream()
        expected = int(request.headers.get("content-length", "0")) - num_bytes

        def admitted(text: bytes) -> UpdateNotice:
            access.require_sender(request.headers)
            if not 1 <= num_bytes <= MAX_NOTICE_BYTES:
                raise RequestValidationError([{"loc": ("query", "notice"), "msg": f"not 1 to {MAX_NOTICE_BYTES}"}])
            told = _read(UpdateNotice, text)
            require_announced(told.payload, expected)
            intake.expect(told.lease, expected, expected, token)
            return told

        try:
            begun = await _beginning(body, num_bytes if num_bytes <= MAX_NOTICE_BYTES else 0)  # it will be refused
            told = await run_in_threadpool(admitted, begun[:num_bytes])
            with coordinator.blobs.receiving() as part:
                part.write(begun[num_bytes:])
                async for chunk in body:
                    part.write(chunk)
                return _json(await run_in_threadpool(coordinator.update, told, part))
        except ClientDisconnect:
            return Response(status_code=400)

    service.router.add_api_route(
        "/v1/updates",
        whole_update,
        methods=["PUT"],
        dependencies=role,
        response_model=UpdateReceipt,
        responses=problems(400, 404, 409, 422),
        openapi_extra={"parameters": [NOTICE], "requestBody": {"required": True, **BYTES}},
        route_class_override=_OwnRoute,
    )


def _add_result_routes(service: FastAPI, coordinator: Coordinator, role: Sequence[Any]) -> None:
    """What a lease ends with: an update, an evaluation or a vetting."""
    intake = coordinator.intake

    @service.post("/v1/updates", dependencies=role, response_model=UpdateReceipt, responses=problems(404, 409, 422))
    def update(notice: UpdateNotice) -> Response:
        return _json(coordinator.update(notice))

    @service.post("/v1/evaluations", dependencies=role, status_code=204, responses=problems(404, 422))
    def evaluation(notice: EvaluationNotice) -> None:
        intake.evaluation(notice)

    @service.post("/v1/vettings", dependencies=role, status_code=204, responses=problems(404, 422))
    def vetting(notice: VetNotice) -> None:
        coordinator.vetted(notice)


class _OwnRoute(APIRoute):
    """A route of every round: it reads its request and checks its access token itself, so that one thread does all that
    reads the ledger. For any endpoint, FastAPI finds out at every request what it takes, after a search through all
    routes: together as long as a lease. The middleware calls `alone`; FastAPI describes the route."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint

    async def alone(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.endpoint(Request(scope, receive))
        await response(scope, receive, send)


class _Chunks(Response):
    """A body in several chunks: to join them would copy them."""

    def __init__(self, chunks: Sequence[Encoded], media_type: str) -> None:
        super().__init__(media_type=media_type, headers={"Content-Length": str(sum(map(len, chunks)))})
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _malformed(error: ValidationError, *where: str) -> RequestValidationError:
    return RequestValidationError([{**each, "loc": (*where, *each["loc"])} for each in error.errors()])


def _read(message: type[Asked], text: bytes, *where: str) -> Asked:
    try:
        return message.model_validate_json(text)
    except ValidationError as error:
        raise _malformed(error, *where) from None


async def _beginning(body: AsyncIterator[bytes], num_bytes: int) -> bytes:
    """So many bytes of a body, and what has come with them of the rest."""
    begun = bytearray()
    async for chunk in body:
        begun += chunk
        if len(begun) >= num_bytes:
            break
    return bytes(begun)


def _json(message: Message) -> Response:
    """For the answers of every round. A message is validated when it is made; returned as it is, FastAPI would validate
    it again, in another thread."""
    return Response(message.model_dump_json(), media_type="application/json")


async def _lease_or_wait(
    coordinator: Coordinator, admitted: Callable[[], WaitingRequest], request: Request
) -> tuple[LeaseReply, list[Encoded] | None]:
    """The reply, and the same with blobs if it comes with some. A worker that disconnects while it waits gets no lease,
    because its round would wait for it."""
    holds = request.headers.get(HOLDS_HEADER)

    def ask(waiting: WaitingRequest | None) -> tuple[WaitingRequest, LeaseReply, list[Encoded] | None]:
        waiting = waiting or admitted()
        reply = waiting.ask()
        if holds is None or not isinstance(reply, TrainLease):
            return waiting, reply, None
        return waiting, reply, coordinator.with_blobs(reply, Held.parse(holds), waiting.worker)

    waiting, reply, chunks = await run_in_threadpool(ask, None)
    while waiting.ask_again_in_s is not None:
        await coordinator.bell.after(waiting.rung, waiting.ask_again_in_s)
        if await request.is_disconnected():
            break
        waiting, reply, chunks = await run_in_threadpool(ask, waiting)
    return reply, chunks
