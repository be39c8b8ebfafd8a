"""The gateway: OpenAI's completions API and a playground page in front of a model, wherever its blocks are. A route
decodes the request, has the texts written and encodes the answer.
Next: validate.py checks a request, completion.py has it written."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Request, Response, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Scope

from blocktrain.errors import BlockTrainError, ConfigError, Overloaded, StageUnreachable
from blocktrain.http.limits import site_of
from blocktrain.http.middleware import BodyLimit, CheckFailed, Middleware, require_host
from blocktrain.http.pages import PLAYGROUND, add_page, security_headers
from blocktrain.http.rate_limit import Rate, RateLimiter
from blocktrain.http.sse import ClientDisconnected, EventStream, cancel_on_disconnect
from blocktrain.serve.chain.pipeline import Pipeline, PipelineStats
from blocktrain.serve.gateway.access import ApiKeys, ConcurrencyLimit
from blocktrain.serve.gateway.completion import CompletionJob
from blocktrain.serve.gateway.metrics import Metrics
from blocktrain.serve.gateway.openai import (
    ApiError,
    Completion,
    CompletionRequest,
    ErrorReply,
    Health,
    ModelCard,
    ModelList,
    api_error_of,
    request_schema,
)
from blocktrain.serve.gateway.validate import Limits, modes_of, unknown_model, validate
from blocktrain.serve.traversal import Forward, ModelInfo

log = logging.getLogger(__name__)
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})
NO_KEYS = "without API keys the gateway answers only this machine: set a key"
LAST_EVENT_S = 5.0  # after the deadline, to send the event that says so
STALLED_S = 20.0  # a client that reads nothing for so long is dropped: others need its seats
FRESH_SEEDS = 2**32  # every JSON parser reads them exactly
QUIET_ROUTES = {*PLAYGROUND.files(), "/healthz", "/metrics"}  # requested often, and logged only on failure
ROUTES = {*QUIET_ROUTES, "/v1/models", "/v1/completions", "/v1/chat/completions"}
NO_CHAT = (
    "this is a base model, which continues text and was not trained to chat: send the beginning of a text as `prompt` "
    'to POST /v1/completions (client.completions.create), for example "Question: What is bread made of?\\nAnswer:"'
)
BEARER = HTTPBearer(auto_error=False, description="An API key of this gateway, if it has any")
MEANING = {
    400: "The request is not understood or a value is out of range: the message says what to change",
    401: "The API key is missing or unknown",
    404: "There is no such model",
    413: "The body is too large",
    415: "The Content-Type is not JSON",
    421: "No API key is set, and the Host is not this machine",
    429: "Too many requests: try again after Retry-After seconds",
    500: "Internal error",
    503: "Blocks of the model cannot be reached: try again",
    504: "The request took too long",
}
JSON, DISCONNECTED = "application/json", 499
HEADERS = {**security_headers(), "Cache-Control": "no-store"}
EVENTS: dict[str, Any] = {"description": "The answer, or with stream = true its parts as they come"}


class GatewaySettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    api_keys: tuple[str, ...] = Field(default=(), repr=False)
    any_host: bool = False  # without keys: answer requests for every host name
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = Field(default=2**20, ge=1024)
    max_tokens: int = Field(default=4096, ge=1)  # of one text: bytes, unless the model has a tokenizer
    max_choices: int = Field(default=16, ge=1)  # texts per request
    max_texts: int = Field(default=64, ge=1)  # written at once
    degraded: bool = False  # the chain may answer without some blocks, so missing blocks are not a failure
    requests_per_minute: int | None = Field(default=None, ge=1)  # per key, or without keys per address
    time_limit_s: float = Field(default=300.0, gt=0)

    def model_post_init(self, context: object) -> None:
        ApiKeys(self.api_keys)  # raises on weak ones

    def limits(self) -> Limits:
        return Limits(max_tokens=self.max_tokens, max_choices=min(self.max_choices, self.max_texts))


class Gateway:
    """The state that the routes share."""

    def __init__(self, forward: Forward, settings: GatewaySettings, clock: Callable[[], float]) -> None:
        self.forward, self.settings, self.clock = forward, settings, clock
        self.keys, self.limit = ApiKeys(settings.api_keys), ConcurrencyLimit(settings.max_texts)
        per_minute = settings.requests_per_minute
        self.rate_limiter = RateLimiter(Rate(per_minute, window_s=60.0), clock) if per_minute else None
        self.metrics = Metrics(lambda: self.limit.in_use, self.pipeline_stats)
        self.started_s = int(time.time())

    async def admit(
        self, request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]
    ) -> None:
        """Requires a known key, if there are keys. `given` is for the schema only. Starlette would have another thread
        call a function that is not async."""
        caller = self.keys.caller(request.headers.get("authorization"))
        request.state.caller = caller or (site_of(request.client.host) if request.client else "-")

    def pipeline_stats(self) -> PipelineStats | None:
        """None if the model runs in this process."""
        return self.forward.stats() if isinstance(self.forward, Pipeline) else None

    def health(self) -> Health:
        info, stats = self.forward.info, self.pipeline_stats()
        stages = stats.stages.values() if stats else ()
        reasons = [stage.diagnosis for stage in stages if not stage.alive]
        held = {block for stage in stages if stage.alive for block in stage.blocks}
        lost = sorted(set(range(info.blocks)) - held) if stats else []
        if lost:
            reasons.append(f"no stage serves block {', '.join(map(str, lost))} now: start one that does")
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
            max_tokens=limits.max_tokens,
            max_choices=limits.max_choices,
            modes=modes_of(info),
            tokenizer="bytes" if info.tokenizer.sha256 is None else "bpe",
            vocabulary=info.vocabulary,
        )

    async def complete(self, asked: CompletionRequest, request: Request) -> Response:
        wait_s = 0.0 if self.rate_limiter is None else self.rate_limiter.wait_s(request.state.caller)
        if wait_s:
            most, after_s = self.settings.requests_per_minute, math.ceil(wait_s)
            message = f"more than {most} requests per minute: try again in {after_s} s"
            raise ApiError(429, message, "rate_limit_exceeded", retry_after_s=wait_s)
        info = self.forward.info
        plan = validate(asked, info, self.settings.limits(), fresh_seed=secrets.randbelow(FRESH_SEEDS))
        deadline_at_s = asyncio.get_running_loop().time() + self.settings.time_limit_s
        seats = self.limit.seats_of(request.state.caller)
        job = CompletionJob(self.forward, info, plan, seats, deadline_at_s, self.clock)
        request.state.job = job
        if not plan.stream:
            answer = await cancel_on_disconnect(request.receive, job.answer())
            return Response(answer.model_dump_json(), media_type=JSON)
        events = job.events(api_error)
        try:
            first = await cancel_on_disconnect(request.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(events, first=first, deadline_at_s=deadline_at_s + LAST_EVENT_S, stalled_s=STALLED_S)

    def report(self, scope: Scope, status: int, seconds: float) -> None:
        """Counts and logs one answer: the caller, the route and the costs, never a text."""
        route, state = scope["path"] if scope["path"] in ROUTES else "other", scope.get("state", {})
        self.metrics.answered(route, status)
        if status == DISCONNECTED or state.get("disconnected"):
            self.metrics.client_gone()
        facts = {"method": scope["method"], "route": route, "status": status, "seconds": round(seconds, 4)}
        if caller := state.get("caller"):
            facts["caller"] = caller
        if isinstance(job := state.get("job"), CompletionJob):
            effort = job.effort()
            self.metrics.written(effort, job.usage(), job.plan.prompt_bytes)
            facts |= {"id": job.id, **effort.model_dump()}
        level = logging.DEBUG if status < 400 and route in QUIET_ROUTES else logging.INFO
        log.log(level, "%(method)s %(route)s %(status)s", facts, extra={"facts": facts})


def build_gateway(forward: Forward, settings: GatewaySettings, clock: Callable[[], float] = time.monotonic) -> FastAPI:
    gateway = Gateway(forward, settings, clock)
    app = FastAPI(title="BlockTrain gateway", version="1", docs_url=None, redoc_url=None)
    app.add_middleware(
        Middleware,
        body=BodyLimit(settings.max_body_bytes),
        checks=[] if settings.any_host or gateway.keys else [require_host(LOOPBACK_HOSTS, NO_KEYS)],
        render=error_response,
        headers=HEADERS,
        report=gateway.report,
        clock=clock,
    )
    if settings.cors_origins:
        origins, methods = list(settings.cors_origins), ["GET", "POST"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"])

    async def refuse(request: Request, error: Exception) -> Response:
        return error_response(error)

    for kind in (BlockTrainError, HTTPException, ClientDisconnected, TimeoutError):
        app.add_exception_handler(kind, refuse)
    _add_api(app, gateway)
    add_page(app, PLAYGROUND)
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

    @app.post("/v1/chat/completions", dependencies=known, responses=_errors(400, 401, 421))
    async def chat() -> Response:
        """Always refused, with a sentence that says how to ask a base model."""
        raise ApiError(400, NO_CHAT, "base_model")


async def _decoded(request: Request) -> CompletionRequest:
    """Called after the key is checked. A web page cannot send JSON to another host without permission, so other content
    types are refused."""
    announced = request.headers.get("content-type", "")
    if announced.partition(";")[0].strip().lower() != JSON:
        raise ApiError(415, f'Content-Type "{announced[:80]}" is not supported: send {JSON}', "content_type")
    try:
        return CompletionRequest.model_validate_json(await request.body())
    except ClientDisconnect:  # it announced a body and left
        raise ClientDisconnected from None
    except ValidationError as error:
        raise api_error_of(error.errors(include_url=False)) from None


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorReply, "description": MEANING[status]} for status in statuses}


def error_response(error: Exception) -> Response:
    if isinstance(error, ClientDisconnected):
        return Response(status_code=DISCONNECTED)  # for logs and metrics: the client does not get it
    shown = api_error(error)
    headers = {"WWW-Authenticate": "Bearer"} if shown.status == 401 else {}
    if shown.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(shown.retry_after_s)))
    if isinstance(error, HTTPException):
        headers |= error.headers or {}
    return JSONResponse(shown.reply().model_dump(), shown.status, headers)


def api_error(error: Exception) -> ApiError:
    """The error that the client gets for an exception."""
    match error:
        case ApiError():
            return error
        case CheckFailed():
            code = "body_too_large" if error.status == 413 else error.code
            return ApiError(error.status, str(error), code, retry_after_s=error.retry_after_s)
        case HTTPException():
            message = f"{error.detail}: there is POST /v1/completions, and /openapi.json lists the other routes"
            return ApiError(error.status_code, message, "unknown_route")
        case Overloaded():
            return ApiError(429, str(error), "overloaded", retry_after_s=error.retry_after_s)
        case StageUnreachable():
            return ApiError(503, str(error), "stage_unreachable", retry_after_s=1)
        case TimeoutError():
            return ApiError(504, "the text was not written in time: ask for less, or try again", "timeout")
        case ConfigError():
            return ApiError(400, str(error), "invalid_value")
    log.error("unexpected error", exc_info=error)
    return ApiError(500, "internal error of the gateway: see its log", "internal_error")
