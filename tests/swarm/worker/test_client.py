"""The client with a transport that fails as planned and a clock that only sleeping moves; one real TLS server."""

from __future__ import annotations

import datetime
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from blocktrain.errors import ConfigError, CoordinatorUnreachable, RequestRefused
from blocktrain.swarm.worker import client as client_module
from blocktrain.swarm.worker.client import LONGEST_PAUSE_S, CoordinatorClient
from blocktrain.wire.attached import HOLDS_HEADER, MEDIA_TYPE, Held, encode_attached
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import Blob, LeaseRequest, Problem, TrainLease

TOKEN = "a-token-for-the-workers"
DATA = bytes(range(256)) * 10
BLOB = Blob(sha256=hashlib.sha256(DATA).hexdigest(), num_bytes=len(DATA))
RETRY_AFTER = {"Retry-After": "7"}
Answerer = Callable[[httpx.Request], httpx.Response]


class Time:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s, self.pauses_s = 0.0, list[float]()

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.now_s += seconds


class Broken(httpx.SyncByteStream):
    """Some bytes, and then the connection is gone."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __iter__(self) -> Iterator[bytes]:
        yield self.data
        raise httpx.ReadError("connection reset")


def client_of(answer: Answerer, time: Time | None = None, patience_s: float = 10.0) -> CoordinatorClient:
    time = time or Time()
    transport = httpx.MockTransport(answer)
    invite = Invite("coordinator.test", 80, TOKEN)
    return CoordinatorClient(invite, patience_s=patience_s, transport=transport, clock=time.clock, sleep=time.sleep)


def problem(status: int, code: str = "planned", retry: bool = False) -> httpx.Response:
    return httpx.Response(status, json=Problem(code=code, message="as planned", retry=retry).model_dump())


def silence(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


def one_after_the_other(*answers: httpx.Response | Answerer) -> tuple[Answerer, list[httpx.Request]]:
    """What the coordinator answers, in turn, and what it was asked."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        planned = answers[len(asked) - 1]
        return planned(request) if callable(planned) else planned

    return answer, asked


def test_pauses_grow_to_a_bound_until_patience_ends():
    time = Time()
    with (
        client_of(silence, time, patience_s=600) as client,
        pytest.raises(CoordinatorUnreachable, match="can be reached"),
    ):
        client.status()
    longest = [min(0.5 * 1.5**n, LONGEST_PAUSE_S) for n in range(len(time.pauses_s))]
    assert len(longest) > 12
    assert all(most / 2 <= pause <= most for pause, most in zip(time.pauses_s, longest, strict=True))
    assert 600 - LONGEST_PAUSE_S <= time.now_s <= 600


