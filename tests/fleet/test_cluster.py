"""Ray's authentication: used where there is a token, and always for a cluster that is started here."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from blocktrain.fleet.cluster import AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH, _use_authentication, has_authentication


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where Ray looks for its token in this test; there is none yet."""
    for name in (AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH):
        monkeypatch.setenv(name, "")  # so that it is afterwards what it was
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray" / "auth_token"


def test_a_cluster_that_is_started_here_gets_a_token_that_only_its_owner_reads(token):
    _use_authentication(start=True)
    assert len(token.read_text()) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert has_authentication()
    before = token.read_text()
    _use_authentication(start=True)
    assert token.read_text() == before


def test_a_cluster_that_is_joined_is_shown_a_token_if_there_is_one(token):
    _use_authentication(start=False)
    assert not token.exists()
    assert not has_authentication()
    token.parent.mkdir()
    token.write_text("a token")
    _use_authentication(start=False)
    assert has_authentication()


def test_what_the_user_has_set_stays(token, monkeypatch):
    monkeypatch.setenv(AUTH_MODE, "disabled")
    _use_authentication(start=True)
    assert os.environ[AUTH_MODE] == "disabled"
    assert not token.exists()
