"""blocktrain ledger."""

from __future__ import annotations

import json


def test_the_ledger_is_the_same_from_the_coordinator_and_from_its_disk(run, finished):
    asked = json.loads(run("ledger", finished.admin, "--json").stdout)
    assert asked == json.loads(run("ledger", "--dir", finished.folder, "--json").stdout)
    assert {record["worker_name"] for record in asked} == {"ada"}
    assert run("ledger", finished.invite).stdout.count("merged in round") == len(asked)
