"""What a refusal looks like over HTTP: a status, a code for programs, a sentence for people, and whether to try again.
Next: service.py, whose routes refuse; doorkeeper.py, which refuses before a route is asked."""

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
from blocktrain.wire.messages import Problem

MAX_PROBLEM_CHARACTERS = 1000
STATUS = {
    "token": 401,
    "role": 403,
    "signature": 403,
    "owner": 403,
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
    "range": 416,
    "protocol": 426,
}
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
    429: "Too many requests: wait as long as Retry-After says",
    503: "Not now: try again",
}


def add_refusals(service: FastAPI) -> None:
    """Whatever a route raises becomes a refusal."""
    service.add_exception_handler(BlockTrainError, _refused)
    service.add_exception_handler(RequestValidationError, _malformed)
    service.add_exception_handler(HTTPException, _unknown)


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the schema: the refusals that a route has of its own, and those that every route with a token has."""
    common = () if statuses == (411, 413, 429) else (401, 403, 411, 413, 429, 503)
    return {status: {"model": Problem, "description": MEANING[status]} for status in sorted({*common, *statuses})}


def _refused(request: Request, error: Exception) -> Response:
    retry = isinstance(error, LedgerUnavailable | StorageError | Overloaded)
    code = error.code if isinstance(error, RequestRefused) else _code(error)
    status = 503 if retry else STATUS.get(code, 422)
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    if isinstance(error, Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return refusal(status, Problem(code=code, message=str(error), retry=retry), headers)


def _code(error: Exception) -> str:
    """What programs call an error that is no RequestRefused."""
    names = {UploadError: "offset", BlobError: "blob", LedgerConflict: "conflict", Overloaded: "listeners"}
    return names.get(type(error), "unavailable" if isinstance(error, LedgerUnavailable | StorageError) else "refused")


def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return refusal(422, Problem(code="malformed", message=f"{where}: {first['msg']}: mend the request", retry=False))


def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:  # what a JSON parser gives up on
        return refusal(422, Problem(code="malformed", message=f"{error.detail}: mend the request", retry=False))
    code = "method" if error.status_code == 405 else "unknown"
    message = f"{request.method} {request.url.path[:80]}: {error.detail}: see /openapi.json for what there is"
    return refusal(error.status_code, Problem(code=code, message=message, retry=False), error.headers)


def refusal(status: int, problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """A message may quote what was sent, so it is bounded and made text that every encoding knows."""
    message = problem.message[:MAX_PROBLEM_CHARACTERS].encode("utf-8", "replace").decode()
    return JSONResponse({**problem.model_dump(), "message": message}, status, headers)
