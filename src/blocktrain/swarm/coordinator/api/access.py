"""Who may call which route: the role of an access token.
Next: ../routes.py, which asks; ../../ledger/registry.py, which keeps access tokens."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
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
        remedy = "copy the complete invite, or ask the operator of the swarm for an invite"
        message = f"the access token is unknown or revoked: {remedy}"
        raise RequestRefused(message, "token")
    if role not in roles:
        where = ", which the coordinator wrote to invite-admin in its --dir" if roles == ("admin",) else ""
        message = f"an access token of role {role} may not do this: ask for one of role {' or '.join(roles)}{where}"
        raise RequestRefused(message, "role")
    return role
