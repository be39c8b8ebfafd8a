"""Setting a clock, at the coordinator or at a worker, stops nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from blocktrain.swarm.run_clock import RunClock


@dataclass
class Machine:
    """A machine whose clock can be set."""

    wall_s: float = 5000.0
    up_s: float = 100.0

    def clock(self, latest_s: float = 0.0) -> RunClock:
        return RunClock(latest_s, wall=lambda: self.wall_s, monotonic=lambda: self.up_s)

    def wait(self, seconds: float) -> None:
        self.wall_s, self.up_s = self.wall_s + seconds, self.up_s + seconds


@pytest.mark.parametrize("moved_s", [-86_400.0, -1.0, 0.0, 86_400.0])
def test_the_clock_of_a_run_measures_spans_and_not_settings_of_the_machine(moved_s):
    machine = Machine()
    clock = machine.clock()
    before_s = clock()
    machine.wall_s += moved_s
    machine.wait(30.0)
    assert clock() == before_s + 30.0


@pytest.mark.parametrize("recorded_s, start_s", [(0.0, 5000.0), (4999.0, 5000.0), (90_000.0, 90_000.0)])
def test_a_restarted_coordinator_starts_no_earlier_than_the_latest_moment_of_its_ledger(recorded_s, start_s):
    assert Machine().clock(recorded_s)() == start_s


def test_a_coordinator_follows_another_one_whose_clock_is_ahead():
    clock = Machine().clock()
    clock.not_before(9000.0)
    clock.not_before(6000.0)
    assert clock() == 9000.0


@pytest.mark.parametrize("restart", [False, True], ids=["while it runs", "before a restart"])
def test_a_round_reaches_its_deadline_although_the_machine_s_clock_is_set_back(house, member, another_member, restart):
    machine = Machine(wall_s=1000.0)

    def start() -> None:
        clock = machine.clock(house.ledger.latest_moment_s())
        for part in (house.coordinator, house.coordinator.intake, house.coordinator.loop, house.coordinator.watching):
            part._clock = clock

    start()
    first, _ = member.lease(), another_member.lease()
    member.send(first, member.payload(first))
    machine.wall_s = -86_400.0
    if restart:
        house.restart()
        start()
    machine.wait(first.time_left_s)
    house.settle()
    assert house.ledger.newest()[0].version == 1
