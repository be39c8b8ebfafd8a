"""Bad input gets an error in OpenAI's format, with the remedy, and causes no work."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from fastapi import Request
from pydantic import ValidationError
from starlette.testclient import TestClient

from blocktrain.http.sse import ClientDisconnected
from blocktrain.serve.gateway.app import GatewaySettings, _decoded, build_gateway
from blocktrain.serve.gateway.openai import CompletionRequest

KEY = "a-key-that-nobody-guesses"


@pytest.fixture
def ask(forward):
    client = TestClient(build_gateway(forward, GatewaySettings(api_keys=(KEY,), max_body_bytes=2000)))
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}

    def ask(content: Any, path: str = "/v1/completions", method: str = "POST", **changed: str):
        return client.request(method, path, content=content, headers={**headers, **changed})

    return ask


def refused(forward, answer, status: int, param: str | None, words: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error")
    assert error["param"] == param
    assert words in error["message"]
    assert forward.asked == 0


@pytest.mark.parametrize(
    "body, param, words",
    [
        ("", None, "not JSON"),
        ("{", None, "not JSON"),
        ("[" * 1000, None, "not JSON"),
        ("[]", None, "not a JSON object"),
        ('"prompt"', None, "not a JSON object"),
        (b'{"prompt": "\xff"}', None, "not JSON"),
        (r'{"prompt": "\ud800"}', None, "not JSON"),
        ('{"temperature": NaN}', "temperature", "temperature"),
        ('{"n": 1e99}', "n", "n = "),
    ],
)
def test_a_body_that_is_no_request(ask, forward, body, param, words):
    refused(forward, ask(body), 400, param, words)


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"prompt": 3}, "prompt", "give a string or a list of strings"),
        ({"prompt": []}, "prompt", "prompt is an empty list"),
        ({"prompt": [[1, 2]]}, "prompt", "give a string or a list of strings"),
        ({"prompt": ["a"] * 17}, "prompt", "17 prompts are not accepted in one request: give 1 to 16"),
        ({"prompt": ["a"] * 5, "n": 4}, "n", "n = 4 for 5 prompts is not accepted: give n from 1 to 3"),
        ({"n": 0}, "n", "n = 0 is not accepted: give 1 or more"),
        ({"n": "2"}, "n", 'n = "2" is not accepted'),
        ({"n": True}, "n", "n = true is not accepted"),
        ({"max_tokens": 0}, "max_tokens", "give 1 to 4096 (0 only with echo)"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens = -1 is not accepted"),
        ({"max_tokens": 4097, "echo": True}, "max_tokens", "give 0 to 4096"),
        ({"temperature": 2.1}, "temperature", "temperature = 2.1 is not accepted: give 0 to 2"),
        ({"top_p": 0}, "top_p", "top_p = 0 is not accepted: give more than 0, at most 1"),
        ({"logprobs": True}, "logprobs", "logprobs = true is not accepted"),
        ({"stop": ""}, "stop", "1 to 256 characters"),
        ({"stop": list("abcde")}, "stop", "a list of at most 4"),
        ({"seed": 2**63}, "seed", "seed = 9223372036854775808 is not accepted"),
        ({"stream_options": {}}, "stream_options", "only with stream = true"),
        ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use", "include_usage?"),
        ({"best_of": 2}, "best_of", "best_of is not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
        ({"presence_penalty": -1}, "presence_penalty", "not supported"),
        ({"logit_bias": {"50256": -100}}, "logit_bias", "not supported"),
        ({"mode": "diffusion"}, "mode", "'speculative', 'sweep' or 'autoregressive'"),
        ({"candidates": 0, "mode": "sweep"}, "candidates", "give 1 to 256"),
        ({"simulated_rtt_ms": 1001}, "simulated_rtt_ms", "give 0 to 1000"),
        ({"candidates": 3, "mode": "autoregressive"}, "candidates", "mode autoregressive has no candidates"),
        ({"maxtokens": 3}, "maxtokens", "unknown field maxtokens: did you mean max_tokens?"),
        ({"messages": []}, "messages", "unknown field messages: the fields are model, prompt"),
        ({"x" * 500: 1}, "x" * 80, "unknown field xxx"),
    ],
)
def test_a_field_that_cannot_be(ask, forward, fields, param, words):
    refused(forward, ask(json.dumps({"prompt": "a", **fields})), 400, param, words)


def test_of_many_wrong_prompts_the_first_one_is_enough():
    """300,000 in a body of 1 MiB took a second of the event loop."""
    with pytest.raises(ValidationError) as refused:
        CompletionRequest.model_validate({"prompt": [1] * 1000})
    assert refused.value.error_count() == 2  # neither a text nor a list of texts


def test_defaults_of_fields_that_have_no_meaning_here_are_no_request(ask):
    silent = {"suffix": None, "best_of": 1, "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}}
    answer = ask(json.dumps({"prompt": "a", "max_tokens": 1, "user": "alice", "top_p": None, **silent}))
    assert answer.status_code == 200


def test_another_model(ask, forward):
    refused(forward, ask('{"model": "gpt-2"}'), 404, "model", 'ask for "tiny"')
    refused(forward, ask(None, "/v1/models/gpt-2", "GET"), 404, "model", 'ask for "tiny"')


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer of-bad-news-altogether", f"Basic {KEY}"])
@pytest.mark.parametrize("method, path", [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics")])
def test_no_key_or_an_unknown_one(ask, forward, method, path, header):
    answer = ask("{", path, method, Authorization=header)
    refused(forward, answer, 401, None, "API key")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_not_read_to_its_end(ask, forward, chunked):
    pieces = (b" " * 500 for _ in range(5))
    refused(forward, ask(pieces if chunked else b" " * 2500), 413, None, "more than 2000 bytes")


def test_a_body_that_is_not_announced_as_json(ask, forward):
    answer = ask("{}", **{"Content-Type": "application/x-www-form-urlencoded"})
    refused(forward, answer, 415, None, "send application/json")


@pytest.mark.parametrize("path, status", [("/v1/embeddings", 404), ("/v1/models", 405), ("/nothing", 404)])
def test_a_route_that_is_not_there(ask, forward, path, status):
    refused(forward, ask("{}", path), status, None, "there is POST /v1/completions")


def test_a_denoising_sweep_has_no_log_probabilities_and_no_temperature(forward_of, denoising_model):
    forward = forward_of(denoising_model)
    client = TestClient(build_gateway(forward, GatewaySettings(any_host=True)))
    for fields, param in (({"logprobs": 1}, "logprobs"), ({"temperature": 0.5}, "temperature")):
        answer = client.post("/v1/completions", json={"mode": "sweep", **fields})
        refused(forward, answer, 400, param, "a denoising sweep")
    answer = client.post("/v1/completions", json={"mode": "sweep", "max_tokens": 30, "prompt": "7 bottles"})
    assert answer.json()["blocktrain"]["traversals"] == 1


@pytest.mark.parametrize("key, status", [("a-key-that-nobody-has-", 401), (KEY, 415)])
def test_a_body_is_refused_before_a_byte_of_it_is_read(gateway, key, status):
    host, port = gateway.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 100000\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(head.encode())
        assert client.recv(1000).startswith(f"HTTP/1.1 {status} ".encode())


def test_a_client_that_announces_a_body_and_leaves_is_no_error_of_the_gateway():
    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    headers = [(b"content-type", b"application/json"), (b"content-length", b"900")]
    request = Request({"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}, receive)
    with pytest.raises(ClientDisconnected):
        asyncio.run(_decoded(request))
