"""Workers that read and write a real bucket directly, by presigned URLs, and what the coordinator still checks."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import func, select

from blocktrain.data.corpus import load_corpus
from blocktrain.errors import ConfigError
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.blobs import Blobs, direct_id
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.server import served_here
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.coordinator.storage import presigned as presigned_module
from blocktrain.swarm.initial_blocks import initial_blocks_here
from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import Worker
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import UPLOAD_HEADER

from .conftest import House, Member

TOKEN = "a-token-for-the-workers"
Change = Callable[[httpx.Request], httpx.Request]


class Counting(httpx.BaseTransport):
    """A real connection that counts the bytes of bodies per host, and may change what is sent to the bucket."""

    def __init__(self, bucket: str, change: Change = lambda request: request) -> None:
        self._real, self._bucket, self._change = httpx.HTTPTransport(), bucket, change
        self.up, self.down = Counter[str](), Counter[str]()
        self.tokens_at_bucket = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        side = "bucket" if request.url.netloc.decode() == self._bucket else "coordinator"
        if side == "bucket":
            self.tokens_at_bucket += "authorization" in request.headers
            request = self._change(request)
        self.up[side] += int(request.headers.get("content-length", 0))
        response = self._real.handle_request(request)
        self.down[side] += int(response.headers.get("content-length", 0))
        return response

    def close(self) -> None:
        self._real.close()


@contextmanager
def swarm(spec: RunSpec, folder: Path, bucket: str, presigned: bool) -> Iterator[tuple[Invite, Ledger]]:
    ledger, blobs = Ledger(folder / "ledger.db"), Blobs(bucket, presigned=presigned)
    found_run(spec, load_corpus(spec.corpus, spec.model.context), ledger, blobs, now_s=0.0)
    ledger.add_access_token("workers", "worker", TOKEN, 0.0)
    coordinator = Coordinator(spec, ledger, blobs, initial_block=initial_blocks_here(spec))
    with closing(ledger), served_here(coordinator, ledger) as port:
        yield Invite("127.0.0.1", port, TOKEN), ledger


def trained(invite: Invite, home: Path, transport: Counting, rounds: int = 2) -> list[str]:
    """What a worker says while it submits that many updates."""
    said, submitted = list[str](), list[str]()

    def report(work) -> None:
        assert work.kind != "refused", work.text
        if work.kind == "submitted":
            submitted.append(work.text)

    with CoordinatorClient(invite, transport=transport, say=said.append) as client:
        key = Ed25519PrivateKey.generate()
        stop = lambda: len(submitted) >= rounds  # noqa: E731
        Worker(client, home, key=key, name="w", memory_bytes=2**33, report=report, stop=stop).run()
    return said


@pytest.fixture
def bucket_host(bucket: str) -> str:
    return urlsplit(os.environ["AWS_ENDPOINT_URL"]).netloc


def test_with_presigned_urls_no_blob_goes_through_the_coordinator(tiny_run, tmp_path, bucket, bucket_host):
    counted: dict[bool, Counting] = {}
    for presigned in (False, True):
        (folder := tmp_path / str(presigned)).mkdir()
        counted[presigned] = transport = Counting(bucket_host)
        with swarm(tiny_run, folder, f"{bucket}/{presigned}", presigned) as (invite, ledger):
            assert trained(invite, folder / "home", transport) == []
            with ledger.database.reading() as connection:
                sent = connection.execute(select(func.sum(t.updates.c.num_bytes))).scalar()
    through, direct = counted[False], counted[True]
    assert (through.up["bucket"], through.down["bucket"]) == (0, 0)
    assert direct.up["bucket"] == sent
    assert direct.down["bucket"] > 0.9 * through.down["coordinator"]
    assert direct.up["coordinator"] < 0.1 * through.up["coordinator"]  # JSON alone
    assert direct.down["coordinator"] < 0.3 * through.down["coordinator"]
    assert direct.tokens_at_bucket == 0


def _forged(request: httpx.Request) -> httpx.Request:
    url = request.url.copy_set_param("X-Amz-Signature", "0" * 64)
    return httpx.Request(request.method, url, headers=request.headers, stream=request.stream)


def _unreachable(request: httpx.Request) -> httpx.Request:
    raise httpx.ConnectError("connection refused")


@pytest.mark.parametrize(
    "change, valid_for, reason",
    [
        (_forged, timedelta(minutes=15), "403 The request signature"),
        (_unreachable, timedelta(minutes=15), "connection refused"),
        (lambda request: request, timedelta(0), "expired"),
    ],
    ids=["refused", "unreachable", "expired"],
)
def test_without_its_bucket_a_worker_goes_through_the_coordinator_and_says_why_once(
    tiny_run, tmp_path, bucket, bucket_host, monkeypatch, change, valid_for, reason
):
    monkeypatch.setattr(presigned_module, "GOOD_FOR", valid_for)
    with swarm(tiny_run, tmp_path, bucket, presigned=True) as (invite, ledger):
        (said,) = trained(invite, tmp_path / "home", Counting(bucket_host, change), rounds=1)
        assert reason in said
        assert said.endswith("bytes go through the coordinator for now")
        assert len(ledger.contributions()) == 1


@pytest.fixture
def direct_house(tiny_run: RunSpec, tmp_path: Path, bucket: str) -> Iterator[House]:
    house = House(tiny_run, tmp_path)
    house.blobs = Blobs(bucket, presigned=True)
    found_run(tiny_run, load_corpus(tiny_run.corpus, tiny_run.model.context), house.ledger, house.blobs, now_s=0.0)
    house.restart()
    yield house
    house.ledger.close()


def place_for(member: Member, lease: str, sha256: str, size: int) -> str:
    """The presigned URL for an upload of so many bytes."""
    path, params = f"/v1/leases/{lease}/uploads/{sha256}", {"size": size}
    answer = member.house.ask("GET", path, params=params, headers={"Prefer": "redirect"})
    assert answer.json() == {"received": 0}
    return str(answer.headers[UPLOAD_HEADER])


def put(url: str, data: bytes | Iterator[bytes]) -> int:
    return httpx.put(url, content=data).status_code


@pytest.mark.parametrize("limits_size", [True, False])
@pytest.mark.parametrize(
    "change, code",
    [
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "hash"),
        (lambda data: data + bytes(10**6), "truncated"),
    ],
    ids=["too few", "others", "too many"],
)
def test_what_was_put_directly_is_checked_before_it_is_acknowledged(
    direct_house, bucket, monkeypatch, change, code, limits_size
):
    member = direct_house.member()
    lease = member.lease()
    notice = member.notice(lease, data := member.payload(lease))
    monkeypatch.setattr(direct_house.blobs._urls, "limits_size", limits_size)  # not all buckets do
    url = place_for(member, lease.lease, notice["payload"]["sha256"], len(data))
    refused = limits_size and len(change(data)) != len(data)
    assert put(url, change(data)) == (403 if refused else 200)
    assert member.submit(notice).json()["code"] == ("truncated" if refused else code)
    assert put(url, data) == 200
    assert member.submit(notice).status_code == 200


def test_a_url_for_an_upload_holds_for_the_announced_number_of_bytes_only(bucket):
    blobs = Blobs(bucket, presigned=None)
    url = blobs.upload_url("lease", num_bytes=1)
    unlimited = url.replace("content-length%3B", "")
    of_no_length = iter([bytes(1)])
    assert [put(url, wrong) for wrong in (bytes(2), b"", bytes(10**6), of_no_length)] == [403] * 4
    assert put(unlimited, bytes(2)) == 403
    assert blobs.used_bytes() == 0
    assert put(url, bytes(1)) == 200


def test_however_many_urls_a_worker_asks_for_a_lease_has_one_upload(direct_house):
    member = direct_house.member()
    lease = member.lease().lease
    for byte in range(3):
        assert put(place_for(member, lease, f"{byte}" * 64, 100), bytes([byte]) * 100) == 200
    assert direct_house.blobs.uploads_of(lease) == [direct_id(lease)]
    assert direct_house.blobs.received(direct_id(lease)) == 100


def test_more_than_a_bucket_takes_at_once_gets_no_url(bucket):
    blobs = Blobs(bucket, presigned=True)
    assert blobs.upload_url("lease", 5 * 2**30) is not None
    assert blobs.upload_url("lease", 5 * 2**30 + 1) is None


class Careless(BaseHTTPRequestHandler):
    """A bucket that takes whatever is sent to it."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b"<DeleteResult></DeleteResult>")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def careless(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Careless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        yield bucket
        server.shutdown()


