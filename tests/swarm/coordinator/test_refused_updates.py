"""Updates that are sound by themselves and refused, or weighed less, for what came before: another's lease, a norm
beyond the usual one, a copy, a second one, one too late."""

from __future__ import annotations

import httpx

from blocktrain.wire.messages import (
    Problem,
    UpdateReceipt,
)


def refused(answer: httpx.Response, status: int, code: str, words: str) -> None:
    problem = Problem.model_validate_json(answer.content)
    assert (answer.status_code, problem.code, problem.retry) == (status, code, False), problem
    assert words in problem.message


def test_the_lease_of_another_worker_is_not_reported(house, member, another_member):
    lease = member.lease()
    data = another_member.payload(lease)
    another_member.upload(lease.lease, data)
    before = house.facts()
    refused(another_member.submit(another_member.notice(lease, data)), 403, "owner", "ask for one of your own")
    assert house.facts() == before
    assert house.refusals() == ["owner"]


def test_an_absurd_norm_is_refused_when_the_usual_one_is_known(house, member):
    for _ in range(3):
        member.work(1e-3)
    lease, before = member.lease(), house.facts()
    refused(member.send(lease, member.payload(lease, 0.2)), 422, "norm", "times the recent median")
    assert house.facts() == before


def test_an_update_sent_twice_is_merged_once_and_the_receipt_says_so(house, member):
    lease = member.lease()
    data = member.payload(lease)
    first = UpdateReceipt.model_validate(member.send(lease, data).json())
    before = house.facts()
    again = UpdateReceipt.model_validate(member.submit(member.notice(lease, data)).json())
    assert (first.duplicate, again.duplicate) == (False, True)
    assert again.update == first.update
    assert house.facts() == before


def test_an_update_copied_from_another_worker_is_refused(house, member, another_member):
    lease, own = member.lease(), another_member.lease()
    data = member.payload(lease)
    assert member.send(lease, data).status_code == 200
    before = house.facts()
    refused(another_member.send(own, data), 409, "copied", "send this lease's update")
    assert house.facts() == before


def test_a_second_update_for_one_lease_is_refused(house, member, another_member):
    lease = member.lease()
    another_member.lease()  # keeps the round open
    assert member.send(lease, member.payload(lease)).status_code == 200
    before = house.facts()
    refused(member.send(lease, member.payload(lease, 2e-3)), 409, "reported", "ask for a new lease")
    assert house.facts() == before


def test_an_update_too_far_behind_is_refused_with_the_remedy(house, member, another_member):
    late = another_member.lease()
    data = another_member.payload(late, 2e-3)
    house.now_s += 5000
    for _ in range(2):
        member.work()
    another_member.upload(late.lease, data)
    before = house.facts()
    refused(another_member.submit(another_member.notice(late, data)), 409, "stale", "fetch the block again")
    assert house.facts() == before
    assert house.refusals() == ["stale"]


def test_an_update_one_version_behind_is_merged_with_less_weight(house, member, another_member):
    late = another_member.lease()
    data = another_member.payload(late, 2e-3)
    house.now_s += 5000
    member.work()
    receipt = another_member.send(late, data).json()
    assert receipt["lag"] == 1
    assert receipt["weight"] < late.steps * house.spec.step_tokens
