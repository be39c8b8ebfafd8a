"""blocktrain keys."""

from __future__ import annotations

import stat

from blocktrain.serve.chain.sockets import read_key


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
