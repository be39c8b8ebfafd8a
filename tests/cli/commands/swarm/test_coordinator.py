"""blocktrain coordinator: what it refuses, and its certificate. tests/e2e/test_swarm_process.py runs it."""

from __future__ import annotations

import stat
from dataclasses import replace

import pytest

from blocktrain.cli.shared.certificates import tls_files
from blocktrain.errors import ConfigError
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.invite import parse_invite
from blocktrain.wire.messages import PROTOCOL_VERSION

SETTINGS = ["--set", "train.steps=4", "--set", "swarm.round_steps=2"]


def start(run, text, folder, *options):
    return run("coordinator", "--preset", "tiny", "--corpus", text, "--dir", folder, *SETTINGS, *options)


def test_a_run_cannot_be_continued_with_other_settings(run, swarm):
    result = start(run, swarm.text, swarm.folder, "--seed", 7)
    assert result.exit_code == 2
    assert "holds a run with another spec" in result.stderr


def test_a_taken_port_is_an_error(run, swarm):
    result = start(run, swarm.text, swarm.folder)
    assert result.exit_code == 2
    assert f"port {parse_invite(swarm.invite).port} on 127.0.0.1 is taken" in result.stderr


def test_a_self_signed_certificate_is_made_once_and_pinned(tmp_path, open_tiny, serve):
    tls = tls_files(tmp_path, "127.0.0.1", None, None)
    assert tls_files(tmp_path, "127.0.0.1", None, None) == tls
    assert stat.S_IMODE(tls.key.stat().st_mode) == 0o600
    with open_tiny() as run, serve(run, tls) as invite:
        assert str(invite).startswith("bts://")
        with CoordinatorClient(parse_invite(str(invite))) as trusting:
            assert trusting.run_info().protocol == PROTOCOL_VERSION
        with pytest.raises(ConfigError, match="somebody else may be answering"):
            CoordinatorClient(replace(invite, fingerprint="0" * 64))
