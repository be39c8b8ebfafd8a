"""blocktrain stage, keys and serve: what they refuse, and with which sentence. tests/e2e runs them."""

from __future__ import annotations

import socket
import stat

import pytest

from blocktrain.cli.commands.serving.stage import parse_blocks
from blocktrain.cli.shared.stage_processes import split_blocks
from blocktrain.errors import ConfigError
from blocktrain.serve.chain.keys import read_key


def test_a_key_is_made_once_for_its_owner_only(run, tmp_path):
    path = tmp_path / "chain.key"
    result = run("keys", path)
    assert result.exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made = read_key(path)
    again = run("keys", path)
    assert again.exit_code == 2
    assert "is there already" in again.stderr
    assert read_key(path) == made


@pytest.mark.parametrize("text, blocks", [("0", [0]), ("0-1", [0, 1]), ("2-5", [2, 3, 4, 5])])
def test_blocks_are_named_by_their_first_and_last(text, blocks):
    assert parse_blocks(text) == blocks


BAD_OPTIONS = {
    "blocks": (["--blocks", "two"], "--blocks two names no blocks: write 2, or 0-1"),
    "backwards": (["--blocks", "3-1"], "--blocks 3-1 names no blocks"),
    "unknown block": (["--blocks", "9"], "there is no block 9"),
    "address": (["--listen", "localhost:7001"], "is not an address of a stage"),
    "open": (["--listen", "tcp://0.0.0.0:7001"], "make a key with blocktrain keys"),
    "no key": (["--keys", "none.key"], "none.key cannot be read"),
    "threads": (["--threads", "0"], "--threads 0 is too small"),
    "poll": (["--poll", "0"], "--poll 0 is too small"),
    "device": (["--device", "abacus"], "--device abacus cannot be used here"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_stage_says_what_is_wrong_with_its_options(run, trained, name):
    options, sentence = BAD_OPTIONS[name]
    result = run("stage", trained[0], *options)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


def test_what_is_no_model_is_not_served(run, tmp_path):
    for command in ("stage", "serve"):
        result = run(command, tmp_path)
        assert result.exit_code == 2
        assert "is not a run directory" in result.stderr


def test_a_coordinator_that_does_not_answer_is_said(run, free_port, monkeypatch):
    monkeypatch.setattr("blocktrain.swarm.worker.client.FIRST_PAUSE_S", 100.0)
    result = run("stage", f"bt://127.0.0.1:{free_port}/#{'x' * 20}")
    assert result.exit_code == 2
    assert "does not answer" in result.stderr


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--stages", "9"], "--stages 9 does not fit a model of 4 blocks"),
        (["--host", "0.0.0.0"], "would be open to all"),
        (["--poll", "-1"], "--poll -1 is too small"),
    ],
)
def test_serve_says_what_is_wrong_with_its_options(run, trained, options, sentence):
    result = run("serve", trained[0], *options)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


def test_serve_says_that_its_port_is_taken(run, trained):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", trained[0], "--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "is taken" in result.stderr


@pytest.mark.parametrize("blocks, stages", [(4, 1), (4, 3), (7, 3), (5, 5)])
def test_blocks_are_shared_evenly_and_in_order(blocks, stages):
    shares = split_blocks(blocks, stages)
    assert [block for share in shares for block in share] == list(range(blocks))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_first_stage_which_drafts_gets_the_block_that_is_left_over():
    assert split_blocks(4, 3) == [range(2), range(2, 3), range(3, 4)]


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(ConfigError, match="give 1 to 4"):
        split_blocks(4, 5)
