"""blocktrain pause and resume."""

from __future__ import annotations


def test_an_admin_pauses_a_run_and_status_shows_it_until_it_goes_on(run, finished):
    for command, shown in (("pause", True), ("pause", True), ("resume", False)):
        assert run(command, finished.admin).exit_code == 0
        assert (", paused" in run("status", finished.invite).stdout) == shown
    refused = run("pause", finished.invite)
    assert refused.exit_code == 2
    assert "an access token of role worker may not do this: ask for one of role admin, which" in refused.stderr
