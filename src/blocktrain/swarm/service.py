"""The coordinator over HTTP: a route decodes, asks the coordinator, encodes. Roles, sizes and the shape of errors are
settled here, decisions are not. Next: coordinator.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Path, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from blocktrain.errors import (
    BlobError,
    BlockTrainError,
    LedgerConflict,
    LedgerUnavailable,
    RequestRefused,
    StorageError,
    UploadError,
)
from blocktrain.swarm.coordinator import Coordinator
from blocktrain.swarm.ledger import Ledger
from blocktrain.swarm.ledger_records import Role
from blocktrain.wire.messages import (
    EvaluationNotice,
    LeaseReply,
    LeaseRequest,
    ModelManifest,
    Page,
    Problem,
    Received,
    RunInfo,
    UpdateNotice,
    UpdateReceipt,
)

MAX_PART_BYTES = 16 * 2**20
MAX_MESSAGE_BYTES = 2**20
MAX_PROBLEM_CHARACTERS = 1000
STATUS = {
    "token": 401,
    "role": 403,
    "signature": 403,
    "owner": 403,
    "lease": 404,
    "blob": 404,
    "stale": 409,
    "reported": 409,
    "copied": 409,
    "offset": 409,
    "truncated": 409,
    "conflict": 409,
    "oversized": 413,
    "range": 416,
    "protocol": 426,
}
RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{0,15})")
MEANING = {
    401: "The token is unknown or revoked",
    403: "The token's role, the signature or the lease is another's",
    404: "There is no such thing",
    409: "It does not fit what is recorded by now",
    411: "The body's length was not announced",
    413: "More bytes than are accepted; they were not read",
    416: "No such bytes in the blob",
    422: "Understood, and cannot be accepted",
    426: "Another version of the protocol is spoken here",
    503: "Not now: try again",
}
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
LeaseId = Annotated[str, Path(min_length=1, max_length=100)]
BEARER = HTTPBearer(auto_error=False, description="The token of an invite")
BYTES: dict[str, Any] = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
BLOB_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The whole", **BYTES},
    206: {"description": "The bytes of the Range", **BYTES},
}


def build_service(coordinator: Coordinator, ledger: Ledger) -> FastAPI:
    service = FastAPI(title="BlockTrain coordinator", version="1", docs_url="/docs", redoc_url=None)
    service.add_middleware(_Bounded)
    service.add_exception_handler(BlockTrainError, _refused)
    service.add_exception_handler(RequestValidationError, _malformed)
    service.add_exception_handler(HTTPException, _unknown)
    worker, viewer = Depends(_needs(ledger, "worker", "admin")), Depends(_needs(ledger, "worker", "viewer", "admin"))

    @service.get("/healthz", responses=_problems(411, 413))
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @service.get("/v1/run", dependencies=[viewer], responses=_problems())
    def run() -> RunInfo:
        return coordinator.info()

    @service.post("/v1/leases", dependencies=[worker], responses=_problems(422, 426))
    def lease(request: LeaseRequest) -> LeaseReply:
        return coordinator.lease(request)

    @service.get("/v1/leases/{lease_id}/uploads/{sha256}", dependencies=[worker], responses=_problems(404, 422))
    def received(lease_id: LeaseId, sha256: Digest) -> Received:
        return Received(received=coordinator.received(lease_id, sha256))

    @service.put(
        "/v1/leases/{lease_id}/uploads/{sha256}",
        dependencies=[worker],
        responses=_problems(404, 409, 422),
        openapi_extra={"requestBody": {"required": True, **BYTES}},
    )
    async def receive(
        lease_id: LeaseId,
        sha256: Digest,
        offset: Annotated[int, Query(ge=0, lt=2**53)],
        size: Annotated[int, Query(ge=1, lt=2**53)],
        request: Request,
    ) -> Received:
        announced = int(request.headers.get("content-length", "0"))
        await run_in_threadpool(coordinator.expect, lease_id, offset + announced, size)
        data = await request.body()
        return Received(received=await run_in_threadpool(coordinator.receive, lease_id, sha256, offset, size, data))

    @service.post("/v1/updates", dependencies=[worker], responses=_problems(404, 409, 422))
    def update(notice: UpdateNotice) -> UpdateReceipt:
        return coordinator.update(notice)

    @service.post("/v1/evaluations", dependencies=[worker], status_code=204, responses=_problems(404, 422))
    def evaluation(notice: EvaluationNotice) -> None:
        coordinator.evaluation(notice)

    @service.get(
        "/v1/blobs/{sha256}",
        dependencies=[viewer],
        response_class=Response,
        responses={**BLOB_ANSWERS, **_problems(404, 416, 422)},
    )
    def blob(sha256: Digest, range: Annotated[str | None, Header()] = None) -> Response:
        return _blob(coordinator, sha256, range)

    @service.get("/v1/manifest", dependencies=[viewer], responses=_problems())
    def manifest() -> ModelManifest:
        return coordinator.manifest()

    @service.get("/v1/status", dependencies=[viewer], responses=_problems())
    def status() -> dict[str, Any]:
        return coordinator.status()

    @service.get("/v1/contributions", dependencies=[viewer], responses=_problems(422))
    def contributions(page: Annotated[Page, Query()]) -> list[dict[str, Any]]:
        return [asdict(contribution) for contribution in ledger.contributions(page.after)]

    return service


def _problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the schema: the refusals that a route has of its own, and those that every route with a token has."""
    common = () if statuses == (411, 413) else (401, 403, 411, 413, 503)
    return {status: {"model": Problem, "description": MEANING[status]} for status in sorted({*common, *statuses})}


