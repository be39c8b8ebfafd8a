"""blocktrain gateway: what it refuses, where its keys come from, what its log looks like."""

from __future__ import annotations

import json
import logging

import pytest

from blocktrain.cli.shared.gateway import API_KEY_VARIABLE, JsonLog, PlainLog, read_api_keys

STAGES = ["--stages", "tcp://127.0.0.1:1"]
FACTS = {"method": "POST", "route": "/v1/completions", "status": 200, "seconds": 0.25}
WRITTEN = {"mode": "sweep", "bytes_written": 200, "traversals": 1}


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--stages", ""], "no stages were named"),
        (["--stages", "http://a:1"], '"http://a:1" is not an address of a stage'),
        (["--stages", "tcp://192.0.2.7:7001"], "would be open to everyone: make a key with blocktrain keys"),
        ([*STAGES, "--keys", "no.key"], "no.key cannot be read"),
        ([*STAGES, "--trusted-proxy", "a-name"], "give an IP address or a network"),
        ([*STAGES, "--max-connections", "0"], "--max-connections 0 is too small"),
        ([*STAGES, "--tls-cert", "cert.pem"], "give both --tls-cert and --tls-key"),
        ([*STAGES, "--host", "::", "--api-key-file", "good"], "--host :: without TLS shows secrets"),
        ([*STAGES, "--host", "0.0.0.0"], "--host 0.0.0.0 would be open to all: put API keys into a file"),
        (
            [*STAGES, "--host", "no-such-host.invalid", "--insecure"],
            "cannot listen on --host no-such-host.invalid",
        ),
        ([*STAGES, "--api-key-file", "no-keys"], "no-keys cannot be read"),
        ([*STAGES, "--api-key-file", "empty"], "empty holds no API key"),
        ([*STAGES, "--api-key-file", "weak"], "API key 1 of 1 is too easy to guess"),
        ([*STAGES, "--cors", "example.org"], '--cors "example.org" is not an origin'),
        ([*STAGES, "--max-texts", "0"], "--max-texts 0 is too small"),
        ([*STAGES, "--rate", "0"], "--rate 0 is too small"),
        ([*STAGES, "--deadline", "0"], "--deadline 0 is too small"),
    ],
)
def test_bad_options_are_refused_with_a_remedy(run, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("# nothing yet\n\n")
    (tmp_path / "weak").write_text("1234\n")
    (tmp_path / "good").write_text("a-key-that-nobody-guesses\n")
    result = run("gateway", *options, *([] if "--port" in options else ["--port", "0"]))
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


@pytest.mark.parametrize(
    "value, words", [("chain", "--topology was removed"), ("fanout", "--topology fanout was removed, because")]
)
def test_the_removed_topology_is_named(run, value, words):
    result = run("gateway", "--stages", "nonsense", "--topology", value, "--port", "0")
    assert result.exit_code == 2
    assert words in result.stderr


def test_keys_are_lines_of_a_file_and_of_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text("# alice\nthe-key-of-alice\n\n  the-key-of-bob  \n")
    monkeypatch.setenv(API_KEY_VARIABLE, "one-from-the-environment")
    assert read_api_keys(path) == ("the-key-of-alice", "the-key-of-bob", "one-from-the-environment")


def record(facts: dict | None, message: str = "POST /v1/completions 200") -> logging.LogRecord:
    made = logging.LogRecord("blocktrain.serve.gateway.app", logging.INFO, "", 0, message, (), None)
    made.facts = facts
    return made


@pytest.mark.parametrize(
    "facts, line",
    [
        (FACTS, "POST /v1/completions 200, 0.25 s"),
        ({**FACTS, **WRITTEN}, "POST /v1/completions 200, 0.25 s, sweep: 200 bytes in 1 traversal"),
        (None, "POST /v1/completions 200"),
    ],
)
def test_a_request_is_a_line_for_people(facts, line):
    assert PlainLog().format(record(facts)).split(" ", 1)[1] == line


def test_a_request_is_an_object_for_machines():
    told = json.loads(JsonLog().format(record({**FACTS, **WRITTEN})))
    assert told.items() >= {**FACTS, **WRITTEN, "level": "info"}.items()
    assert json.loads(JsonLog().format(record(None, "unexpected")))["message"] == "unexpected"
