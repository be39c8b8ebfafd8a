"""What a worker delivers decides about its next leases, and what it claims does not."""

from __future__ import annotations

import pytest

from blocktrain.swarm.policy.track_record import TrackRecord, usual_steps_per_s


def after(story: str) -> TrackRecord:
    """d: a lease was delivered, m: one was missed."""
    record = TrackRecord()
    for what in story:
        record = record.with_delivery(steps=10, took_s=5.0) if what == "d" else record.with_miss()
    return record


@pytest.mark.parametrize(
    "story, owed",
    [("", 0), ("d", 0), ("m", 2), ("md", 1), ("mdd", 0), ("mdm", 1), ("mdmdm", 2), ("m" * 99, 2), ("mmmdmd", 0)],
)
def test_a_missed_lease_costs_two_updates_and_one_that_nobody_waited_for_costs_nothing(story, owed):
    assert after(story).owed == owed


@pytest.mark.parametrize(
    "took_s, speed", [([10.0], 1.0), ([10.0, 10.0], 1.0), ([10.0, 5.0], 1.5), ([1.0, 100.0], 5.05), ([0.0], 10_000.0)]
)
def test_the_speed_of_a_worker_is_measured_from_its_updates(took_s, speed):
    record = TrackRecord()
    for seconds in took_s:
        record = record.with_delivery(steps=10, took_s=seconds)
    assert record.steps_per_s == pytest.approx(speed)


@pytest.mark.parametrize(
    "speeds, usual", [([], None), ([3.0], 3.0), ([1.0, 6.0], 6.0), ([1.0, 6.0, 1e9], 6.0), ([1.0, 6.0, 6.0, 1e9], 6.0)]
)
def test_neither_one_slow_worker_nor_one_that_seems_fast_sets_the_pace_of_several(speeds, usual):
    assert usual_steps_per_s(speeds) == usual
