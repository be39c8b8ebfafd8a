"""The coordinator's API gets requests that its OpenAPI schema allows, and some that it does not. Every answer is one
that the schema describes, never an internal error."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import negative_data_rejection, positive_data_acceptance

from blocktrain.http.server import served_in_thread
from blocktrain.swarm.coordinator.api import people
from blocktrain.swarm.coordinator.refusals import MEANING

EXAMPLES = 15  # an operation
WITHOUT_INPUT = [
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/v1/run"),
    ("GET", "/v1/manifest"),
    ("GET", "/v1/status"),
    ("GET", "/v1/curves"),
    ("GET", "/v1/role"),
    ("GET", "/v1/invite"),
    ("GET", "/metrics"),
    ("POST", "/v1/pause"),
    ("POST", "/v1/resume"),
]
WITH_INPUT = [
    ("POST", "/v1/leases"),
    ("GET", "/v1/leases/{lease_id}/uploads/{sha256}"),
    ("PUT", "/v1/leases/{lease_id}/uploads/{sha256}"),
    ("POST", "/v1/updates"),
    ("PUT", "/v1/updates"),
    ("POST", "/v1/evaluations"),
    ("POST", "/v1/vettings"),
    ("POST", "/v1/bans"),
    ("POST", "/v1/rollbacks"),
    ("GET", "/v1/blobs/{sha256}"),
    ("GET", "/v1/contributions"),
    ("GET", "/v1/merges"),
    ("GET", "/v1/events"),
]
VALID, INVALID = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
ROWS = [(*x, VALID) for x in WITHOUT_INPUT + WITH_INPUT] + [(*x, INVALID) for x in WITH_INPUT]


@pytest.mark.parametrize("method, path, mode", ROWS)
def test_every_answer_is_one_that_the_schema_describes(house, method, path, mode):
    """Except one check: a schema cannot say which protocol, phase or lease the coordinator knows. And for /v1/events,
    schemathesis sends some queries that should be invalid as `?after=0`, which is valid."""
    operation = schemathesis.openapi.from_asgi("/openapi.json", house.service)[path][method]
    headers = {"Authorization": "Bearer the-token-of-the-admin"}
    excluded = [positive_data_acceptance, *([negative_data_rejection] if path == "/v1/events" else [])]

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def fuzz(case: schemathesis.Case) -> None:
        case.call_and_validate(headers=headers, excluded_checks=excluded)

    fuzz()


def test_every_operation_is_fuzzed(house):
    told = {name for name, _ in operations(house)}
    assert told == {f"{method.lower()} {path}" for method, path, _ in ROWS}


def operations(house) -> list[tuple[str, dict]]:
    paths = house.service.openapi()["paths"]
    return [(f"{method} {path}", told) for path, methods in paths.items() for method, told in methods.items()]


def test_every_refusal_that_the_schema_describes_is_a_problem(house):
    for name, told in operations(house):
        refusals = {status: answer for status, answer in told["responses"].items() if int(status) >= 400}
        assert {"411", "413", "429"} <= refusals.keys(), name
        for status, answer in refusals.items():
            schema = answer["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Problem"}, (name, status)
            assert answer["description"] == MEANING[int(status)]


def test_every_route_but_the_health_checks_needs_a_token(house):
    without = [name for name, told in operations(house) if "security" not in told]
    assert without == ["get /healthz", "get /readyz"]
    for path in ("/healthz", "/readyz"):
        assert house.ask("GET", path, headers={"Authorization": ""}).json() == {"status": "ok"}


def test_a_ledger_that_hangs_makes_the_service_unready_but_not_unhealthy(house, monkeypatch):
    """More requests wait for the ledger than there are threads for requests."""
    answers_again = threading.Event()
    monkeypatch.setattr(house.ledger, "role_of", lambda token: answers_again.wait(60) and "viewer")
    monkeypatch.setattr(house.ledger, "run", answers_again.wait)
    monkeypatch.setattr(people, "READY_S", 0.2)

    async def ask() -> list[int]:
        transport, headers = httpx.ASGITransport(house.service), {"Authorization": "Bearer x"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            waiting = [asyncio.create_task(client.get("/v1/role")) for _ in range(60)]
            statuses = [(await client.get(path)).status_code for path in ("/healthz", "/readyz", "/readyz")]
            answers_again.set()
            return [*statuses, *{answer.status_code for answer in await asyncio.gather(*waiting)}]

    assert asyncio.run(ask()) == [200, 503, 503, 200]


@pytest.mark.parametrize("token, status", [("made-up", 401), ("the-token-of-the-viewer", 403)])
@pytest.mark.parametrize(
    "method, path",
    [
        ("POST", "/v1/evaluations"),
        ("PUT", "/v1/leases/x/uploads/" + "0" * 64),
        ("PUT", "/v1/updates?notice=1000"),
    ],
)
def test_a_body_is_read_only_if_the_token_may_send_one(house, method, path, token, status):
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n"
    with (
        served_in_thread(house.service) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as client,
    ):
        client.sendall(f"{head}Authorization: Bearer {token}\r\n\r\n".encode())
        assert client.recv(1000).startswith(f"HTTP/1.1 {status} ".encode())  # before a byte of the body was sent


def test_a_token_that_could_send_once_is_refused_when_it_is_revoked(house):
    assert house.ask("POST", "/v1/leases", "worker", content=b"{").status_code == 422
    house.ledger.revoke_access_token("worker", 1.0)
    assert house.ask("POST", "/v1/leases", "worker", content=b"{").status_code == 401


@pytest.mark.parametrize("role, status", [("stranger", 401), ("viewer", 403), ("worker", 422)])
@pytest.mark.parametrize(
    "method, path",
    [
        ("POST", "/v1/leases"),
        ("PUT", "/v1/updates"),
        ("PUT", "/v1/updates?notice=x"),
        ("PUT", "/v1/updates?notice=0"),
        ("PUT", "/v1/updates?notice=1"),
        ("PUT", "/v1/updates?notice=100000"),
        ("PUT", "/v1/updates?notice=2000000"),
    ],
)
def test_a_malformed_request_is_refused_for_its_token_first(house, method, path, role, status):
    assert house.ask(method, path, role, content=b"{").status_code == status


@pytest.mark.parametrize("query", ["after=-1", "after=x", "before=-1", f"before={2**53}", "limit=5", "after="])
def test_a_page_of_events_that_is_none_is_refused(house, query):
    assert house.ask("GET", f"/v1/events?{query}").json()["code"] == "malformed"


@pytest.mark.parametrize("role, status", [("admin", 200), ("worker", 200), ("viewer", 200), ("stranger", 401)])
@pytest.mark.parametrize("path", ["/v1/run", "/v1/manifest", "/v1/status", "/v1/events", "/v1/curves", "/metrics"])
def test_whoever_has_a_token_may_look(house, path, role, status):
    assert house.ask("GET", path, role).status_code == status


def test_a_revoked_token_opens_nothing(house):
    house.ledger.revoke_access_token("worker", 1.0)
    assert house.ask("GET", "/v1/run").status_code == 401


@pytest.mark.parametrize(
    "range, status, first, last",
    [(None, 200, 0, None), ("bytes=0-9", 206, 0, 9), ("bytes=5-", 206, 5, None), ("bytes=7-999999999", 206, 7, None)],
)
def test_a_blob_comes_whole_or_from_byte_to_byte(house, member, range, status, first, last):
    sha256 = member.lease().trained[0].tensors.sha256
    whole = house.blobs.get(sha256)
    answer = house.ask("GET", f"/v1/blobs/{sha256}", "viewer", headers={"Range": range} if range else {})
    assert answer.status_code == status
    assert answer.content == whole[first : None if last is None else last + 1]
    assert answer.headers["etag"] == f'"{sha256}"'
    if range:
        end = len(whole) - 1 if last is None else last
        assert answer.headers["content-range"] == f"bytes {first}-{end}/{len(whole)}"


def broken_put(house, path, query, data, num_bytes):
    """A connection that breaks after so many bytes of the body."""
    headers = {"authorization": "Bearer the-token-of-the-worker", "content-length": str(len(data))}
    scope = {
        "type": "http",
        "method": "PUT",
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    came = {"type": "http.request", "body": data[:num_bytes], "more_body": True}
    messages = iter([came, {"type": "http.disconnect"}])

    async def receive() -> dict:
        return next(messages)

    async def send(message: dict) -> None:
        pass

    asyncio.run(house.service(scope, receive, send))


def test_a_small_update_comes_with_its_notice_in_one_request(house, member):
    lease = member.lease()
    data = member.payload(lease)
    notice = json.dumps(member.notice(lease, data)).encode()
    for duplicate in (False, True):
        answer = house.ask("PUT", "/v1/updates", params={"notice": len(notice)}, content=notice + data)
        assert answer.json()["update"] == hashlib.sha256(data).hexdigest()
        assert answer.json()["duplicate"] == duplicate


@pytest.mark.parametrize(
    "more, notice, code", [(b"x", b"", "truncated"), (b"", b"{}", "malformed"), (b"", b"?", "malformed")]
)
def test_a_whole_update_that_is_not_what_its_notice_says_is_refused(house, member, more, notice, code):
    lease = member.lease()
    data = member.payload(lease)
    notice = notice or json.dumps(member.notice(lease, data)).encode()
    answer = house.ask("PUT", "/v1/updates", params={"notice": len(notice)}, content=notice + data + more)
    assert answer.json()["code"] == code


@pytest.mark.parametrize("broken_at", [10, -10])
def test_of_a_whole_update_whose_connection_broke_nothing_is_kept_and_it_can_be_sent_again(house, member, broken_at):
    lease = member.lease()
    data = member.payload(lease)
    notice = json.dumps(member.notice(lease, data)).encode()
    broken_put(house, "/v1/updates", f"notice={len(notice)}", notice + data, broken_at % len(notice + data))
    path = f"/v1/leases/{lease.lease}/uploads/{hashlib.sha256(data).hexdigest()}"
    assert house.ask("GET", path).json() == {"received": 0}
    answer = house.ask("PUT", "/v1/updates", params={"notice": len(notice)}, content=notice + data)
    assert answer.status_code == 200


def test_what_came_of_an_upload_before_its_connection_broke_is_kept(house, member):
    lease = member.lease()
    data = member.payload(lease)
    path = f"/v1/leases/{lease.lease}/uploads/{hashlib.sha256(data).hexdigest()}"
    broken_put(house, path, f"offset=0&size={len(data)}", data, 1000)
    assert house.ask("GET", path).json() == {"received": 1000}
    assert member.upload(lease.lease, data[1000:], hashlib.sha256(data).hexdigest(), offset=1000, size=len(data))
    assert house.ask("POST", "/v1/updates", json=member.notice(lease, data)).status_code == 200
