"""The gateway: a model, wherever its blocks are, behind OpenAI's completions API, and a page to try it on. A route
decodes, has the text written, encodes. Next: order.py settles what is asked, completion.py has it written."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from importlib import resources
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Request, Response, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import Scope

from blocktrain.errors import BlockTrainError, ConfigError, Overloaded, StageUnreachable
from blocktrain.serve.chain.pipeline import Pipeline, PipelineStats
from blocktrain.serve.gateway.access import ApiKeys, RateLimit, Seats
from blocktrain.serve.gateway.border import Border, ClientGone, EventStream, error_response, unless_gone
from blocktrain.serve.gateway.completion import Writing, gather_answer, stream_answer
from blocktrain.serve.gateway.metrics import Metrics
from blocktrain.serve.gateway.openai import (
    ApiError,
    Completion,
    CompletionRequest,
    ErrorReply,
    Health,
    ModelCard,
    ModelList,
    defect,
    refusal_of,
    request_schema,
)
from blocktrain.serve.gateway.validate import Limits, modes_of, order_of, unknown_model
from blocktrain.serve.traversal import Forward, ModelInfo

log = logging.getLogger(__name__)
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
LAST_WORDS_S = 5.0  # for the event that says that the deadline has passed
FRESH_SEEDS = 2**32  # every JSON reader takes them exactly
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/playground.js": ("playground.js", "text/javascript; charset=utf-8"),
    "/page/playground.css": ("playground.css", "text/css; charset=utf-8"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
SILENT_ROUTES = {*PAGE_FILES, "/healthz", "/metrics"}  # asked all the time, and nothing happens
ROUTES = {*SILENT_ROUTES, "/v1/models", "/v1/completions"}
BEARER = HTTPBearer(auto_error=False, description="An API key of this gateway, where it has some")
MEANING = {
    400: "Not understood, or out of range: the message says what to change",
    401: "The API key is missing or unknown",
    404: "There is no such model",
    413: "The body is too large",
    415: "The body is not announced as JSON",
    421: "No API key is set, and the Host is not this machine",
    429: "Too many requests: try again after Retry-After seconds",
    500: "A defect of ours",
    503: "Blocks of the model are out of reach: try again",
    504: "It took too long",
}
JSON, GONE = "application/json", 499
EVENTS: dict[str, Any] = {"description": "The answer, or with stream = true its parts as they come"}


class GatewaySettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    api_keys: tuple[str, ...] = Field(default=(), repr=False)
    any_host: bool = False  # without keys: answer requests for whatever host name
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = Field(default=2**20, ge=1024)
    max_bytes: int = Field(default=4096, ge=1)  # of a text
    max_choices: int = Field(default=16, ge=1)  # texts of a request
    max_texts: int = Field(default=64, ge=1)  # written at once
    degraded: bool = False  # the chain may answer without blocks: that is no reason to be unwell
    requests_per_minute: int | None = Field(default=None, ge=1)  # of a key, or without keys of an address
    deadline_s: float = Field(default=300.0, gt=0)

    def model_post_init(self, context: object) -> None:
        ApiKeys(self.api_keys)  # raises on weak ones

    def limits(self) -> Limits:
        return Limits(max_bytes=self.max_bytes, max_choices=min(self.max_choices, self.max_texts))


class Gateway:
    """What the routes share."""

    def __init__(self, forward: Forward, settings: GatewaySettings, clock: Callable[[], float]) -> None:
        self.forward, self.settings, self.clock = forward, settings, clock
        self.keys, self.seats = ApiKeys(settings.api_keys), Seats(settings.max_texts)
        self.rate = RateLimit(settings.requests_per_minute, clock)
        self.metrics = Metrics(lambda: self.seats.taken, self.pipeline_stats)
        self.started_s = int(time.time())

    def admit(self, request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]) -> None:
        """By the key, where there are keys. `given` is for the schema; the header itself is what counts."""
        caller = self.keys.caller(request.headers.get("authorization"))
        request.state.caller = caller or (request.client.host if request.client else "-")

    def pipeline_stats(self) -> PipelineStats | None:
        """Where the blocks are on other hosts."""
        return self.forward.stats() if isinstance(self.forward, Pipeline) else None

    def health(self) -> Health:
        info, stats = self.forward.info, self.pipeline_stats()
        stages = stats.stages.values() if stats else ()
        reasons = [stage.diagnosis for stage in stages if not stage.alive]
        held = {block for stage in stages if stage.alive for block in stage.blocks}
        lost = sorted(set(range(info.blocks)) - held) if stats else []
        if lost:
            reasons.append(f"nobody serves block {', '.join(map(str, lost))} now: start a stage that does")
        status: Literal["ok", "degraded", "unavailable"] = "degraded" if reasons else "ok"
        if lost and not (self.settings.degraded and info.survives_loss):
            status = "unavailable"
        return Health(status=status, model=info.name, version=info.version, reasons=reasons)

    def card(self, info: ModelInfo) -> ModelCard:
        limits = self.settings.limits()
        return ModelCard(
            id=info.name,
            created=self.started_s,
            version=info.version,
            objective=info.objective,
            blocks=info.blocks,
            context=info.context,
            longest_sweep=info.longest_sweep,
            max_tokens=limits.max_bytes,
            max_choices=limits.max_choices,
            modes=modes_of(info),
        )

    async def complete(self, asked: CompletionRequest, request: Request) -> Response:
        self.rate.take(request.state.caller)
        info = self.forward.info
        order = order_of(asked, info, self.settings.limits(), fresh_seed=secrets.randbelow(FRESH_SEEDS))
        deadline_s = asyncio.get_running_loop().time() + self.settings.deadline_s
        writing = Writing(self.forward, info, order, deadline_s, self.clock)
        request.state.writing = writing
        if not order.stream:
            answer = await unless_gone(request.receive, gather_answer(writing, self.seats))
            return JSONResponse(answer.model_dump())
        events = stream_answer(writing, self.seats, failure_of)
        try:
            first = await unless_gone(request.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(first, events, deadline_s + LAST_WORDS_S)

    def report(self, scope: Scope, status: int, seconds: float) -> None:
        """After every answer. Who, what and how much, never the text."""
        route, state = scope["path"] if scope["path"] in ROUTES else "other", scope.get("state", {})
        self.metrics.answered(route, status)
        if status == GONE or state.get("gone"):
            self.metrics.client_gone()
        facts = {"method": scope["method"], "route": route, "status": status, "seconds": round(seconds, 4)}
        if caller := state.get("caller"):
            facts["caller"] = caller
        if isinstance(writing := state.get("writing"), Writing):
            self.metrics.written(writing.effort(), writing.usage())
            facts |= {"id": writing.id, **writing.effort().model_dump()}
        level = logging.DEBUG if status < 400 and route in SILENT_ROUTES else logging.INFO
        log.log(level, "%(method)s %(route)s %(status)s", facts, extra={"facts": facts})


def build_gateway(forward: Forward, settings: GatewaySettings, clock: Callable[[], float] = time.monotonic) -> FastAPI:
    gateway = Gateway(forward, settings, clock)
    app = FastAPI(title="BlockTrain gateway", version="1", docs_url=None, redoc_url=None)
    hosts = None if settings.any_host or gateway.keys else LOOPBACK
    app.add_middleware(Border, max_body_bytes=settings.max_body_bytes, hosts=hosts, report=gateway.report, clock=clock)
    if settings.cors_origins:
        origins, methods = list(settings.cors_origins), ["GET", "POST"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"])
    for kind in (BlockTrainError, HTTPException, ClientGone, TimeoutError):
        app.add_exception_handler(kind, _refused)
    _add_api(app, gateway)
    for path, (name, media_type) in PAGE_FILES.items():
        app.add_api_route(path, _file(name, media_type), include_in_schema=False)
    return app


def _add_api(app: FastAPI, gateway: Gateway) -> None:
    known = [Depends(gateway.admit)]

    @app.get("/healthz", response_model=Health, responses={503: {"model": Health}, **_errors(421)})
    async def healthz() -> Response:
        health = gateway.health()
        return JSONResponse(health.model_dump(), 503 if health.status == "unavailable" else 200)

    @app.get("/metrics", dependencies=known, response_class=Response, responses=_errors(401, 421))
    async def metrics() -> Response:
        return Response(gateway.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models", dependencies=known, responses=_errors(401, 421, 503))
    async def models() -> ModelList:
        return ModelList(data=[gateway.card(gateway.forward.info)])

    @app.get("/v1/models/{model}", dependencies=known, responses=_errors(401, 404, 421, 503))
    async def model(model: str) -> ModelCard:
        info = gateway.forward.info
        if model != info.name:
            raise unknown_model(model, info)
        return gateway.card(info)

    @app.post(
        "/v1/completions",
        dependencies=known,
        response_model=Completion,
        responses={200: {**EVENTS, "content": {"text/event-stream": {}}}, **_errors(*MEANING)},
        openapi_extra={"requestBody": {"required": True, "content": {JSON: {"schema": request_schema()}}}},
    )
    async def completions(request: Request) -> Response:
        return await gateway.complete(await _decoded(request), request)


async def _decoded(request: Request) -> CompletionRequest:
    """Read only behind the key. A web page cannot send JSON to a foreign host unasked, so nothing else is taken."""
    announced = request.headers.get("content-type", "")
    if announced.partition(";")[0].strip().lower() != JSON:
        raise ApiError(415, f'Content-Type "{announced[:80]}" is not read here: send {JSON}', "content_type")
    try:
        return CompletionRequest.model_validate_json(await request.body())
    except ValidationError as error:
        raise refusal_of(error.errors(include_url=False)) from None


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorReply, "description": MEANING[status]} for status in statuses}


def _file(name: str, media_type: str) -> Callable[[], Any]:
    data = resources.files("blocktrain.http").joinpath("static/playground", name).read_bytes()

    async def file() -> Response:
        return Response(data, media_type=media_type)

    return file


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=GONE)  # nobody reads it; logs and metrics do
    response = error_response(failure_of(error))
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


def failure_of(error: Exception) -> ApiError:
    """Whatever went wrong, as the client gets it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        message = f"{error.detail}: there is POST /v1/completions, and /openapi.json says what else"
        return ApiError(error.status_code, message, "unknown_route")
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), "overloaded", retry_after_s=error.retry_after_s)
    if isinstance(error, StageUnreachable):
        return ApiError(503, str(error), "stage_unreachable", retry_after_s=1)
    if isinstance(error, TimeoutError):
        return ApiError(504, "the text was not written in time: ask for less, or try again", "timeout")
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), "invalid_value")
    log.error("unexpected", exc_info=error)
    return defect()
