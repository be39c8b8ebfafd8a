"""blocktrain status, for a run that is finished."""

from __future__ import annotations

import json


def test_status_shows_phases_workers_and_the_loss(run, finished):
    result = run("status", finished.admin)
    assert result.exit_code == 0, result.stderr
    assert "3 of 3 phases finished" in result.stdout
    assert "ada" in result.stdout
    assert "ada" not in run("status", finished.invite).stdout  # names are for admins
    assert "held-out loss: " in result.stdout


def test_status_is_json_for_programs(run, finished):
    facts = json.loads(run("status", finished.invite, "--json").stdout)
    assert [phase["finished"] for phase in facts["phases"]] == [True] * 3


def test_ctrl_c_ends_the_watch_with_success(run, finished, monkeypatch):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("blocktrain.cli.commands.swarm.status.time.sleep", interrupted)
    assert run("status", finished.invite, "--watch").exit_code == 0
