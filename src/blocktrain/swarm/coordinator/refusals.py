"""How errors look over HTTP: a status, a code for programs, a message for people, and whether trying again can help.
Next: routes.py, whose routes raise these errors; http/middleware.py, whose checks come before the routes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from blocktrain.errors import (
    BlobError,
    BlockTrainError,
    LedgerConflict,
    LedgerUnavailable,
    Overloaded,
    RequestRefused,
    StorageError,
    UploadError,
)
from blocktrain.http.middleware import CheckFailed
from blocktrain.logs import SparingLog
from blocktrain.wire.messages import LeaseRequest, Problem

_own_faults = SparingLog(__name__)
MAX_MESSAGE_CHARACTERS = 1000
STATUS = {
    "token": 401,
    "role": 403,
    "signature": 403,
    "owner": 403,
    "excluded": 403,
    "keys": 403,
    "replayed": 409,
    "lease": 404,
    "blob": 404,
    "invite": 404,
    "stale": 409,
    "reported": 409,
    "copied": 409,
    "offset": 409,
    "truncated": 409,
    "conflict": 409,
    "oversized": 413,
    "quota": 413,
    "range": 416,
    "protocol": 426,
}
WITHOUT_TOKEN = (411, 413, 429)  # what the middleware refuses on every route
MEANING = {
    400: "The connection broke",
    401: "The access token is unknown or revoked",
    403: "The access token's role does not allow this, or the signature or the lease belongs to somebody else",
    404: "Not found",
    409: "The request conflicts with what is recorded",
    411: "The Content-Length is missing",
    413: "The body is too large; it was not read",
    416: "The blob does not have these bytes",
    422: "The request is well-formed but cannot be accepted",
    426: "The coordinator speaks another version of the protocol",
    429: "Too many requests: try again after Retry-After seconds",
    503: "Not available now: try again",
}


def add_error_handlers(service: FastAPI) -> None:
    """Every error that a route raises becomes a `Problem`. The handlers are coroutines: others would need a thread, and
    there may be none when the ledger hangs."""
    service.add_exception_handler(BlockTrainError, _refused)
    service.add_exception_handler(RequestValidationError, _malformed)
    service.add_exception_handler(HTTPException, _unknown)
    describe = service.openapi

    def openapi() -> dict[str, Any]:
        schema = describe()
        for message in (Problem, LeaseRequest):  # what no route's parameters or answer names
            schema["components"]["schemas"].setdefault(message.__name__, message.model_json_schema())
        return schema

    service.openapi = openapi  # type: ignore[method-assign]


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the schema: the given statuses, and those that every route with an access token has."""
    return _described(401, 403, *WITHOUT_TOKEN, 503, *statuses)


def problems_without_token(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return _described(*WITHOUT_TOKEN, *statuses)


def _described(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """By reference: FastAPI would build a model for each status of each route, which takes most of the time that a
    service needs to start."""
    schema = {"application/json": {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}}
    return {status: {"content": schema, "description": MEANING[status]} for status in sorted({*statuses})}


def render_refusal(error: Exception) -> Response | None:
    """For the middleware. Exceptions that are not ours are defects: the server logs them and answers 500."""
    if isinstance(error, BlockTrainError):
        return _refusal(error)
    if isinstance(error, RequestValidationError):
        return _malformation(error)
    if not isinstance(error, CheckFailed):
        return None
    headers = {} if error.retry_after_s is None else {"Retry-After": str(math.ceil(error.retry_after_s))}
    return _response(error.status, error.code, str(error), retry=bool(headers), headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    return _refusal(error)


def _refusal(error: Exception) -> Response:
    if isinstance(error, StorageError):
        _own_faults.warning(str(error))  # only the operator can end it
    retry = isinstance(error, LedgerUnavailable | StorageError | Overloaded)
    code = error.code if isinstance(error, RequestRefused) else _code(error)
    status = 503 if retry else STATUS.get(code, 422)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    number = error.number if isinstance(error, RequestRefused) else None
    return _response(status, code, str(error), retry, headers, number)


def _code(error: Exception) -> str:
    """The code of an error that is not a RequestRefused."""
    names = {UploadError: "offset", BlobError: "blob", LedgerConflict: "conflict", Overloaded: "listeners"}
    return names.get(type(error), "unavailable" if isinstance(error, LedgerUnavailable | StorageError) else "refused")


async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _malformation(error)


def _malformation(error: RequestValidationError) -> Response:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return _response(422, "malformed", f"{where}: {first['msg']}: correct the request")


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:  # the JSON parser failed
        return _response(422, "malformed", f"{error.detail}: correct the request")
    code = "method" if error.status_code == 405 else "unknown"
    message = f"{request.method} {request.url.path[:80]}: {error.detail}: see /openapi.json for all routes"
    return _response(error.status_code, code, message, headers=error.headers)


def _response(
    status: int,
    code: str,
    message: str,
    retry: bool = False,
    headers: Mapping[str, str] | None = None,
    number: int | None = None,
) -> JSONResponse:
    """A message may quote what the client sent, so it is shortened and made encodable as UTF-8."""
    message = message[:MAX_MESSAGE_CHARACTERS].encode("utf-8", "replace").decode()
    problem = Problem(code=code, message=message, retry=retry, number=number)
    return JSONResponse(problem.model_dump(exclude_none=True), status, headers)
