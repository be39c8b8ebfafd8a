"""Coordinators that die at any write of a merge or an opening, and several that act at once: no weight changes, no
update is lost, none is merged twice. Real kills: tests/e2e/test_merge_kills.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from blocktrain.logs import SparingLog
from blocktrain.swarm.coordinator import refusals
from blocktrain.swarm.coordinator.blobs import Uploaded
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.wire.messages import (
    LeaseRequest,
    Problem,
    TrainLease,
    UpdateNotice,
    UpdateReceipt,
)


class Died(BaseException):
    """Like kill -9, but for one thread: nothing handles it."""


class Plan:
    """Dies at the n-th write that it watches, before or after the write. With n = 0 it only counts."""

    def __init__(self, dies_at: int, after: bool) -> None:
        self.dies_at, self.after, self.writes = dies_at, after, 0

    def watch(self, monkeypatch: pytest.MonkeyPatch, owner: object, *names: str) -> None:
        for name in names:
            monkeypatch.setattr(owner, name, self.planned(getattr(owner, name)))

    def planned(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            self.writes += 1
            dies = self.writes == self.dies_at
            if dies and not self.after:
                raise Died
            result = real(*args, **kwargs)
            if dies:
                raise Died
            return result

        return write


def meet_fate(house, plan: Plan, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The action, in a process that dies as planned."""
    with monkeypatch.context() as planned:
        planned.setattr(house.blobs.storage, "uses_threads", False)  # the n-th write is the same in every run
        plan.watch(planned, house.blobs, "put", "keep", "discard_uploads")
        plan.watch(planned, Ledger, "add_initial_blocks", "open_phase", "record_update", "merge", "add_event")
        try:
            action()
        except Died:
            assert plan.dies_at
        else:
            assert plan.dies_at == 0


def notice_of(member, step: float = 1e-3) -> UpdateNotice:
    """The notice of an uploaded update of the open round."""
    lease = member.lease()
    data = member.payload(lease, step)
    assert member.upload(lease.lease, data).status_code == 200
    return UpdateNotice.model_validate(member.notice(lease, data))


MOMENTUM = {"swarm.outer": "nesterov"}
MERGE_WRITES = 10  # the update's blob and row, difference, weights and momentum of two blocks, the merge, what follows
OPENING_WRITES = 4  # two initial blocks, their versions, the phase


@pytest.fixture(scope="module")
def calm_weights(new_house) -> dict[tuple[int, int], str]:
    """After one update in a run without faults."""
    calm = new_house(**MOMENTUM)
    calm.coordinator.update(notice_of(calm.member()))
    calm.settle()
    return calm.weights()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dies_at", range(MERGE_WRITES + 1))
def test_a_death_at_any_write_of_a_merge_changes_no_weight(new_house, calm_weights, monkeypatch, dies_at, after):
    house, plan = new_house(**MOMENTUM), Plan(dies_at, after)
    member = house.member()
    notice = notice_of(member)

    def update_and_merge() -> None:
        house.coordinator.update(notice)
        house.settle()

    meet_fate(house, plan, update_and_merge, monkeypatch)
    assert plan.writes == (dies_at or MERGE_WRITES)
    recorded = house.ledger.update(notice.payload.sha256) is not None
    house.restart()
    house.settle()
    assert house.coordinator.update(notice).duplicate == recorded
    house.settle()
    assert house.weights() == calm_weights
    member.work()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dies_at", range(OPENING_WRITES + 1))
def test_a_death_at_any_write_of_an_opening_changes_no_weight(new_house, calm_weights, monkeypatch, dies_at, after):
    house, plan = new_house(**MOMENTUM), Plan(dies_at, after)
    meet_fate(house, plan, house.coordinator.loop.tick, monkeypatch)
    assert plan.writes == (dies_at or OPENING_WRITES)
    house.restart()
    house.coordinator.loop.tick()
    assert house.weights() == {key: sha256 for key, sha256 in calm_weights.items() if key[1] == 0}
    house.member().work()


def all_at_once(*actions: Callable[[], object]) -> list[BaseException]:
    """What they raised."""
    start, raised = threading.Barrier(len(actions)), list[BaseException]()

    def run(action: Callable[[], object]) -> None:
        start.wait()
        try:
            action()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.parametrize("num_coordinators", [1, 2, 4])
def test_coordinators_that_tick_at_once_merge_once(house, member, another_member, num_coordinators):
    another_member.lease()  # and is never heard of again
    house.coordinator.update(notice_of(member))
    ledgers = [Ledger(house.folder / "ledger.db") for _ in range(num_coordinators)]
    coordinators = [house.another_coordinator(ledger) for ledger in ledgers]
    house.now_s += 5000
    assert all_at_once(*(coordinators[i % num_coordinators].loop.tick for i in range(4))) == []
    assert {version for _, version in house.weights()} == {0, 1}
    assert [event.kind for event in house.ledger.events()] == ["joined", "joined", "late", "merged"]
    for ledger in ledgers:
        ledger.close()


