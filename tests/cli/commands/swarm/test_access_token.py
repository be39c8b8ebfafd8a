"""blocktrain access-token."""

from __future__ import annotations

from blocktrain.wire.invite import parse_invite


def test_a_viewer_may_look_but_not_work_until_revoked(run, finished):
    made = run("access-token", "add", "eve", "--role", "viewer", "--dir", finished.folder)
    invite = made.stdout.strip()
    assert run("status", invite).exit_code == 0
    refused = run("worker", invite, "--home", finished.home)
    assert refused.exit_code == 2
    assert "an access token of role viewer may not do this" in refused.stderr
    assert run("access-token", "revoke", "eve", "--dir", finished.folder).exit_code == 0
    assert run("status", invite).exit_code == 2
    assert "eve" in run("access-token", "list", "--dir", finished.folder).stdout
    again = run("access-token", "revoke", "eve", "--dir", finished.folder)
    assert again.exit_code == 2
    assert "(worker, admin)" in again.stderr


def test_no_token_is_in_the_ledger(finished):
    secret = parse_invite(finished.invite).access_token.encode()
    assert all(secret not in path.read_bytes() for path in finished.folder.glob("ledger.db*"))
