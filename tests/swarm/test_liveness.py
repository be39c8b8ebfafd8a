"""No worker stops a run, and none makes it much slower: a real coordinator under a virtual clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest

from blocktrain.wire.messages import TrainLease

LONG = {"train.steps": 400}
STEPS_PER_S = 0.2  # of a usual worker: a round of two steps takes 10 s
DIFFERENT = count()  # no two updates have the same bytes


@dataclass
class Volunteer:
    """A member that needs time for its steps and, as every worker, stops in time to report. `due_s` is when it does."""

    member: object
    steps_per_s: float = STEPS_PER_S
    lease: TrainLease | None = None
    due_s: float = 0.0
    steps: int = 0
    sizes: list[int] = field(default_factory=list)

    def act(self, house) -> None:
        if self.lease and house.now_s >= self.due_s:
            data = self.member.payload(self.lease, step=1e-3 + 1e-6 * next(DIFFERENT))
            done = {"steps": self.steps, "tokens": self.steps * house.spec.step_tokens}
            assert self.member.send(self.lease, data, **done).status_code in (200, 409)  # 409: too late
            self.lease = None
        if self.lease is None:
            answer = house.ask("POST", "/v1/leases", json=self.member.request(steps_per_s=STEPS_PER_S)).json()
            if answer["kind"] == "train":
                self.lease = TrainLease.model_validate(answer)
                self.steps = max(1, min(self.lease.steps, int(0.9 * self.lease.time_left_s * self.steps_per_s)))
                self.due_s = house.now_s + self.steps / self.steps_per_s
                self.sizes.append(self.lease.steps)


def seconds_of(house, volunteers, versions: int, longest_s: int, each_second=lambda: None) -> float:
    """The virtual time until block 0 has this version."""
    began_s = house.now_s
    while house.ledger.newest().get(0) is None or house.ledger.newest()[0].version < versions:
        assert house.now_s < began_s + longest_s, "the run does not move"
        each_second()
        for volunteer in volunteers:
            volunteer.act(house)
        house.now_s += 1.0
    return house.now_s - began_s


def test_a_worker_that_leases_first_claims_a_huge_speed_renews_and_never_reports_stops_nobody(new_house):
    alone, house = new_house(**LONG), new_house(**LONG)
    usual_s = seconds_of(alone, [Volunteer(alone.member())], 8, 500)
    liar = house.member()

    def renew() -> None:
        house.ask("POST", "/v1/leases", json=liar.request(steps_per_s=1e9))

    with_liar_s = seconds_of(house, [Volunteer(house.member())], 8, 1000, each_second=renew)
    assert with_liar_s < 1.2 * usual_s + 40  # in its first round it is a newcomer, and waited for a while
    lost = next(worker for worker in house.ledger.workers() if worker.id == liar.id)
    assert lost.owed > 0


def test_a_worker_that_takes_a_lease_in_every_round_with_a_new_key_costs_a_bounded_share(new_house):
    house = new_house(**LONG)

    def lease_as_somebody_new() -> None:
        house.ask("POST", "/v1/leases", json=house.member().request(steps_per_s=1e9))

    took_s = seconds_of(house, [Volunteer(house.member())], 4, 1000, each_second=lease_as_somebody_new)
    assert took_s < 4 * 45


@pytest.mark.parametrize("times", [10, 1e9], ids=["ten steps for one", "without training"])
def test_workers_that_claim_steps_which_they_skipped_do_not_outrun_the_honest_ones(new_house, times):
    house = new_house(**LONG, **{"swarm.round_steps": 10})
    lazy = [Volunteer(house.member(), times * STEPS_PER_S) for _ in range(2)]
    honest = [Volunteer(house.member()) for _ in range(4)]
    seconds_of(house, [*lazy, *honest], 4, 600)
    for round in range(4):
        updates = {update.worker: update.steps for update in house.ledger.merged_updates(0, round)}
        assert {updates.get(volunteer.member.id) for volunteer in honest} == {10}


def test_one_worker_six_times_slower_does_not_make_the_run_six_times_longer(new_house):
    fast, mixed = (new_house(**LONG, **{"swarm.round_steps": 12}) for _ in range(2))
    fast_s = seconds_of(fast, [Volunteer(fast.member()) for _ in range(2)], 8, 2000)
    slow = Volunteer(mixed.member(), STEPS_PER_S / 6)
    mixed_s = seconds_of(mixed, [slow, Volunteer(mixed.member()), Volunteer(mixed.member())], 8, 4000)
    assert slow.sizes[0] == 12
    assert set(slow.sizes[1:]) <= {1, 2, 3}
    assert len(slow.sizes) >= 4  # it still takes part
    assert mixed_s < 2 * fast_s


def test_a_worker_that_was_away_for_a_round_is_waited_for_again(new_house):
    house = new_house(**LONG)
    team = [Volunteer(house.member(), STEPS_PER_S / 1.2), Volunteer(house.member()), Volunteer(house.member())]
    seconds_of(house, team, 4, 500)
    team[0].due_s += 60  # its machine sleeps
    seconds_of(house, team, 8, 500)
    assert {worker.owed for worker in house.ledger.workers()} != {0}
    seconds_of(house, team, 16, 500)
    assert {worker.owed for worker in house.ledger.workers()} == {0}
