"""Requests to the coordinator: one method per request, retries with backoff, downloads and uploads that continue where
they broke off. If the invite names several coordinators, a request that one does not answer goes to the next. Knows
HTTP and nothing about training. Next: worker.py, which uses it; wire/messages.py, the messages."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Self, TypeVar
from urllib.request import getproxies

import httpx
from pydantic import TypeAdapter, ValidationError

from blocktrain.errors import CoordinatorUnreachable, RequestRefused, TensorError
from blocktrain.io.files import mapped, written_whole
from blocktrain.swarm.worker.answers import TIMEOUT_S, reached, require_success, trusted
from blocktrain.swarm.worker.bucket_access import BucketAccess
from blocktrain.swarm.worker.connections import Connections
from blocktrain.wire.attached import HOLDS_HEADER, MEDIA_TYPE, Held, read_attached
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import (
    UPLOAD_HEADER,
    WORKER_HEADER,
    Blob,
    EvaluationNotice,
    LeaseReply,
    LeaseRequest,
    Message,
    ModelManifest,
    Received,
    RunInfo,
    UpdateNotice,
    UpdateReceipt,
    VetNotice,
)
from blocktrain.wire.people_messages import BanOrder, OrderReply, RollbackOrder

Answer = TypeVar("Answer")
FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGER = 0.5, 30.0, 1.5  # the next pause is so many times as long
SEND_BYTES = 2**20  # of an upload, given to the socket at once
FEW_BYTES = 4 * 2**20  # an upload up to this size is sent without asking first how much of it has arrived
WAITING = {"Prefer": "wait=2"}  # the coordinator may wait 2 s for work before it answers; Ctrl-C waits as long
JSON = {"Content-Type": "application/json"}
LEASE_REPLY: TypeAdapter[LeaseReply] = TypeAdapter(LeaseReply)

_url_of = lru_cache(256)(httpx.URL)  # parsing one takes as long as sending a small request
_adapter_of: Callable[[Any], TypeAdapter[Any]] = lru_cache(64)(TypeAdapter)


class CoordinatorClient:
    """`patience_s` is how long a request is retried before CoordinatorUnreachable; workers set it high.
    `failed` gets every error after which it is tried again."""

    def __init__(
        self,
        invite: Invite,
        *,
        patience_s: float = 10.0,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        failed: Callable[[CoordinatorUnreachable], None] = lambda error: None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.invite, self._patience_s, self._clock, self._sleep = invite, patience_s, clock, sleep
        self._failed, self._transport = failed, transport
        self._direct = BucketAccess(transport, clock, say, tls=invite.tls)
        self._headers = {"Authorization": f"Bearer {invite.access_token}"}
        self._places, self._at = invite.places, 0
        self._connections: dict[int, httpx.Client | Connections] = {}
        self._attached: dict[str, memoryview] = {}  # hash: bytes that came with the last lease
        self._patiently(lambda: self._http)

    @property
    def _place(self) -> Invite:
        """The coordinator that is asked now."""
        return self._places[self._at]

    @property
    def _http(self) -> httpx.Client | Connections:
        if self._at not in self._connections:
            self._connections[self._at] = self._connect(self._place)
        return self._connections[self._at]

    def _connect(self, place: Invite) -> httpx.Client | Connections:
        context = trusted(place) if place.tls and self._transport is None else None
        if self._transport is None and not getproxies():
            return Connections(place.host, place.port, TIMEOUT_S, context)
        return httpx.Client(timeout=TIMEOUT_S, transport=self._transport, verify=context or True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._direct.close()
        for connection in self._connections.values():
            connection.close()

    def run_info(self) -> RunInfo:
        return self._ask("GET", "/v1/run", RunInfo)

    def lease(self, request: Callable[[], LeaseRequest], held: Held | None = None) -> LeaseReply:
        """Every attempt makes a new request, because the coordinator answers no nonce twice. From the first request on,
        downloads name the worker too, so that the status shows each worker's traffic. `held` asks for small blobs that
        are not held to come with the lease; `download` then finds them."""
        headers = WAITING if held is None or self._direct.is_used else {**WAITING, HOLDS_HEADER: held.header()}

        def ask() -> LeaseReply:
            asked = request()
            self._headers[WORKER_HEADER] = asked.worker
            response = self._once("POST", "/v1/leases", asked, headers=headers)
            self._attached = {}
            if response.headers.get("Content-Type") != MEDIA_TYPE:
                return self._read(response, "/v1/leases", LEASE_REPLY)
            try:
                lease, self._attached = read_attached(response.content)
            except TensorError as error:
                raise CoordinatorUnreachable(f"{self._place.url}: {error}") from None
            return lease

        return self._patiently(ask)

    def send(
        self, payload: bytes, lease: str, notice: Callable[[Blob], UpdateNotice]
    ) -> tuple[UpdateNotice, UpdateReceipt]:
        """The update and its notice: in one request if the payload is small and goes through the coordinator."""
        if len(payload) <= FEW_BYTES and not self._direct.is_used:
            told = notice(_blob_of(payload))
            text = told.model_dump_json().encode()
            path, body = f"/v1/updates?notice={len(text)}", text + payload
            return told, self._ask("PUT", path, UpdateReceipt, content=body)
        told = notice(self.upload(payload, lease))
        return told, self.submit(told)

    def submit(self, notice: UpdateNotice) -> UpdateReceipt:
        return self._ask("POST", "/v1/updates", UpdateReceipt, message=notice)

    def submit_evaluation(self, notice: EvaluationNotice) -> None:
        self._send("POST", "/v1/evaluations", message=notice)

    def submit_vetting(self, notice: VetNotice) -> None:
        self._send("POST", "/v1/vettings", message=notice)

    def manifest(self) -> ModelManifest:
        return self._ask("GET", "/v1/manifest", ModelManifest)

    def status(self) -> dict[str, Any]:
        return dict(self._send("GET", "/v1/status").json())

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        return list(self._send("GET", f"/v1/events?after={after}").json())

    def curves(self) -> dict[str, Any]:
        return dict(self._send("GET", "/v1/curves").json())

    def pause(self, paused: bool) -> None:
        self._send("POST", "/v1/pause" if paused else "/v1/resume")

    def ban(self, order: BanOrder) -> str:
        return self._ask("POST", "/v1/bans", OrderReply, message=order).done

    def roll_back(self, order: RollbackOrder) -> str:
        return self._ask_once("POST", "/v1/rollbacks", OrderReply, message=order).done

    def contributions(self, after: int = 0) -> list[dict[str, Any]]:
        return list(self._send("GET", f"/v1/contributions?after={after}").json())

    def merges(self, phase: int, first: int = 0) -> list[dict[str, Any]]:
        """The merged rounds of a phase from this one on."""
        return list(self._send("GET", f"/v1/merges?phase={phase}&first={first}").json())

    def download(self, blob: Blob, cache: Path) -> memoryview:
        """The bytes of a blob: those that came with the lease, or mapped from its file in the cache. A broken download
        continues where it broke off."""
        if (attached := self._attached.get(blob.sha256)) is not None:
            return attached
        kept = cache / blob.sha256
        with suppress(FileNotFoundError):  # never fetched, or just removed by another worker of the same home
            if hashlib.sha256(data := mapped(kept)).hexdigest() == blob.sha256:
                return data
        cache.mkdir(parents=True, exist_ok=True)
        self._patiently(lambda: self._fetch_whole(blob, kept))
        return mapped(kept)

    def _fetch_whole(self, blob: Blob, path: Path) -> None:
        """Downloads a whole blob, every byte once: bytes that arrived before the connection broke are kept."""
        digest = hashlib.sha256()
        with written_whole(path, synced=False) as file:  # not synced: its hash is checked whenever it is read
            while file.tell() < blob.num_bytes:
                self._patiently(lambda: self._fetch_rest(blob, file, digest))
            if digest.hexdigest() != blob.sha256:
                damaged = f"the bytes of blob {blob.sha256[:12]}… arrived damaged: try again, or ask the operator"
                raise CoordinatorUnreachable(damaged, answered=True)  # with its own words, not as a silence

    def _fetch_rest(self, blob: Blob, file: BinaryIO, digest: hashlib._Hash) -> None:
        """Appends the missing bytes, or as many of them as arrive."""
        start = file.tell()
        path, headers = f"/v1/blobs/{blob.sha256}", {"Range": f"bytes={start}-{blob.num_bytes - 1}"}

        def keep(response: httpx.Response) -> None:
            for chunk in response.iter_bytes() if response.status_code == 206 else ():
                wanted = chunk[: blob.num_bytes - file.tell()]
                file.write(wanted)
                digest.update(wanted)

        preference = self._direct.preference()
        request = self._request("GET", path, {**headers, **preference})
        with reached(self._place), closing(self._http.send(request, stream=True)) as response:
            redirected = bool(preference) and response.has_redirect_location
            if not response.is_success and not redirected:
                response.read()
                require_success(response)
            keep(response)
        if redirected and not self._direct.get(response.headers["Location"], headers, keep):
            self._fetch_rest(blob, file, digest)  # through the coordinator: no redirect is asked for now
            return
        if file.tell() == start:
            raise CoordinatorUnreachable(f"{self._place.url} did not send the bytes from {start} on: try again")

    def upload(self, payload: bytes, lease: str) -> Blob:
        """Sends bytes. Those that arrived in an earlier attempt are not sent again."""
        blob = _blob_of(payload)
        path = f"/v1/leases/{lease}/uploads/{blob.sha256}"
        received = self._received(path, payload) if len(payload) > FEW_BYTES or self._direct.is_used else 0
        while received < len(payload):
            received = self._patiently(partial(self._send_rest, path, payload, received))
        return blob

    def _received(self, path: str, payload: bytes) -> int:
        """How many bytes have arrived: all, if the coordinator names a place in its bucket and they get there."""
        answer = self._send("GET", f"{path}?size={len(payload)}", headers=self._direct.preference())
        url = answer.headers.get(UPLOAD_HEADER)
        if url and self._direct.put(url, payload):
            return len(payload)
        return self._read(answer, path, Received).received

    def _send_rest(self, path: str, payload: bytes, offset: int) -> int:
        """Sends the rest. Returns how many bytes the coordinator then has: all, or fewer if the connection broke."""
        chunks = (payload[start : start + SEND_BYTES] for start in range(offset, len(payload), SEND_BYTES))
        headers, there = {"Content-Length": str(len(payload) - offset)}, f"{path}?offset={offset}&size={len(payload)}"
        try:
            received = self._ask_once("PUT", there, Received, content=chunks, headers=headers).received
        except (CoordinatorUnreachable, RequestRefused) as error:
            if isinstance(error, RequestRefused) and error.code != "offset":
                raise
            received = self._ask_once("GET", path, Received).received
            if received == offset:
                raise
        if received == offset:
            raise CoordinatorUnreachable(f"{self._place.url} took none of the bytes at {offset}: try again")
        return received

    def _ask(self, method: str, path: str, answer: TypeAdapter[Answer] | type[Answer], **options: Any) -> Answer:
        return self._patiently(lambda: self._ask_once(method, path, answer, **options))

    def _ask_once(self, method: str, path: str, answer: TypeAdapter[Answer] | type[Answer], **options: Any) -> Answer:
        return self._read(self._once(method, path, **options), path, answer)

    def _read(self, response: httpx.Response, path: str, answer: TypeAdapter[Answer] | type[Answer]) -> Answer:
        adapter = answer if isinstance(answer, TypeAdapter) else _adapter_of(answer)
        try:
            read: Answer = adapter.validate_json(response.content)
            return read
        except ValidationError as error:
            raise RequestRefused(
                f"{self._place.url}{path} sent an answer that this version cannot read ({error.errors()[0]['msg']}): "
                f"install the coordinator's version of blocktrain",
                code="protocol",
            ) from None

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._patiently(lambda: self._once(method, path, **options))

    def _patiently(self, attempt: Callable[[], Answer]) -> Answer:
        """The result of `attempt`, which is repeated while it raises CoordinatorUnreachable and patience lasts."""
        give_up_s, pause_s, failures = self._clock() + self._patience_s, FIRST_PAUSE_S, 0
        while True:
            try:
                return attempt()
            except CoordinatorUnreachable as error:
                after_s, failures = error.after_s, failures + 1
                if not after_s:  # who asked for patience gets it, even if another would answer
                    self._at = (self._at + 1) % len(self._places)
                    if failures % len(self._places):
                        continue  # without a pause, until all were asked
                if self._clock() + max(pause_s, after_s) > give_up_s:
                    raise
                self._failed(error)
            # Random, so that workers do not come back all at once; and none before the time the coordinator asked for.
            self._sleep(after_s + pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGER * pause_s, LONGEST_PAUSE_S)

    def _once(self, method: str, path: str, message: Message | None = None, **options: Any) -> httpx.Response:
        with reached(self._place):
            response = self._http.send(self._request(method, path, message=message, **options), stream=False)
        require_success(response)
        return response

    def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] = MappingProxyType({}),
        content: bytes | Iterable[bytes] | None = None,
        message: Message | None = None,
    ) -> httpx.Request:
        if message is not None:
            content, headers = message.model_dump_json().encode(), {**JSON, **headers}
        return httpx.Request(
            method, _url_of(self._place.url + path), headers={**self._headers, **headers}, content=content
        )


def _blob_of(payload: bytes) -> Blob:
    return Blob(sha256=hashlib.sha256(payload).hexdigest(), num_bytes=len(payload))
