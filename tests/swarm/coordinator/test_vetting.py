"""Vetting against a real coordinator: workers that were drawn score the updates of a round, what hurts is left out with
the reason, and no lying or silent scorer stops the round. Members send honest updates that move every weight by a step,
and lies that move it the other way; honest scores say which is which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from blocktrain.swarm.coordinator.initial_files import initial_block_file, initial_blocks_folder
from blocktrain.swarm.signatures import sign
from blocktrain.swarm.verify import verify
from blocktrain.wire.messages import TrainLease, VetLease, VetNotice, Wait
from blocktrain.wire.safetensors import encode

SETTINGS = {"swarm.vetting": True, "swarm.averaging": "mean", "swarm.min_updates": 4, "train.steps": 200}


@pytest.fixture
def vetted(new_house: Callable[..., Any]) -> Any:
    return new_house(**SETTINGS)


def ask(member: Any) -> TrainLease | VetLease | Wait:
    answer = member.house.ask("POST", "/v1/leases", json=member.request()).json()
    return {"train": TrainLease, "vet": VetLease, "wait": Wait}[answer["kind"]].model_validate(answer)


def one_round(members: Sequence[Any], liars: int = 0) -> list[str]:
    """All lease, then all send. The ids of the lies."""
    lies = []
    for number, (member, lease) in enumerate([(member, member.lease()) for member in members]):
        data = member.payload(lease, (-1e-3 if number < liars else 1e-3) * (1 + 0.01 * number))
        answer = member.send(lease, data)
        assert answer.status_code == 200, answer.text
        lies += [answer.json()["update"]] if number < liars else []
    return lies


def score(member: Any, asked: VetLease, lies: Sequence[str], **changes: Any) -> Any:
    """Honest scores: each update changes the loss by 0.1, a lie for the worse."""
    hurts = [update.payload.sha256 in lies for update in asked.updates]
    said = {
        "lease": asked.lease,
        "base": 3.0,
        "together": 2.9,
        "alone": tuple(3.1 if hurt else 2.9 for hurt in hurts),
        "without": tuple(2.88 if hurt else 2.92 for hurt in hurts),
    }
    notice = VetNotice(worker=member.id, **{**said, **changes})
    signed = sign(notice, member.key, member.run)
    return member.house.ask("POST", "/v1/vettings", json=signed.model_dump(mode="json"))


def all_score(members: Sequence[Any], lies: Sequence[str], liars: Sequence[Any] = ()) -> int:
    """Every worker that is asked scores; these liars say the opposite. How many were asked."""
    asked = 0
    for member in members:
        if isinstance(lease := ask(member), VetLease):
            asked += 1
            told = [x.payload.sha256 for x in lease.updates if (x.payload.sha256 in lies) != (member in liars)]
            assert score(member, lease, told).status_code == 204
    return asked


def one_comes_later(members: Sequence[Any]) -> str:
    """The last member's update arrives while those of the others are scored."""
    leases, house = [member.lease() for member in members], members[0].house
    for number, (member, lease) in enumerate(zip(members, leases, strict=True)):
        if member is members[-1]:
            house.now_s = house.ledger.open_rounds()[0].deadline_at_s + 1
            house.settle()
        answer = member.send(lease, member.payload(lease, 1e-3 * (1 + 0.01 * number)))
    return str(answer.json()["update"])


def merged(house: Any) -> dict[str, float]:
    return {weight.update: weight.weight for weight in house.ledger.merge_weights(0, 0)}


def test_an_update_that_hurts_is_left_out_and_everybody_can_read_why(vetted):
    members = [vetted.member() for _ in range(5)]
    lies = one_round(members, liars=1)
    assert vetted.weights().keys() == {(0, 0), (1, 0)}, "nothing is merged before it was scored"
    assert "score its 5 updates" in vetted.coordinator.watching.status()["phases"][0]["round"]["reason"]
    assert all_score(members, lies) == 3
    weights = merged(vetted)
    assert [id for id, weight in weights.items() if not weight] == lies
    events = {event.kind: event for event in vetted.ledger.events()}
    assert "alone it raises the held-out loss by 0.1000 (3 of 3 workers agree)" in events["left out"].text
    assert events["left out"].data["worker"] == members[0].id
    assert "1 of 5 updates hurt" in events["vetted"].text


def test_without_liars_every_update_counts(vetted):
    members = [vetted.member() for _ in range(4)]
    one_round(members)
    all_score(members, [])
    assert len(merged(vetted)) == 4
    assert all(merged(vetted).values())


def test_only_drawn_workers_score_at_first_and_asking_often_gives_no_seat(vetted):
    members = [vetted.member() for _ in range(6)]
    one_round(members)
    (vetting,) = vetted.ledger.vettings(0, 0)
    others = [member for member in members if member.id not in vetting.chosen]
    assert len(vetting.chosen) == 3
    assert not any(isinstance(ask(member), VetLease) for member in others for _ in range(2))
    assert all(isinstance(ask(member), VetLease) for member in members if member.id in vetting.chosen)


