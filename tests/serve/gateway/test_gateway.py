"""The gateway itself: access, limits, clients that disconnect, metrics and logs, and the schema."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import positive_data_acceptance
from starlette.testclient import TestClient

from blocktrain.serve.gateway import app as gateway_app
from blocktrain.serve.gateway.app import MEANING, GatewaySettings, build_gateway
from blocktrain.serve.gateway.metrics import Metrics

KEY = "a-key-that-nobody-guesses"
BODY = {"prompt": "7 bottles", "max_tokens": 8, "seed": 1}
ENDLESS = {**BODY, "max_tokens": 4096, "mode": "autoregressive"}
PATIENCE_S = 60


@pytest.fixture
def local(forward) -> TestClient:
    """Without keys, as on somebody's own machine."""
    return TestClient(build_gateway(forward, GatewaySettings()), base_url="http://127.0.0.1:8000")


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000"])
def test_without_keys_this_machine_is_answered(local, host):
    assert local.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::2]:8000"])
def test_without_keys_a_page_that_renames_its_host_to_ours_is_not(local, host):
    answer = local.get("/healthz", headers={"Host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (421, "host")


@pytest.mark.parametrize("changed", [{"api_keys": (KEY,)}, {"any_host": True}])
def test_with_keys_or_where_the_user_says_so_every_host_name_is(forward, changed):
    client = TestClient(build_gateway(forward, GatewaySettings(**changed)))
    assert client.get("/healthz", headers={"Host": "models.example.org"}).status_code == 200


def test_other_origins_get_no_permission_unless_named(forward):
    settings = GatewaySettings(cors_origins=("https://friend.example",), any_host=True)
    for app, expected in (
        (build_gateway(forward, GatewaySettings(any_host=True)), [None, None]),
        (build_gateway(forward, settings), [None, "https://friend.example"]),
    ):
        origins = ["https://stranger.example", "https://friend.example"]
        answers = [TestClient(app).get("/v1/models", headers={"Origin": origin}) for origin in origins]
        assert [answer.headers.get("access-control-allow-origin") for answer in answers] == expected


@pytest.mark.parametrize("path", ["/", "/page/playground.js", "/healthz", "/nothing", "/v1/completions"])
def test_every_answer_has_a_strict_policy(local, path):
    headers = local.get(path).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


def test_the_health_names_the_model(local, forward):
    expected = {"status": "ok", "model": "tiny", "version": forward.info.version, "reasons": []}
    assert local.get("/healthz").json() == expected


def test_metrics_count_requests_bytes_and_traversals(local):
    local.post("/v1/completions", json={**BODY, "mode": "autoregressive"})
    local.post("/v1/completions", json={"n": 0})
    lines = local.get("/metrics").text.splitlines()
    assert 'blocktrain_gateway_requests_total{route="/v1/completions",status="200"} 1.0' in lines
    assert 'blocktrain_gateway_requests_total{route="/v1/completions",status="400"} 1.0' in lines
    assert 'blocktrain_gateway_bytes_total{direction="read"} 9.0' in lines
    assert 'blocktrain_gateway_bytes_total{direction="written"} 8.0' in lines
    assert 'blocktrain_gateway_traversals_total{mode="autoregressive"} 8.0' in lines
    assert 'blocktrain_gateway_first_byte_seconds_count{mode="autoregressive"} 1.0' in lines
    assert "blocktrain_gateway_texts_in_flight 0.0" in lines


def test_the_log_has_the_caller_and_the_costs_but_no_text(forward, caplog):
    client = TestClient(build_gateway(forward, GatewaySettings(api_keys=(KEY,))))
    with caplog.at_level("INFO", "blocktrain.serve.gateway.app"):
        client.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {KEY}"})
    (record,) = caplog.records
    assert record.facts["status"] == 200
    assert record.facts["bytes_written"] == 8
    assert len(record.facts["caller"]) == 8
    assert not any(secret in str(record.facts) for secret in ("bottles", KEY))


# Limits


def test_more_texts_than_may_be_written_at_once_get_429(opened, forward):
    forward.stops_at = 1
    gateway = opened(forward, api_keys=(KEY,), max_texts=2)
    with asking(gateway, {**ENDLESS, "n": 2}), gateway.client() as client:
        with pytest.raises(openai.RateLimitError, match="2 of 2 texts are being written") as raised:
            client.completions.create(model="tiny", prompt="a")
        assert raised.value.response.headers["retry-after"] == "1"


@contextmanager
def asking(gateway, body: dict) -> Iterator[None]:
    """A request under way, from where the forward has stopped. Its client disconnects at the end."""
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=PATIENCE_S)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    assert gateway.forward.stopped.wait(PATIENCE_S)
    yield
    connection.close()


def test_a_request_may_not_ask_for_more_texts_than_may_be_written_at_once(forward):
    client = TestClient(build_gateway(forward, GatewaySettings(any_host=True, max_texts=2)))
    assert "give 1 to 2" in client.post("/v1/completions", json={"n": 3}).json()["error"]["message"]


def test_a_key_s_rate_is_kept_and_others_have_their_own(forward):
    settings = GatewaySettings(api_keys=(KEY, KEY + "2"), requests_per_minute=2)
    client = TestClient(build_gateway(forward, settings, clock=lambda: 0.0))
    keys = [KEY, KEY, KEY, KEY + "2"]
    answers = [client.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"}) for key in keys]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 200]
    assert answers[2].headers["retry-after"] == "30"
    assert "more than 2 requests per minute: try again in 30 s" in answers[2].json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_takes_too_long_gets_504(forward, stream):
    forward.stops_at = 1
    client = TestClient(build_gateway(forward, GatewaySettings(any_host=True, time_limit_s=0.05)))
    answer = client.post("/v1/completions", json={**BODY, "stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert forward.open == set()


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock a test can move."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


def test_a_stream_that_takes_too_long_ends_with_an_event_that_says_so(forward):
    settings = GatewaySettings(any_host=True, time_limit_s=3600)
    transport = httpx.ASGITransport(build_gateway(forward, settings))

    async def answered() -> httpx.Response:
        loop = asyncio.get_running_loop()
        forward.stops_at, forward.when_it_stops = 3, lambda: setattr(loop, "skipped_s", settings.time_limit_s)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway.test") as client:
            return await client.post("/v1/completions", json={**ENDLESS, "stream": True}, timeout=None)

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        answer = runner.run(answered())
    *parts, last = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None]
    assert last["error"]["code"] == "timeout"


# Clients that leave


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_session(opened, forward, stream, monkeypatch):
    reported, client_gone = threading.Event(), Metrics.client_gone
    monkeypatch.setattr(Metrics, "client_gone", lambda metrics: (client_gone(metrics), reported.set()))
    forward.stops_at = 3
    gateway = opened(forward, api_keys=(KEY,))
    with asking(gateway, {**ENDLESS, "stream": stream}):
        assert len(forward.open) == 1
    assert forward.forgotten.wait(PATIENCE_S)
    assert forward.open == set()
    assert reported.wait(PATIENCE_S)
    assert gateway.metric("blocktrain_gateway_clients_gone_total") == 1
    assert gateway.metric("blocktrain_gateway_texts_in_flight") == 0


def test_a_client_that_reads_no_further_frees_its_session(opened, forward):
    forward.stops_at = 4000  # if this machine is so busy that the text would end before the client leaves
    gateway = opened(forward, api_keys=(KEY,))
    with gateway.client() as client:
        parts = client.completions.create(
            model="tiny", prompt="a", max_tokens=4096, stream=True, extra_body={"mode": "autoregressive"}
        )
        assert next(iter(parts)).choices[0].index == 0
        parts.close()
    assert forward.forgotten.wait(PATIENCE_S)
    assert forward.asked < 4096


def test_a_client_that_does_not_read_its_stream_loses_its_seat(forward, monkeypatch):
    monkeypatch.setattr(gateway_app, "STALLED_S", 0.05)
    service, body = build_gateway(forward, GatewaySettings(any_host=True)), json.dumps({**ENDLESS, "stream": True})
    requests = iter([{"type": "http.request", "body": body.encode()}])
    sent = []

    async def receive() -> dict:
        return next(requests, None) or await asyncio.Future()

    async def send(message: dict) -> None:
        sent.append(message)
        if len(sent) == 3:
            await asyncio.Future()  # the buffers of the connection are full

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    asyncio.run(asyncio.wait_for(service(scope, receive, send), PATIENCE_S))
    assert len(sent) == 3
    assert forward.open == set()
    page = TestClient(service).get("/metrics").text
    assert "blocktrain_gateway_texts_in_flight 0" in page
    assert "blocktrain_gateway_clients_gone_total 1" in page


def test_a_client_that_hangs_up_in_the_middle_of_its_request_harms_nobody(opened, forward):
    gateway = opened(forward, api_keys=(KEY,))
    address = gateway.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{".encode())
    with gateway.client() as client:
        assert client.completions.create(model="tiny", prompt="a", max_tokens=1).choices


# The schema

VALID, INVALID = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
ROWS = [
    ("GET", "/healthz", VALID),
    ("GET", "/metrics", VALID),
    ("GET", "/v1/models", VALID),
    ("GET", "/v1/models/{model}", VALID),
    ("POST", "/v1/completions", VALID),
    ("POST", "/v1/completions", INVALID),
    ("POST", "/v1/chat/completions", VALID),
]


@pytest.mark.parametrize("method, path, mode", ROWS)
def test_every_answer_is_one_that_the_schema_describes(forward, method, path, mode):
    """Except one check: a schema cannot say which model there is and how long its prompts may be."""
    app = build_gateway(forward, GatewaySettings(api_keys=(KEY,), max_tokens=4, max_choices=2))
    operation = schemathesis.openapi.from_asgi("/openapi.json", app)[path][method]

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def fuzz(case: schemathesis.Case) -> None:
        case.call_and_validate(headers={"Authorization": f"Bearer {KEY}"}, excluded_checks=[positive_data_acceptance])

    fuzz()
    assert forward.open == set()


def test_every_operation_is_fuzzed_and_describes_its_errors(forward):
    paths = build_gateway(forward, GatewaySettings()).openapi()["paths"]
    assert {(method.upper(), path) for path, told in paths.items() for method in told} == {row[:2] for row in ROWS}
    refusals = paths["/v1/completions"]["post"]["responses"]
    assert {int(status) for status in refusals} == {200, *MEANING}