def _needs(ledger: Ledger, *roles: Role) -> Callable[..., None]:
    def check(given: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]) -> None:
        role = ledger.role_of(given.credentials) if given else None
        if role is None:
            raise RequestRefused("the token is unknown or revoked: ask whoever runs the swarm for an invite", "token")
        if role not in roles:
            raise RequestRefused(f"a token of role {role} may not do this: ask for one of role {roles[0]}", "role")

    return check


def _blob(coordinator: Coordinator, sha256: str, range: str | None) -> Response:
    """The whole, or the bytes of one Range; content-addressed, so its name is its ETag and it never changes."""
    size = coordinator.blob_size(sha256)
    headers = {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes", "Cache-Control": "immutable, max-age=31536000"}
    if range is None:
        return Response(coordinator.blob_range(sha256, 0, size), 200, headers, "application/octet-stream")
    match = RANGE.fullmatch(range)
    first, last = (int(match[1]), min(int(match[2] or size), size - 1)) if match else (size, 0)
    if first > last:
        raise RequestRefused(
            f"Range {range[:40]} does not fit a blob of {size} bytes: ask for bytes=a-b in it", "range"
        )
    headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    return Response(coordinator.blob_range(sha256, first, last + 1), 206, headers, "application/octet-stream")


class _Bounded:
    """Refuses what is too large before reading it. Plain ASGI: the decorator for functions costs every request two
    tasks and a stream, about as much as the whole of a small route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = _too_large(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)


def _too_large(method: str, headers: Headers) -> Response | None:
    limit = MAX_PART_BYTES if method == "PUT" else MAX_MESSAGE_BYTES
    announced = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not re.fullmatch("[0-9]+", announced):
        message = "the body's length was not announced: send it with a Content-Length"
        return _answer(411, Problem(code="length", message=message, retry=False))
    if len(announced) > 15 or int(announced) > limit:
        message = f"a body of {announced[:20]} bytes was announced, at most {limit} are read: send less, or in parts"
        return _answer(413, Problem(code="oversized", message=message, retry=False))
    return None


def _refused(request: Request, error: Exception) -> Response:
    retry = isinstance(error, LedgerUnavailable | StorageError)
    code = error.code if isinstance(error, RequestRefused) else _code(error)
    status = 503 if retry else STATUS.get(code, 422)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return _answer(status, Problem(code=code, message=str(error), retry=retry), headers)


def _code(error: Exception) -> str:
    """What programs call an error that is no RequestRefused."""
    names = {UploadError: "offset", BlobError: "blob", LedgerConflict: "conflict"}
    return names.get(type(error), "unavailable" if isinstance(error, LedgerUnavailable | StorageError) else "refused")


def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return _answer(422, Problem(code="malformed", message=f"{where}: {first['msg']}: mend the request", retry=False))


def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:  # what a JSON parser gives up on
        return _answer(422, Problem(code="malformed", message=f"{error.detail}: mend the request", retry=False))
    code = "method" if error.status_code == 405 else "unknown"
    message = f"{request.method} {request.url.path[:80]}: {error.detail}: see /docs for what there is"
    return _answer(error.status_code, Problem(code=code, message=message, retry=False), error.headers)


def _answer(status: int, problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """A message may quote what was sent, so it is bounded and made text that every encoding knows."""
    message = problem.message[:MAX_PROBLEM_CHARACTERS].encode("utf-8", "replace").decode()
    return JSONResponse({**problem.model_dump(), "message": message}, status, headers)
