"""Routes for people and their tools: health, status, streams, metrics, and what an admin orders.
Next: ../routes.py, all routes; ../watching/status.py, what is shown."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Query, Response, Security
from fastapi.security import HTTPAuthorizationCredentials
from starlette.concurrency import run_in_threadpool

from blocktrain.errors import LedgerUnavailable, RequestRefused
from blocktrain.http.server import end_on_shutdown
from blocktrain.http.sse import EventStream
from blocktrain.swarm.coordinator.api.access import BEARER
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.refusals import (
    problems,
    problems_without_token,
)
from blocktrain.swarm.coordinator.trust.history import History
from blocktrain.swarm.coordinator.watching.metrics import METRICS_TYPE, Answers, exposition
from blocktrain.swarm.coordinator.watching.status import Watching, contributions_for, status_for
from blocktrain.swarm.coordinator.watching.status_stream import STALLED_S, Listeners, StatusFeed, status_events
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import Role
from blocktrain.wire.invite import Invite
from blocktrain.wire.people_messages import (
    AccessTokenRole,
    BanOrder,
    Curves,
    EventEntry,
    EventPage,
    InviteReply,
    MergesPage,
    OrderReply,
    Page,
    RollbackOrder,
)

READY_S = 2.0  # for the ledger to answer
METRICS: dict[str, Any] = {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}}


def add_health_routes(service: FastAPI, ledger: Ledger) -> None:
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


def add_status_routes(service: FastAPI, watching: Watching, history: History, answers: Answers, any_role: Any) -> None:
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

    @service.get("/v1/merges", dependencies=[any_role], responses=problems(422))
    def merges(asked: Annotated[MergesPage, Query()]) -> list[dict[str, Any]]:
        return history.merges(asked.phase, asked.first)

    @service.get("/metrics", dependencies=[any_role], response_class=Response, responses={200: METRICS, **problems()})
    def metrics() -> Response:
        return Response(exposition(watching.status(), answers), media_type=METRICS_TYPE)


def add_stream_routes(service: FastAPI, watching: Watching, ledger: Ledger, any_role: Any) -> None:
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


def add_admin_routes(
    service: FastAPI, coordinator: Coordinator, ledger: Ledger, invite: Invite | None, role: Sequence[Any]
) -> None:

    @service.get("/v1/invite", dependencies=role, responses=problems(404))
    def show_invite() -> InviteReply:
        if invite is None or ledger.role_of(invite.access_token) != "worker":
            remedy = "make one with blocktrain access-token add"
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