@pytest.mark.parametrize(
    "failure",
    [
        silence,
        problem(503, "unavailable", retry=True),
        httpx.Response(503, text="a proxy's page"),
        httpx.Response(429),
        problem(429, "rate"),
        httpx.Response(500, text="Internal Server Error"),
        problem(409, "later", retry=True),
    ],
)
def test_what_may_pass_is_tried_again(failure):
    answer, asked = one_after_the_other(failure, httpx.Response(200, json={"name": "run"}))
    with client_of(answer) as client:
        assert client.status() == {"name": "run"}
    assert len(asked) == 2
    assert asked[0].headers["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize("status", [401, 403, 404, 409, 411, 413, 416, 422, 426])
def test_a_refusal_is_final_and_keeps_its_code_and_sentence(status):
    answer, asked = one_after_the_other(problem(status, "no"))
    with client_of(answer) as client, pytest.raises(RequestRefused, match="as planned") as refused:
        client.status()
    assert refused.value.code == "no"
    assert len(asked) == 1


@pytest.mark.parametrize("text", ["<html>", "{}", '{"received": -1}', '{"received": 1, "more": 2}'])
def test_an_answer_in_another_language_is_a_matter_of_versions(text):
    with client_of(lambda _: httpx.Response(200, text=text)) as client:
        with pytest.raises(RequestRefused, match="install the coordinator's version") as refused:
            client.upload(DATA, "lease")
        assert refused.value.code == "protocol"
        with pytest.raises(RequestRefused, match="install the coordinator's version"):
            client.manifest()


def test_a_page_that_is_no_coordinators_is_named():
    refused = pytest.raises(RequestRefused, match="answered 404: is it a blocktrain coordinator")
    with client_of(lambda _: httpx.Response(404, text="nginx")) as client, refused:
        client.status()


def ranged(request: httpx.Request) -> httpx.Response:
    first, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
    return httpx.Response(206, content=DATA[first : last + 1])


def broken_after(num_bytes: int) -> Answerer:
    def answer(request: httpx.Request) -> httpx.Response:
        whole = ranged(request).content
        return httpx.Response(206, stream=Broken(whole[:num_bytes]))

    return answer


def ranges(asked: list[httpx.Request]) -> list[str]:
    return [request.headers["range"].removeprefix("bytes=") for request in asked]


def test_a_broken_download_goes_on_at_the_byte_where_it_broke(tmp_path):
    answer, asked = one_after_the_other(broken_after(1000), broken_after(300), silence, ranged)
    with client_of(answer) as client:
        assert client.download(BLOB, tmp_path / "cache") == DATA
    assert ranges(asked) == ["0-2559", "1000-2559", "1300-2559", "1300-2559"]
    assert (tmp_path / "cache" / BLOB.sha256).read_bytes() == DATA


@pytest.mark.parametrize(
    "wrong",
    [
        httpx.Response(206, content=b"?" * len(DATA)),
        httpx.Response(206, content=b"?" * (len(DATA) + 99)),
        httpx.Response(206, content=b""),
        httpx.Response(200, content=DATA),
    ],
    ids=["other bytes", "too many bytes", "no bytes", "not the Range"],
)
def test_bytes_that_are_not_the_blob_are_fetched_again(tmp_path, wrong):
    answer, asked = one_after_the_other(wrong, ranged)
    with client_of(answer) as client:
        assert client.download(BLOB, tmp_path) == DATA
    assert ranges(asked) == ["0-2559", "0-2559"]


def test_a_blob_that_always_arrives_damaged_is_never_kept(tmp_path):
    damaged = httpx.Response(206, content=b"?" * len(DATA))
    with client_of(lambda _: damaged) as client, pytest.raises(CoordinatorUnreachable, match="arrived damaged"):
        client.download(BLOB, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept, requests", [(DATA, 0), (DATA[:-1], 1), (b"?" + DATA[1:], 1)])
def test_a_damaged_blob_in_the_cache_is_fetched_again(tmp_path, kept, requests):
    (tmp_path / BLOB.sha256).write_bytes(kept)
    answer, asked = one_after_the_other(ranged)
    with client_of(answer) as client:
        assert client.download(BLOB, tmp_path) == DATA
    assert len(asked) == requests
    assert (tmp_path / BLOB.sha256).read_bytes() == DATA


class Uploads:
    """The coordinator's side of one upload; `fault` may do something else for the n-th PUT."""

    def __init__(self, already: int = 0, **faults: Answerer) -> None:
        self.data, self.offsets, self.faults = DATA[:already], list[int](), faults

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            offset = int(request.url.params["offset"])
            self.offsets.append(offset)
            if fault := self.faults.get(f"put{len(self.offsets)}"):
                return fault(request)
            return self.keep(request)
        return httpx.Response(200, json={"received": len(self.data)})

    def keep(self, request: httpx.Request) -> httpx.Response:
        if int(request.url.params["offset"]) != len(self.data):
            return problem(409, "offset")
        self.data += request.content
        return httpx.Response(200, json={"received": len(self.data)})

    def keep_some(self, num_bytes: int) -> Answerer:
        """What has come stays, and the connection breaks."""

        def keep(request: httpx.Request) -> httpx.Response:
            self.data += request.content[:num_bytes]
            raise httpx.WriteError("broken pipe")

        return keep


@pytest.fixture
def many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that it is asked first what has come of them."""
    monkeypatch.setattr(client_module, "FEW_BYTES", 1000)


@pytest.mark.usefixtures("many_bytes")
@pytest.mark.parametrize("already, offsets", [(0, [0]), (1000, [1000]), (len(DATA), [])])
def test_an_upload_continues_where_the_coordinator_has_it(already, offsets):
    uploads = Uploads(already)
    with client_of(uploads) as client:
        assert client.upload(DATA, "lease") == BLOB
    assert uploads.data == DATA
    assert uploads.offsets == offsets


def test_a_broken_upload_goes_on_at_the_byte_where_it_broke():
    uploads = Uploads()
    uploads.faults |= {"put1": uploads.keep_some(700), "put2": uploads.keep_some(0), "put3": uploads.keep_some(99)}
    with client_of(uploads) as client:
        client.upload(DATA, "lease")
    assert uploads.data == DATA
    assert uploads.offsets == [0, 700, 700, 799]


def test_an_upload_whose_answer_was_lost_is_not_stored_twice():
    uploads = Uploads()
    uploads.faults["put1"] = uploads.keep_some(len(DATA))
    with client_of(uploads) as client:
        client.upload(DATA, "lease")
    assert uploads.data == DATA
    assert uploads.offsets == [0]


@pytest.mark.usefixtures("many_bytes")
def test_the_coordinators_offset_is_followed_backwards_too():
    uploads = Uploads(1000)

    def forget(request: httpx.Request) -> httpx.Response:
        uploads.data = b""
        return uploads.keep(request)

    uploads.faults["put1"] = forget
    with client_of(uploads) as client:
        client.upload(DATA, "lease")
    assert uploads.data == DATA
    assert uploads.offsets == [1000, 0]


@pytest.mark.parametrize("code", ["offset", "oversized"])
def test_an_upload_that_is_refused_ends(code):
    uploads = Uploads(put1=lambda _: problem(409, code))
    with client_of(uploads) as client, pytest.raises(RequestRefused):
        client.upload(DATA, "lease")
    assert uploads.offsets == [0]


def test_an_upload_that_gets_nowhere_ends_with_patience():
    nowhere = httpx.Response(200, json={"received": 0})
    with client_of(lambda _: nowhere) as client, pytest.raises(CoordinatorUnreachable, match="took none of the bytes"):
        client.upload(DATA, "lease")


def self_signed(folder: Path) -> tuple[Path, Path, str]:
    """Certificate, key and fingerprint, for a name that nobody asks for."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a coordinator")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    plain, pkcs8 = serialization.NoEncryption(), serialization.PrivateFormat.PKCS8
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
    return folder / "cert.pem", folder / "key.pem", certificate.fingerprint(hashes.SHA256()).hex()


@pytest.fixture
def tls_server(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """The port and fingerprint of a server that answers {"name": "run"} to everything."""

    async def hello(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b'{"name": "run"}'})

    certificate, key, fingerprint = self_signed(tmp_path)
    config = uvicorn.Config(hello, ssl_certfile=certificate, ssl_keyfile=key, log_level="critical", lifespan="off")
    server, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield listener.getsockname()[1], fingerprint
    server.should_exit = True
    thread.join()
    listener.close()


def test_the_certificate_that_the_invite_names_is_trusted_and_no_other(tls_server):
    port, fingerprint = tls_server
    with CoordinatorClient(Invite("127.0.0.1", port, TOKEN, True, fingerprint)) as client:
        assert client.status() == {"name": "run"}
    with pytest.raises(ConfigError, match="ask for a new invite, somebody else may be answering"):
        CoordinatorClient(Invite("127.0.0.1", port, TOKEN, True, "0" * 64))
    untrusted = pytest.raises(CoordinatorUnreachable, match="self-signed certificate")
    with CoordinatorClient(Invite("127.0.0.1", port, TOKEN, True), patience_s=0) as client, untrusted:
        client.status()


def test_a_coordinator_that_is_not_there_yet_is_waited_for_before_its_certificate_is_known():
    time = Time()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # it never listens, and nobody else can take the port
        invite = Invite("127.0.0.1", silent.getsockname()[1], TOKEN, True, "0" * 64)
        with pytest.raises(CoordinatorUnreachable, match="check that it runs"):
            CoordinatorClient(invite, clock=time.clock, sleep=time.sleep)
    assert len(time.pauses_s) > 3


def test_too_many_requests_are_asked_again_not_before_the_coordinator_said():
    busy = httpx.Response(429, json={"code": "rate", "message": "as planned", "retry": True}, headers=RETRY_AFTER)
    answer, asked = one_after_the_other(busy, httpx.Response(200, json={}))
    time = Time()
    assert client_of(answer, time, patience_s=60).status() == {}
    assert len(asked) == 2
    assert 7 <= time.now_s <= 8


def test_a_wait_longer_than_patience_is_not_begun():
    busy = httpx.Response(429, json={"code": "rate", "message": "as planned", "retry": True}, headers=RETRY_AFTER)
    time = Time()
    with pytest.raises(CoordinatorUnreachable, match="as planned"):
        client_of(one_after_the_other(busy)[0], time, patience_s=5).status()
    assert time.pauses_s == []


def a_request() -> LeaseRequest:
    said = {"name": "w", "device": "cpu", "memory_bytes": 1, "steps_per_s": 1.0}
    return LeaseRequest(protocol=1, nonce=1, worker="0" * 64, **said)


def test_every_try_for_a_lease_is_a_request_of_its_own():
    answer, asked = one_after_the_other(silence, httpx.Response(200, json={"kind": "finished", "reason": "all done"}))
    nonces = iter((1, 2))

    def request() -> LeaseRequest:
        return a_request().model_copy(update={"nonce": next(nonces)})

    assert client_of(answer).lease(request).reason == "all done"
    assert [json.loads(one.content)["nonce"] for one in asked] == [1, 2]


def with_blob(damage: Callable[[bytes], bytes] = lambda body: body) -> httpx.Response:
    lease = {"lease": "1", "phase": 0, "shard": 0, "step_start": 0, "steps": 1, "time_left_s": 1.0}
    body = encode_attached(TrainLease(**lease, trained=(), below=(), ahead=()), [BLOB], [DATA])
    return httpx.Response(200, headers={"Content-Type": MEDIA_TYPE}, content=damage(body))


def test_a_blob_that_came_with_the_lease_is_not_asked_for(tmp_path):
    answer, asked = one_after_the_other(with_blob(), httpx.Response(206, content=DATA))
    client = client_of(answer)
    assert client.lease(a_request, Held(frozenset({(0, 1)}))).lease == "1"
    assert asked[0].headers[HOLDS_HEADER] == "held 0.1"
    assert bytes(client.download(BLOB, tmp_path)) == DATA
    assert len(asked) == 1


def test_what_came_with_a_lease_is_forgotten_with_the_next(tmp_path):
    plain = httpx.Response(200, json={"kind": "finished", "reason": "all done"})
    answer, asked = one_after_the_other(with_blob(), plain, httpx.Response(206, content=DATA))
    client = client_of(answer)
    for _ in range(2):
        client.lease(a_request, Held())
    assert bytes(client.download(BLOB, tmp_path)) == DATA
    assert len(asked) == 3


def test_a_lease_whose_blob_arrived_damaged_is_asked_for_again():
    answer, asked = one_after_the_other(with_blob(lambda body: body[:-1] + b"?"), with_blob())
    assert client_of(answer).lease(a_request, Held()).lease == "1"
    assert len(asked) == 2


SEVERAL = Invite("a", 1, TOKEN, others=(Invite("b", 2, TOKEN), Invite("c", 3, TOKEN)))


def several(answers: dict[str, Answerer], time: Time, patience_s: float = 60.0) -> tuple[CoordinatorClient, list[str]]:
    """A client of three coordinators that answer so, and whom it asked."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return answers[request.url.host](request)

    transport = httpx.MockTransport(answer)
    client = CoordinatorClient(SEVERAL, patience_s=patience_s, transport=transport, clock=time.clock, sleep=time.sleep)
    return client, asked


def fine(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={})


@pytest.mark.parametrize("fault", [silence, lambda _: problem(503, retry=True)])
def test_who_loses_a_coordinator_goes_on_with_the_next_at_once_and_stays_there(fault):
    client, asked = several({"a": fault, "b": fine, "c": fine}, time := Time())
    for _ in range(2):
        client.status()
    assert (asked, time.pauses_s) == (["a", "b", "b"], [])


def test_there_is_a_pause_once_all_coordinators_were_asked():
    client, asked = several({"a": silence, "b": silence, "c": silence}, time := Time(), patience_s=2.0)
    with pytest.raises(CoordinatorUnreachable):
        client.status()
    assert asked == [*"abc"] * (len(time.pauses_s) + 1)
    assert len(time.pauses_s) > 0


def test_a_coordinator_that_asks_for_patience_gets_it():
    busy = iter([httpx.Response(429, headers={"Retry-After": "3"}), httpx.Response(200, json={})])
    client, asked = several({"a": lambda _: next(busy)}, time := Time())
    client.status()
    assert (asked, time.pauses_s[0] >= 3.0) == (["a", "a"], True)


def test_a_redirect_that_was_not_asked_for_is_not_followed(tmp_path):
    """After its bucket failed, a coordinator that goes on to redirect gets no further."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "bucket.test":
            return httpx.Response(403, text="<Error><Message>Request has expired</Message></Error>")
        return httpx.Response(307, headers={"Location": "http://bucket.test/blob"})

    with pytest.raises(RequestRefused, match="answered 307"):
        client_of(answer).download(Blob(sha256="0" * 64, num_bytes=4), tmp_path)
    assert asked == ["coordinator.test", "bucket.test", "coordinator.test"]


def test_with_tls_in_the_invite_no_bucket_without_it_is_used(tmp_path):
    said: list[str] = []
    data = b"some bytes"

    def answer(request: httpx.Request) -> httpx.Response:
        if "prefer" in request.headers:
            return httpx.Response(307, headers={"Location": "http://bucket.test/blob"})
        assert request.url.host == "coordinator.test"
        return httpx.Response(206, content=data)

    invite = Invite("coordinator.test", 443, TOKEN, tls=True)
    client = CoordinatorClient(invite, transport=httpx.MockTransport(answer), say=said.append)
    blob = Blob(sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))
    assert client.download(blob, tmp_path) == data
    assert said == [
        "the coordinator's bucket at bucket.test fails (its URL is not https): bytes go through the coordinator for now"
    ]
