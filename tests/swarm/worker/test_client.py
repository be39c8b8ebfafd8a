"""The client with a transport that fails as planned and a clock that only sleeping moves; one real TLS server."""

from __future__ import annotations

import datetime
import json
import socket
import sys
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
from blocktrain.swarm.worker.client import LONGEST_PAUSE_S, CoordinatorClient
from blocktrain.wire.attached import HOLDS_HEADER, MEDIA_TYPE, Held, encode_attached
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import LeaseRequest, TrainLease

sys.path.insert(0, str(Path(__file__).parent))
from planned_answers import BLOB, DATA, TOKEN, Time, client_of, one_after_the_other, problem, silence

RETRY_AFTER = {"Retry-After": "7"}


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
    body = b"".join(encode_attached(TrainLease(**lease, trained=(), below=(), ahead=()), [BLOB], [DATA]))
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