def test_a_lying_scorer_is_contradicted_and_asked_no_more(vetted):
    members = [vetted.member() for _ in range(6)]
    lies = one_round(members, liars=1)
    (vetting,) = vetted.ledger.vettings(0, 0)
    liar = next(member for member in members if member.id in vetting.chosen)
    rest = [member for member in members if member is not liar]
    all_score([liar, *rest], lies, liars=[liar])
    all_score(rest, lies)
    assert [id for id, weight in merged(vetted).items() if not weight] == lies
    assert vetted.ledger.contradicted_scorers() == {liar.id}
    one_round(members)
    (following,) = vetted.ledger.vettings(0, 1)
    assert liar.id not in following.chosen


def test_silent_scorers_do_not_stop_a_round(vetted):
    members = [vetted.member() for _ in range(4)]
    one_round(members, liars=1)
    for member in members:
        ask(member)
    (vetting,) = vetted.ledger.vettings(0, 0)
    vetted.now_s = vetting.deadline_at_s
    vetted.settle()
    assert all(merged(vetted).values())
    assert len(merged(vetted)) == 4
    (closed,) = vetted.ledger.vettings(0, 0)
    assert closed.verdict["outcome"] == "undecided"


def test_scorers_that_vanish_are_replaced_by_anyone_after_a_while(vetted):
    members = [vetted.member() for _ in range(6)]
    lies = one_round(members, liars=1)
    (vetting,) = vetted.ledger.vettings(0, 0)
    others = [member for member in members if member.id not in vetting.chosen]
    vetted.now_s = vetting.opened_s + 0.3 * (vetting.deadline_at_s - vetting.opened_s)
    assert all_score(others, lies) == 3
    assert [id for id, weight in merged(vetted).items() if not weight] == lies


def test_what_arrives_while_a_round_is_scored_is_merged_in_the_next(vetted):
    members = [vetted.member() for _ in range(5)]
    update = one_comes_later(members)
    all_score(members, [])
    assert update not in merged(vetted)
    assert [x.id for x in vetted.ledger.waiting_updates(0)] == [update]


def test_in_the_last_round_of_a_phase_what_arrives_while_it_is_scored_is_left_out(new_house):
    house = new_house(**{**SETTINGS, "train.steps": 2})
    members = [house.member() for _ in range(5)]
    update = one_comes_later(members)
    all_score(members, [])
    assert merged(house)[update] == 0
    assert house.ledger.phases()[0].finished


def test_a_round_of_two_updates_is_merged_without_vetting(new_house):
    house = new_house(**{**SETTINGS, "swarm.min_updates": 2})
    one_round([house.member() for _ in range(2)])
    assert len(merged(house)) == 2


@pytest.mark.parametrize("changes, code", [({"alone": (3.0,)}, "scores"), ({"lease": "vet-99-x"}, "lease")])
def test_scores_that_do_not_fit_the_lease_are_refused(vetted, changes, code):
    members = [vetted.member() for _ in range(4)]
    one_round(members)
    asked = next((member, lease) for member in members if isinstance(lease := ask(member), VetLease))
    before = vetted.facts()
    assert score(*asked, [], **changes).json()["code"] == code
    assert vetted.facts() == before


def test_nobody_scores_for_another_worker_and_a_second_report_changes_nothing(vetted):
    members = [vetted.member() for _ in range(4)]
    lies = one_round(members, liars=1)
    member, lease = next((member, lease) for member in members if isinstance(lease := ask(member), VetLease))
    other = next(x for x in members if x is not member)
    assert score(other, lease, lies).json()["code"] == "lease"
    assert score(member, lease, lies).status_code == 204
    before = vetted.facts()
    assert score(member, lease, [], together=1.0).status_code == 204
    assert vetted.facts() == before


def test_verify_finds_every_score_signed_and_the_version_as_merged(vetted):
    members = [vetted.member() for _ in range(4)]
    all_score(members, one_round(members, liars=1))
    initial = initial_blocks_folder(vetted.folder, vetted.ledger.run().spec_digest)
    initial.mkdir(parents=True)
    for block in range(vetted.spec.model.blocks):
        initial_block_file(initial, block).write_bytes(encode(vetted.coordinator._blocks.initial_block(block)))
    report = verify(vetted.folder)
    assert (report.faults, report.signatures, report.versions) == ([], 4 + 3, 2)
    with vetted.ledger.database.writing() as connection:
        harmless = "json_set(losses, '$.alone', json('[2, 2, 2, 2]'), '$.without', json('[3, 3, 3, 3]'))"
        connection.exec_driver_sql(f"UPDATE vet_seats SET losses = {harmless}")
    assert {fault.kind for fault in verify(vetted.folder).faults} == {"signature", "vetting"}
