"""Secrets need not stand on command lines, which everybody on a machine can see."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from blocktrain.cli.main import app
from blocktrain.cli.options import INVITE_VARIABLE, read_secret
from blocktrain.cli.shared.gateway import read_api_keys
from blocktrain.errors import ConfigError
from blocktrain.swarm.worker import client

INVITE = "bt://127.0.0.1:1/#a-token-for-nobody-at-all"
COMMANDS = [("status",), ("pause",), ("export", "out"), ("ledger",)]


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch, tmp_path):
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 100.0)  # longer than patience: no second try
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret").write_text(f"{INVITE}\n")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("given", ["@secret", "-"])
def test_an_invite_comes_from_a_file_or_stdin(command, given):
    result = CliRunner().invoke(app, [command[0], given, *command[1:]], input=f"{INVITE}\n")
    assert "the coordinator at http://127.0.0.1:1 does not answer" in result.stderr


@pytest.mark.parametrize("command", ["status", "pause", "resume"])
def test_an_invite_comes_from_the_environment(command):
    result = CliRunner().invoke(app, [command], env={INVITE_VARIABLE: INVITE})
    assert "the coordinator at http://127.0.0.1:1 does not answer" in result.stderr


@pytest.mark.parametrize(
    "given, words", [("@no-such-file", "cannot be read"), ("@empty", "is empty"), ("-", "is empty")]
)
def test_a_secret_that_is_not_there_is_an_error_with_a_remedy(tmp_path, given, words):
    (tmp_path / "empty").write_text("\n")
    result = CliRunner().invoke(app, ["status", given], input="")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert words in result.stderr


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not text"):
        read_secret("@binary")


def test_api_keys_come_from_stdin(monkeypatch, tmp_path):
    monkeypatch.delenv("BLOCKTRAIN_API_KEY", raising=False)
    (tmp_path / "keys").write_text("a-key-that-nobody-guesses\n# a comment\n")
    with (tmp_path / "keys").open() as keys:
        monkeypatch.setattr("sys.stdin", keys)
        assert read_api_keys(Path("-")) == ("a-key-that-nobody-guesses",)
