"""How a coordinator's answers, silence and certificate look to a client: as our errors, which say whether to try again.
Next: client.py, which tries again."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from pydantic import ValidationError

from blocktrain.errors import ConfigError, CoordinatorUnreachable, RequestRefused
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import (
    Problem,
)

TIMEOUT_S = 30.0
NOT_TLS = ("WRONG_VERSION_NUMBER", "wrong version number", "RECORD_LAYER_FAILURE", "record layer failure")


@contextmanager
def reached(invite: Invite) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        detail = str(error) or type(error).__name__
        _require_tls(invite, detail)
        raise CoordinatorUnreachable(
            f"the coordinator at {invite.url} does not answer ({detail}): check that it runs and can be reached"
        ) from None


def _require_tls(invite: Invite, detail: str) -> None:
    """OpenSSL's words for an answer that is not TLS."""
    if invite.tls and any(words in detail for words in NOT_TLS):
        raise ConfigError(
            f"what answers at {invite.host}:{invite.port} does not use TLS, which an invite bts://… expects: "
            f"ask for the present invite, it begins with bt://"
        )


def require_success(response: httpx.Response) -> None:
    """Raises the coordinator's own message as CoordinatorUnreachable if a retry can help, else as RequestRefused."""
    if response.is_success:
        return
    problem = _problem(response)
    if problem.retry or response.status_code == 429 or response.status_code >= 500:
        raise CoordinatorUnreachable(problem.message, _retry_after_s(response), answered=True)
    raise RequestRefused(problem.message, problem.code, problem.number)


def _retry_after_s(response: httpx.Response) -> float:
    """Whole seconds. A date, which our coordinator never sends, counts as no header."""
    given = response.headers.get("Retry-After", "")
    return float(given) if given.isdecimal() and len(given) < 7 else 0.0


def _problem(response: httpx.Response) -> Problem:
    try:
        return Problem.model_validate_json(response.content)
    except ValidationError:
        text = f"{response.request.url} answered {response.status_code}: is it a blocktrain coordinator?"
        return Problem(code="unknown", message=text, retry=False)


def trusted(invite: Invite) -> ssl.SSLContext:
    """Trusts what the system trusts or, if the invite names a fingerprint, exactly that certificate."""
    if invite.fingerprint is None:
        return ssl.create_default_context()
    try:
        certificate = ssl.get_server_certificate((invite.host, invite.port), timeout=TIMEOUT_S)
    except OSError as error:
        _require_tls(invite, str(error))
        raise CoordinatorUnreachable(
            f"the coordinator at {invite.url} does not answer ({error}): check that it runs"
        ) from None
    found = hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest()
    if found != invite.fingerprint:
        raise ConfigError(
            f"{invite.url} shows a certificate with fingerprint {found[:16]}… and the invite names "
            f"{invite.fingerprint[:16]}…: ask for a new invite, somebody else may be answering"
        )
    context = ssl.create_default_context(cadata=certificate)
    context.check_hostname = False  # the fingerprint identifies the certificate
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # no matter who issued it
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # and how its fields are filled in
    return context
