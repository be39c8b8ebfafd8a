"""What all commands of a swarm refuse: exit code 2 and one sentence with the remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blocktrain.swarm.worker import client
from blocktrain.wire.invite import parse_invite

NOBODY = "bt://127.0.0.1:1/#a-token-for-nobody-at-all"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["worker", "ftp://here:80/#x"], 'this is not an invite, it starts with "ftp:"'),
        (["status", "bt://here:80/"], "put the invite in quotes"),
        (["export", "bt://here/#a-token-for-nobody", "m"], "it names no host and port"),
        (["worker", NOBODY, "--memory", "0"], "--memory 0 is too small"),
        (["worker", NOBODY, "--name", ""], "--name has 0 characters"),
        (["ledger"], "which ledger?"),
        (["ledger", NOBODY, "--dir", "x"], "which ledger?"),
        (["ledger", "--dir", "no-such-dir"], "give the --dir of blocktrain coordinator"),
        (["access-token", "list", "--dir", "no-such-dir"], "give the --dir of blocktrain coordinator"),
        (["access-token", "add", "", "--dir", "no-such-dir"], "an access token needs a name"),
        (["coordinator", "--dir", "x"], "no settings were given"),
        (
            ["coordinator", "--dir", "x", "--preset", "tiny", "--host", "0.0.0.0"],
            "machine with --public",
        ),
        (
            ["coordinator", "--dir", "x", "--preset", "tiny", "--host", "0.0.0.0", "--public", "here"],
            "without TLS shows secrets and texts to the whole network: give --tls-self-signed",
        ),
        (
            ["coordinator", "--dir", "x", "--preset", "tiny", "--public", "http://here"],
            '--public "http://here" is not the name or address of a machine: give for example example.org',
        ),
        (["coordinator", "--dir", "x", "--preset", "tiny", "--public", "here:7000"], "without http:// and port"),
        (
            ["coordinator", "--dir", "x", "--preset", "tiny", "--trusted-proxy", "here"],
            "give an IP address or a network",
        ),
        (["coordinator", "--dir", "x", "--preset", "tiny", "--tls-cert", "c"], "give both --tls-cert and --tls-key"),
    ],
)
def test_bad_arguments_are_refused_with_a_remedy(run, arguments, sentence):
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [["status"], ["export", "m"], ["ledger"]])
def test_an_unreachable_coordinator_is_an_error_with_a_remedy(run, monkeypatch, command):
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 100.0)  # longer than patience: no second try
    result = run(command[0], NOBODY, *command[1:])
    assert result.exit_code == 2
    assert "check that it runs and can be reached" in result.stderr


def test_a_wrong_access_token_is_refused_with_a_remedy(run, swarm):
    stranger = replace(parse_invite(swarm.invite), access_token="not-a-token-of-this-run")
    result = run("worker", stranger, "--home", swarm.home)
    assert result.exit_code == 2
    assert "ask the operator of the swarm for an invite" in result.stderr


def test_the_file_of_an_invite_is_read(run, swarm, tmp_path):
    for place in (swarm.folder / "invite", swarm.folder):
        assert run("status", place, "--json").exit_code == 0
    assert "and no file or directory of this name is here" in run("status", tmp_path / "none").stderr
    assert "this is not an invite, it is empty: copy" in run("status", "").stderr
    (tmp_path / "notes.txt").write_text("not an invite")
    result = run("worker", tmp_path / "notes.txt")
    assert result.exit_code == 2
    assert "notes.txt holds no invite: give the file that blocktrain coordinator wrote it to" in result.stderr
    assert "is not the directory of a coordinator, it has no invite: give the invite" in run("status", tmp_path).stderr


@pytest.mark.parametrize("fingerprint", [None, "0" * 64])
def test_an_invite_with_tls_to_a_coordinator_without_it_is_told_apart(run, swarm, fingerprint):
    wrong = replace(parse_invite(swarm.invite), tls=True, fingerprint=fingerprint)
    result = run("worker", wrong, "--home", swarm.home)
    assert result.exit_code == 2
    assert "does not use TLS, which an invite bts://… expects: ask for the present invite" in result.stderr


def test_a_coordinator_s_directory_is_not_a_model(run, swarm):
    for command in ("eval", "generate"):
        result = run(command, swarm.folder)
        assert result.exit_code == 2
        assert f"download its model with blocktrain export {swarm.folder} model/" in result.stderr


def test_the_preset_of_a_corpus_that_is_not_here_says_where_to_get_it(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("train", "--preset", "wikitext", "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert "or hf:Salesforce/wikitext:wikitext-2-raw-v1" in result.stderr
