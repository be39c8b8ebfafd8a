"""The coordinator as a worker sees it: one method a request, retries with backoff, downloads and uploads that go on
where they broke. Knows HTTP and nothing of training. Next: worker.py, which uses it; wire/messages.py, what is said."""

from __future__ import annotations

import hashlib
import random
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from blocktrain.errors import ConfigError, CoordinatorUnreachable, RequestRefused
from blocktrain.io.checkpoint import written_whole
from blocktrain.io.files import mapped
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import (
    WORKER_HEADER,
    Blob,
    EvaluationNotice,
    LeaseReply,
    LeaseRequest,
    ModelManifest,
    Problem,
    Received,
    RunInfo,
    UpdateNotice,
    UpdateReceipt,
)

Answer = TypeVar("Answer")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
SEND_BYTES = 2**20  # of an upload that are handed to the socket at once
FEW_BYTES = 4 * 2**20  # that are as soon sent as it is asked whether they have come
TIMEOUT_S = 30.0
WAITING = {"Prefer": "wait=2"}  # seconds that an answer without work may be held back, and Ctrl-C with it
LEASE_REPLY: TypeAdapter[Any] = TypeAdapter(LeaseReply)


class CoordinatorClient:
    """`patience_s` is how long a request is tried again before CoordinatorUnreachable; a worker has plenty."""

    def __init__(
        self,
        invite: Invite,
        *,
        patience_s: float = 10.0,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.invite, self._patience_s, self._clock, self._sleep = invite, patience_s, clock, sleep
        pinned = invite.tls and transport is None
        self._http = httpx.Client(
            base_url=invite.url,
            headers={"Authorization": f"Bearer {invite.access_token}"},
            timeout=TIMEOUT_S,
            transport=transport,
            verify=self._patiently(lambda: _trusted(invite)) if pinned else True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def run_info(self) -> RunInfo:
        return self._ask("GET", "/v1/run", RunInfo)

    def lease(self, request: Callable[[], LeaseRequest]) -> Any:
        """Every try asks with a request of its own: the coordinator answers none twice. From the first on, fetches
        name the worker too, so that people see how much each takes."""

        def ask() -> Any:
            asked = request()
            self._http.headers[WORKER_HEADER] = asked.worker
            return self._ask_once(
                "POST", "/v1/leases", LEASE_REPLY, json=asked.model_dump(mode="json"), headers=WAITING
            )

        return self._patiently(ask)

    def submit(self, notice: UpdateNotice) -> UpdateReceipt:
        return self._ask("POST", "/v1/updates", UpdateReceipt, json=notice.model_dump(mode="json"))

    def submit_evaluation(self, notice: EvaluationNotice) -> None:
        self._send("POST", "/v1/evaluations", json=notice.model_dump(mode="json"))

    def manifest(self) -> ModelManifest:
        return self._ask("GET", "/v1/manifest", ModelManifest)

    def status(self) -> dict[str, Any]:
        return dict(self._send("GET", "/v1/status").json())

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        return list(self._send("GET", "/v1/events", params={"after": after}).json())

    def curves(self) -> dict[str, Any]:
        return dict(self._send("GET", "/v1/curves").json())

    def pause(self, paused: bool) -> None:
        self._send("POST", "/v1/pause" if paused else "/v1/resume")

    def contributions(self, after: int = 0) -> list[dict[str, Any]]:
        return list(self._send("GET", "/v1/contributions", params={"after": after}).json())

    def download(self, blob: Blob, cache: Path) -> memoryview:
        """The bytes of a blob, left in the cache's file; a broken download goes on where it broke."""
        kept = cache / blob.sha256
        with suppress(FileNotFoundError):  # never fetched, or just pruned by another worker of the same home
            if hashlib.sha256(data := mapped(kept)).hexdigest() == blob.sha256:
                return data
        cache.mkdir(parents=True, exist_ok=True)
        self._patiently(lambda: self._fetch_whole(blob, kept))
        return mapped(kept)

    def _fetch_whole(self, blob: Blob, path: Path) -> None:
        """All of a blob, each byte once: what had come before a connection broke is kept."""
        digest = hashlib.sha256()
        with written_whole(path, synced=False) as file:  # its hash is checked again when it is read later
            while file.tell() < blob.num_bytes:
                self._patiently(lambda: self._fetch_rest(blob, file, digest))
            if digest.hexdigest() != blob.sha256:
                raise CoordinatorUnreachable(f"the bytes of blob {blob.sha256[:12]}… arrived damaged: try again")

    def _fetch_rest(self, blob: Blob, file: BinaryIO, digest: hashlib._Hash) -> None:
        """Adds what comes of the bytes that the file lacks, be it less than all."""
        start = file.tell()
        path, headers = f"/v1/blobs/{blob.sha256}", {"Range": f"bytes={start}-{blob.num_bytes - 1}"}
        with _reached(self.invite), self._http.stream("GET", path, headers=headers) as response:
            if not response.is_success:
                response.read()
            _require_success(response)
            for chunk in response.iter_bytes() if response.status_code == 206 else ():
                wanted = chunk[: blob.num_bytes - file.tell()]
                file.write(wanted)
                digest.update(wanted)
        if file.tell() == start:
            raise CoordinatorUnreachable(f"{self.invite.url} did not give the bytes from {start} on: try again")

    def upload(self, payload: bytes, lease: str) -> Blob:
        """Send bytes; what has arrived already, of this or an earlier try, is not sent again."""
        blob = Blob(sha256=hashlib.sha256(payload).hexdigest(), num_bytes=len(payload))
        path = f"/v1/leases/{lease}/uploads/{blob.sha256}"
        received = self._received(path) if len(payload) > FEW_BYTES else 0
        while received < len(payload):
            received = self._patiently(partial(self._send_rest, path, payload, received))
        return blob

    def _received(self, path: str) -> int:
        return self._ask("GET", path, Received).received

    def _send_rest(self, path: str, payload: bytes, offset: int) -> int:
        """How much has come then: all, or what had come when the connection broke, by the coordinator's account."""
        chunks = (payload[start : start + SEND_BYTES] for start in range(offset, len(payload), SEND_BYTES))
        headers, params = {"Content-Length": str(len(payload) - offset)}, {"offset": offset, "size": len(payload)}
        try:
            received = self._ask_once("PUT", path, Received, params=params, content=chunks, headers=headers).received
        except (CoordinatorUnreachable, RequestRefused) as error:
            if isinstance(error, RequestRefused) and error.code != "offset":
                raise
            received = self._ask_once("GET", path, Received).received
            if received == offset:
                raise
        if received == offset:
            raise CoordinatorUnreachable(f"{self.invite.url} took none of the bytes at {offset}: try again")
        return received

    def _ask(self, method: str, path: str, answer: TypeAdapter[Answer] | type[Answer], **options: Any) -> Answer:
        return self._patiently(lambda: self._ask_once(method, path, answer, **options))

    def _ask_once(self, method: str, path: str, answer: TypeAdapter[Answer] | type[Answer], **options: Any) -> Answer:
        response = self._once(method, path, **options)
        adapter = answer if isinstance(answer, TypeAdapter) else TypeAdapter(answer)
        try:
            return adapter.validate_json(response.content)
        except ValidationError as error:
            raise RequestRefused(
                f"{self.invite.url}{path} answered what this version does not understand ({error.errors()[0]['msg']}): "
                f"install the coordinator's version of blocktrain",
                code="protocol",
            ) from None

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._patiently(lambda: self._once(method, path, **options))

    def _patiently(self, attempt: Callable[[], Answer]) -> Answer:
        """What it gives, tried again while that can help and patience lasts."""
        give_up_s, pause_s = self._clock() + self._patience_s, FIRST_PAUSE_S
        while True:
            try:
                return attempt()
            except CoordinatorUnreachable as error:
                after_s = error.after_s
                if self._clock() + max(pause_s, after_s) > give_up_s:
                    raise
            # So that workers do not come back all at once, and none before it was asked to.
            self._sleep(after_s + pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _once(self, method: str, path: str, **options: Any) -> httpx.Response:
        with _reached(self.invite):
            response = self._http.request(method, path, **options)
        _require_success(response)
        return response


@contextmanager
def _reached(invite: Invite) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        detail = str(error) or type(error).__name__
        raise CoordinatorUnreachable(
            f"the coordinator at {invite.url} does not answer ({detail}): check that it runs and is in reach"
        ) from None


def _require_success(response: httpx.Response) -> None:
    """Else the coordinator's own sentence, as the error that says whether trying again can help."""
    if response.is_success:
        return
    problem = _problem(response)
    if problem.retry or response.status_code == 429 or response.status_code >= 500:
        raise CoordinatorUnreachable(problem.message, _retry_after_s(response))
    raise RequestRefused(problem.message, problem.code)


def _retry_after_s(response: httpx.Response) -> float:
    """Whole seconds; a date, which our coordinator does not send, is as good as nothing."""
    given = response.headers.get("Retry-After", "")
    return float(given) if given.isdecimal() and len(given) < 7 else 0.0


def _problem(response: httpx.Response) -> Problem:
    try:
        return Problem.model_validate_json(response.content)
    except ValidationError:
        text = f"{response.request.url} answered {response.status_code}: is it a blocktrain coordinator?"
        return Problem(code="unknown", message=text, retry=False)


def _trusted(invite: Invite) -> ssl.SSLContext:
    """Trust what the system trusts, or with a fingerprint exactly that certificate."""
    if invite.fingerprint is None:
        return ssl.create_default_context()
    try:
        certificate = ssl.get_server_certificate((invite.host, invite.port), timeout=TIMEOUT_S)
    except OSError as error:
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
    context.check_hostname = False  # the certificate itself is what was agreed on
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # whoever issued it
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # and however it is filled in
    return context
