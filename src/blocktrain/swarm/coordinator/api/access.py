"""Who may call which route: the role of an access token.
Next: ../routes.py, which asks; ../../ledger/registry.py, which keeps access tokens."""

from __future__ import annotations

from collections.abc import Callable, Container, Coroutine, Sequence
from typing import Annotated, Any

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import Scope

from blocktrain.errors import RequestRefused
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import Role

BEARER = HTTPBearer(auto_error=False, description="The access token of an invite")
SENDERS: tuple[Role, ...] = ("worker", "admin")  # who may send a body


class Access:
    """The role of a request's access token, read from the ledger once per request. The routes of `by_themselves`,
    methods and paths, call `require_sender`; only a body of somebody unknown waits for the ledger before."""

    def __init__(self, ledger: Ledger, by_themselves: Container[tuple[str, str]] = ()) -> None:
        self._ledger, self._by_themselves = ledger, by_themselves
        self._have_sent: set[str] = set()  # access tokens that could send once; at most as many as there are

    async def before_body(self, scope: Scope, headers: Headers) -> None:
        """A request that may have a body needs an access token that may send one: its body is read only then."""
        if scope["method"] in ("GET", "HEAD"):
            return  # no route of these methods reads a body
        token = _bearer(headers)
        if token in self._have_sent and (scope["method"], scope["path"]) in self._by_themselves:
            return
        role = _checked(await self._role_of(token) if token is not None else None, SENDERS)
        scope.setdefault("state", {})["role"] = role
        if token is not None:
            self._have_sent.add(token)

    def require_sender(self, headers: Headers) -> None:
        """Whether it may still send, for a thread that reads the ledger anyway."""
        token = _bearer(headers)
        _checked(self._ledger.role_of(token) if token is not None else None, SENDERS)

    def require(self, *roles: Role) -> Callable[..., Coroutine[Any, Any, Role]]:
        async def check(
            request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]
        ) -> Role:
            known: Role | None = getattr(request.state, "role", None)
            return _checked(known or (await self._role_of(given.credentials) if given else None), roles)

        return check

    async def _role_of(self, access_token: str) -> Role | None:
        return await run_in_threadpool(self._ledger.role_of, access_token)


def _bearer(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else None


def _checked(role: Role | None, roles: Sequence[Role]) -> Role:
    if role is None:
        remedy = "copy the complete invite, or ask the operator of the swarm for an invite"
        message = f"the access token is unknown or revoked: {remedy}"
        raise RequestRefused(message, "token")
    if role not in roles:
        where = ", which the coordinator wrote to invite-admin in its --dir" if roles == ("admin",) else ""
        message = f"an access token of role {role} may not do this: ask for one of role {' or '.join(roles)}{where}"
        raise RequestRefused(message, "role")
    return role
