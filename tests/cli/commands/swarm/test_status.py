"""blocktrain status, for a run that is finished."""

from __future__ import annotations

import json

from blocktrain.errors import CoordinatorUnreachable
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.invite import parse_invite


def test_status_shows_phases_workers_and_the_loss(run, finished):
    result = run("status", finished.admin)
    assert result.exit_code == 0, result.stderr
    assert "3 of 3 phases finished" in result.stdout
    assert "ada" in result.stdout
    assert "ada" not in run("status", finished.invite).stdout  # names are for admins
    assert "held-out loss: " in result.stdout


def test_status_says_that_the_disk_of_the_coordinator_is_full(run, finished, monkeypatch):
    real = CoordinatorClient.status
    full = {"problem": "the coordinator's disk is full: 0 bytes are left. Its operator must free space on it"}
    assert "disk is full" not in run("status", finished.invite).stdout
    monkeypatch.setattr(CoordinatorClient, "status", lambda client: {**real(client), "storage": full})
    lines = run("status", finished.invite).stdout.splitlines()
    assert lines[2] == f"{full['problem']}; until then nothing more is taken in"


def test_status_is_json_for_programs(run, finished):
    facts = json.loads(run("status", finished.invite, "--json").stdout)
    assert [phase["finished"] for phase in facts["phases"]] == [True] * 3


def test_phases_count_from_one_wherever_people_read_them(run, finished):
    lines = run("status", finished.admin).stdout.splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("phase"))) + 1 :]
    assert [line.split()[0] for line in table[:3]] == ["1", "2", "3"]
    with CoordinatorClient(parse_invite(finished.admin)) as client:
        merged = [event["text"] for event in client.events() if event["kind"] == "merged"]
    assert merged[0].startswith("phase 1, round 0")
    contributions = run("ledger", finished.admin).stdout.splitlines()
    assert contributions[0].split()[4] == "phase"
    assert contributions[1].split()[5:7] == ["1", "0"]  # the time has two words


def test_a_watch_goes_on_when_the_coordinator_comes_back(run, finished, monkeypatch):
    naps, real = [], CoordinatorClient.status

    def napped(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    def away_once(client):
        if len(naps) == 1:
            raise CoordinatorUnreachable("the coordinator at http://x does not answer (refused)")
        return real(client)

    monkeypatch.setattr("blocktrain.cli.commands.swarm.status.time.sleep", napped)
    monkeypatch.setattr(CoordinatorClient, "status", away_once)
    result = run("status", finished.invite, "--watch")
    assert result.exit_code == 0
    assert "does not answer (refused); trying again every 2 s" in result.stderr
    assert result.stdout.count("3 of 3 phases finished") == 2


def test_ctrl_c_ends_the_watch_with_success(run, finished, monkeypatch):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("blocktrain.cli.commands.swarm.status.time.sleep", interrupted)
    assert run("status", finished.invite, "--watch").exit_code == 0
