"""blocktrain stage: which options it refuses. tests/e2e/test_serve_process.py runs it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from blocktrain.cli.commands.serving.stage import parse_blocks


@pytest.mark.parametrize("text, blocks", [("0", [0]), ("0-1", [0, 1]), ("2-5", [2, 3, 4, 5])])
def test_blocks_are_named_by_their_first_and_last(text, blocks):
    assert parse_blocks(text) == blocks


BAD_OPTIONS = {
    "blocks": (["--blocks", "two"], "--blocks two names no blocks: write 2, or 0-1"),
    "backwards": (["--blocks", "3-1"], "--blocks 3-1 names no blocks"),
    "unknown block": (["--blocks", "9"], "there is no block 9"),
    "address": (["--listen", "localhost:7001"], "is not an address of a stage"),
    "open": (["--listen", "tcp://0.0.0.0:7001"], "make a key with blocktrain keys"),
    "relay without a name": (["--via", "tcp://127.0.0.1:1"], "give both --via and --name, or neither"),
    "relay without a key": (["--via", "tcp://relay:1", "--name", "a"], "make a key with blocktrain keys"),
    "name": (["--via", "tcp://127.0.0.1:1", "--name", "A B"], "is not a valid stage name"),
    "no key": (["--keys", "none.key"], "none.key cannot be read"),
    "threads": (["--threads", "0"], "--threads 0 is too small"),
    "poll": (["--poll", "0"], "--poll 0 is too small"),
    "device": (["--device", "abacus"], "--device abacus is not the name of a device"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_refused_with_a_remedy(run, trained, name):
    options, sentence = BAD_OPTIONS[name]
    result = run("stage", trained[0], *options)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["stage", "serve"])
def test_a_directory_without_a_model_is_not_served(run, tmp_path, command):
    result = run(command, tmp_path)
    assert result.exit_code == 2
    assert "is not a run directory" in result.stderr


@pytest.mark.parametrize("command", ["stage", "serve"])
def test_offload_needs_the_files_of_a_model(run, command):
    result = run(command, "bt://token@127.0.0.1:1#00", "--offload")
    assert result.exit_code == 2
    assert "run blocktrain export first" in result.stderr


def test_a_coordinator_that_does_not_answer_is_an_error(run, closed_port, monkeypatch):
    monkeypatch.setattr("blocktrain.swarm.worker.client.FIRST_PAUSE_S", 100.0)
    result = run("stage", f"bt://127.0.0.1:{closed_port}/#{'x' * 20}")
    assert result.exit_code == 2
    assert "does not answer" in result.stderr


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that nothing listens on and that no other process can take."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield int(reserved.getsockname()[1])
