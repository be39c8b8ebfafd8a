"""The coordinator's loop beside other coordinators, and after a clock was set."""

from __future__ import annotations

import time


def test_a_round_that_another_coordinator_has_merged_meanwhile_is_left_alone(house, member):
    lease, other = member.lease(), house.another_coordinator()
    assert member.upload(lease.lease, data := member.payload(lease)).status_code == 200
    assert house.ask_only("POST", "/v1/updates", json=member.notice(lease, data)).status_code == 200
    stale = house.ledger.open_rounds()[0]
    house.settle()
    facts = house.facts()
    other.loop._merge(stale, "decided before the other merged it", house.now_s)
    assert house.facts() == facts


def test_a_clock_that_is_set_ahead_ages_no_blob(house, monkeypatch):
    young = house.blobs.put(b"about to be recorded")
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 7200.0)
    house.coordinator.loop._prune(house.now_s)
    assert house.blobs.exists(young)
