"""blocktrain keys."""

from __future__ import annotations

import stat

import pytest

from blocktrain.serve.chain.sockets import read_key
from blocktrain.swarm.worker.identity import own_key


def test_a_key_is_made_once_for_its_owner_only(run, tmp_path):
    path = tmp_path / "chain.key"
    result = run("keys", path)
    assert result.exit_code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made = read_key(path)
    again = run("keys", path)
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    assert read_key(path) == made


def test_a_worker_s_key_is_exported_and_imported(run, tmp_path):
    with own_key(tmp_path / "home"):
        pass
    assert run("keys", "export", tmp_path / "worker.key", "--home", tmp_path / "home").exit_code == 0
    assert run("keys", "import", tmp_path / "worker.key", "--home", tmp_path / "other").exit_code == 0
    assert (tmp_path / "other" / "key").read_bytes() == (tmp_path / "home" / "key").read_bytes()


@pytest.mark.parametrize("arguments", [["export"], ["import"], ["copy", "worker.key"]])
def test_what_is_neither_an_export_nor_an_import_is_a_user_error(run, arguments):
    result = run("keys", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
