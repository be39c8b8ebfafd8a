"""blocktrain ban and rollback, against a run that is finished: what they refuse, and that a ban is shown."""

from __future__ import annotations

import json

import pytest


def test_an_admin_bans_a_worker_and_status_shows_why(run, finished):
    (worker,) = json.loads(run("status", finished.invite, "--json").stdout)["workers"]
    banned = run("ban", finished.admin, "--key", worker["id"], "--reason", "broken device")
    assert banned.exit_code == 0
    assert f"{worker['alias']} is banned" in banned.stdout
    (shown,) = json.loads(run("status", finished.invite, "--json").stdout)["workers"]
    assert "is banned: broken device" in " ".join(run("status", finished.invite).stdout.split())
    assert (shown["state"], shown["why"]) == ("banned", "broken device")
    assert run("ban", finished.admin, "--key", worker["alias"], "--unban").exit_code == 0
    assert run("ban", finished.invite, "--key", worker["alias"]).exit_code == 2


@pytest.mark.parametrize(
    "options, said",
    [
        ([], "give --block and --to, or --without"),
        (["--block", "0"], "give --block and --to, or --without"),
        (["--block", "0", "--to", "1", "--without", "x"], "give --block and --to, or --without"),
        (["--block", "0", "--to", "0"], "block 0 is not being trained now"),
        (["--without", "nobody"], 'no worker is called "nobody"'),
    ],
)
def test_a_rollback_that_cannot_be_done_says_why(run, finished, options, said):
    refused = run("rollback", finished.admin, *options)
    assert refused.exit_code == 2
    assert said in refused.stderr