@pytest.mark.parametrize("dies_at", [0, 1], ids=["it goes on", "it dies before it merges"])
def test_an_update_that_another_coordinator_takes_in_while_a_phase_ends_is_merged(new_house, monkeypatch, dies_at):
    house = new_house(**{"train.steps": 2})
    first, second = notice_of(house.member()), notice_of(house.member(), 2e-3)
    house.coordinator.update(first)
    here, there = (Ledger(house.folder / "ledger.db") for _ in range(2))
    merging, other = house.another_coordinator(here), house.another_coordinator(there)
    Plan(dies_at, after=False).watch(monkeypatch, there, "merge")
    real, raised = here.merge, list[BaseException]()

    def acknowledged_and_merged() -> None:
        other.update(second)
        other.loop.settle()

    def late(*args: Any) -> bool:
        """The merge is computed. Before it is recorded, the other coordinator, whose clock is behind, acknowledges one
        more update."""
        house.now_s -= 5000
        raised.extend([] if there.update(second.payload.sha256) else all_at_once(acknowledged_and_merged))
        house.now_s += 5000
        return real(*args)

    monkeypatch.setattr(here, "merge", late)
    house.now_s += 5000  # the deadline is over: the first update alone may close the round
    for _ in range(2):
        merging.loop.tick()
    assert len(raised) == dies_at
    merged = {x.update.id: x.update.merged_round for x in house.ledger.contributions()}
    assert merged == {first.payload.sha256: 0, second.payload.sha256: 0}
    assert house.ledger.phases()[0].finished
    for ledger in (here, there):
        ledger.close()


def test_one_update_from_many_threads_is_merged_once(house, member):
    notice, receipts = notice_of(member), list[UpdateReceipt]()
    assert all_at_once(*[lambda: receipts.append(house.coordinator.update(notice))] * 6) == []
    house.settle()
    assert sorted(receipt.duplicate for receipt in receipts) == [False] + [True] * 5
    assert {version for _, version in house.weights()} == {0, 1}


def test_an_update_that_another_request_keeps_just_then_is_not_refused(house, member, monkeypatch):
    notice, uploaded = notice_of(member), house.blobs.uploaded

    def kept_before_it_is_read(*given: Any) -> Uploaded:
        monkeypatch.undo()
        house.coordinator.update(notice)
        return uploaded(*given)

    monkeypatch.setattr(house.blobs, "uploaded", kept_before_it_is_read)
    assert house.coordinator.update(notice).duplicate


def test_workers_that_ask_at_once_get_a_shard_each(house):
    crew, leases = [house.member() for _ in range(6)], list[TrainLease]()
    requests = [LeaseRequest.model_validate(one.request()) for one in crew]
    house.coordinator.loop.tick()
    asked = [lambda request=request: leases.append(house.coordinator.lease(request)) for request in requests]
    assert all_at_once(*asked) == []
    assert sorted(lease.shard for lease in leases) == list(range(6))


def test_a_blob_that_the_coordinator_lost_is_waited_for_and_its_operator_is_told_once(
    house, member, monkeypatch, caplog
):
    monkeypatch.setattr(refusals, "_own_faults", SparingLog("test"))
    lost = member.lease().trained[0].tensors.sha256
    (house.folder / "blobs" / "blobs" / lost).unlink()
    for _ in range(3):
        answer = house.ask("POST", "/v1/leases", json=member.request())
        assert answer.status_code == 503
        assert Problem.model_validate_json(answer.content).retry
    (line,) = caplog.messages
    assert f"blob {lost} is not in" in line
    assert "restore it from a copy" in line


@pytest.mark.parametrize("away_s, left_s", [(4.0, 56.0), (55.0, 55.0), (90.0, 60.0)])
def test_a_round_gets_the_time_back_in_which_no_coordinator_ran(new_house, away_s, left_s):
    """The first worker that came back closed the round: its deadline had passed, and the others were late."""
    house = new_house(**{"swarm.deadline_ceiling_s": 60.0, "swarm.deadline_floor_s": 1.0})
    members = house.member(), house.member()
    leases = [each.lease() for each in members]
    house.now_s += away_s
    house.restart()
    members[0].send(leases[0], members[0].payload(leases[0]))
    (round,) = house.ledger.open_rounds().values()
    assert (round.number, round.deadline_at_s - house.now_s) == (0, left_s)