def test_workers_get_urls_by_default_if_the_bucket_limits_what_they_write(bucket):
    assert Blobs(bucket, presigned=None).direct_access.endswith("the bucket directly, by presigned URLs")
    assert list(Blobs(bucket).iterate()) == []


def test_a_bucket_that_takes_more_than_was_announced_is_written_directly_only_if_asked_for(careless):
    assert Blobs(careless, presigned=None).direct_access.endswith("through this coordinator")
    asked = Blobs(careless, presigned=True)
    assert asked.direct_access.endswith("it does not limit what they write: not for strangers")
    assert "content-length" not in asked.upload_url("lease", 1)


@pytest.mark.parametrize("presigned, tls, has_keys", [(None, False, False), (None, True, True), (False, False, True)])
def test_without_keys_or_tls_or_with_no_presigned_bytes_go_through_the_coordinator(
    bucket, monkeypatch, presigned, tls, has_keys
):
    for name in () if has_keys else ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    blobs = Blobs(bucket, presigned=presigned, tls=tls)
    assert (blobs.upload_url("lease", 1), blobs.download_url("0" * 64)) == (None, None)


def test_an_upload_that_no_update_can_have_gets_no_url(direct_house):
    member = direct_house.member()
    path = f"/v1/leases/{member.lease().lease}/uploads/{'0' * 64}"
    answer = direct_house.ask("GET", path, params={"size": 10**9}, headers={"Prefer": "redirect"})
    assert (answer.status_code, answer.json()["code"]) == (413, "oversized")


def test_a_folder_makes_no_presigned_urls(tmp_path):
    with pytest.raises(ConfigError, match="makes no presigned URLs: give --blobs s3://"):
        Blobs(tmp_path, presigned=True)
