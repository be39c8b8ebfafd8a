"""Audits against a real coordinator: a second worker gets the lease again, two that agree decide, and a liar's updates
are left out. Members send honest updates that move every weight by a step, and lies that move it the other way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

from blocktrain.swarm.coordinator.initial_files import initial_block_file, initial_blocks_folder
from blocktrain.swarm.verify import verify
from blocktrain.wire.messages import TrainLease
from blocktrain.wire.safetensors import encode

ALWAYS = {
    "swarm.audit_share": 1.0,
    "swarm.audit_newcomer_share": 1.0,
    "swarm.min_updates": 3,
    "swarm.round_steps": 10,
    "train.steps": 200,
}


@pytest.fixture
def audited(new_house: Callable[..., Any]) -> Any:
    return new_house(**ALWAYS)


def steps_of(lease: TrainLease) -> float:
    """What an honest member does in this lease: a function of its shard and its steps."""
    return 1e-3 * (1 + 0.01 * lease.shard) + 1e-6 * lease.step_start


def is_audit(lease: TrainLease) -> bool:
    return lease.lease.count("-") == 3


def work(member: Any, lie: float = 1.0) -> TrainLease:
    """One lease, whatever it is for."""
    lease = member.lease()
    answer = member.send(lease, member.payload(lease, lie * steps_of(lease)))
    assert answer.status_code == 200, answer.text
    return lease


def one_round(members: Sequence[Any], lies: Sequence[float] = ()) -> list[TrainLease]:
    """All lease, then all send: the round is merged, and every update is audited."""
    leases = [member.lease() for member in members]
    for member, lease, lie in zip(members, leases, [*lies, *[1.0] * len(members)], strict=False):
        assert member.send(lease, member.payload(lease, lie * steps_of(lease))).status_code == 200
    return leases


def kinds(house: Any) -> list[str]:
    return [event.kind for event in house.ledger.events()]


def outcomes(house: Any) -> list[str | None]:
    return [audit.outcome for audit in house.ledger.audits()]


def test_a_second_worker_gets_the_lease_again_and_need_not_know_it(audited):
    members = [audited.member() for _ in range(3)]
    leases = one_round(members)
    again = work(members[0])
    first = next(x for x in leases if x.shard == again.shard)
    assert is_audit(again)
    assert (again.phase, again.step_start, again.steps) == (first.phase, first.step_start, first.steps)
    assert (again.trained, again.below, again.ahead) == (first.trained, first.below, first.ahead)
    assert outcomes(audited).count("passed") == 1
    assert again.model_dump().keys() == first.model_dump().keys()


def test_whether_an_update_is_audited_is_drawn_when_it_has_come_and_not_before(audited, monkeypatch):
    """A worker that knew it before would lie in the others. What it is asked to audit it may recognise."""
    sent, drawn = list[str](), list[int]()
    monkeypatch.setattr(audited.coordinator._auditing, "_chance", lambda: drawn.append(len(sent)) or 0.0)
    members = [audited.member() for _ in range(3)]
    leases = [member.lease() for member in members]
    for member, lease in zip(members, leases, strict=True):
        payload = member.payload(lease, steps_of(lease))
        assert len(drawn) == len(sent)
        sent.append(lease.lease)
        member.send(lease, payload)
    assert drawn == [1, 2, 3]


def test_a_worker_that_is_alone_keeps_its_optimiser_state_and_is_not_audited(new_house):
    house = new_house(**ALWAYS | {"swarm.min_updates": 1})
    alone = house.member()
    assert [work(alone).afresh for _ in range(3)] == [True, False, False]  # nothing is kept before a first round
    assert len(house.ledger.audits()) == 1


def test_leases_start_afresh_as_soon_as_an_earlier_round_has_an_update_of_another_worker(new_house):
    house = new_house(**ALWAYS | {"swarm.min_updates": 1})
    ada, bob = house.member(), house.member()
    work(ada)
    lease = ada.lease()
    assert not lease.afresh
    assert bob.lease().afresh  # in the same round: ada's first update is its company
    assert not ada.lease().afresh  # renewed: what it was told before holds


@pytest.mark.parametrize("late, merged", [(False, False), (True, True)])
def test_a_round_waits_until_its_deadline_for_workers_that_compute_audits(new_house, late, merged):
    house = new_house(**ALWAYS | {"swarm.min_updates": 1})
    honest, newcomer = [house.member() for _ in range(4)], house.member()
    one_round(honest)
    assert all(is_audit(member.lease()) for member in honest)
    lease, before = newcomer.lease(), house.weights()
    assert newcomer.send(lease, newcomer.payload(lease)).status_code == 200
    house.now_s += lease.time_left_s + 1 if late else 0.0
    house.settle()
    assert (house.weights() != before) == merged


def test_who_has_computed_an_audit_joins_the_round_that_waited_for_it(new_house):
    """It was told that the round was being merged, or computed the next audit, until liars were most of the round."""
    house = new_house(**ALWAYS | {"swarm.min_updates": 1})
    honest, newcomer = [house.member() for _ in range(4)], house.member()
    one_round(honest)
    audits = [member.lease() for member in honest]
    lease = newcomer.lease()
    assert newcomer.send(lease, newcomer.payload(lease)).status_code == 200
    for member, audit in zip(honest, audits, strict=True):
        assert member.send(audit, member.payload(audit, steps_of(audit))).status_code == 200
    joined = honest[0].lease()
    assert not is_audit(joined)
    assert (joined.trained, joined.shard) == (lease.trained, lease.shard + 1)


@pytest.mark.parametrize("lie, merged", [(1.0, True), (-1.0, False)])
def test_in_a_dispute_a_round_waits_for_a_worker_that_computes_an_audit(new_house, lie, merged):
    """Liars that send audits of others at once are most of the rounds in which honest workers compute these audits."""
    house = new_house(**ALWAYS | {"swarm.min_updates": 1})
    members, newcomers = [house.member() for _ in range(4)], [house.member() for _ in range(9)]
    one_round(members)
    work(members[0], lie=lie)
    assert is_audit(members[1].lease())
    before = house.weights()
    one_round(newcomers)
    assert (house.weights() != before) == merged


def test_no_key_audits_another_of_its_own_participant(audited):
    audited.ledger.add_access_token("eve", "worker", "eves-token", 0.0)
    eves = [audited.member() for _ in range(3)]
    for member in eves:
        audited.ask("POST", "/v1/leases", role="eves-token", json=member.request())
    one_round(eves)
    assert len(audited.ledger.open_audits()) == 3
    answers = [audited.ask("POST", "/v1/leases", json=member.request()).json() for member in eves]
    assert not any(is_audit(TrainLease.model_validate(answer)) for answer in answers)


def test_audits_of_honest_workers_all_pass_and_nobody_is_excluded(audited):
    members = [audited.member() for _ in range(3)]
    one_round(members)
    for member in (*members, members[0]):
        work(member)
    assert outcomes(audited)[:3] == ["passed"] * 3
    assert not any(standing.excluded for standing in audited.ledger.key_standings().values())


def test_a_liar_is_quarantined_when_most_others_contradict_it(audited):
    liar, *honest = members = [audited.member() for _ in range(3)]
    one_round(members, lies=[-1.0])
    for number in count():
        work(honest[number % 2])
        if "quarantined" in kinds(audited):
            break
        assert number < 8
    standing = audited.ledger.key_standing(liar.id)
    assert standing.excluded == "quarantined"
    assert "is not what most other workers computed" in standing.reason
    assert "disputed" in kinds(audited)
    answer = audited.ask("POST", "/v1/leases", json=liar.request())
    assert answer.status_code == 403
    assert (answer.json()["code"], standing.reason in answer.json()["message"]) == ("excluded", True)
    assert not any(audited.ledger.key_standing(member.id).excluded for member in honest)


def test_a_liar_that_audits_an_honest_worker_is_quarantined_and_not_the_honest_one(audited):
    honest = [audited.member() for _ in range(3)]
    one_round(honest)
    accuser = honest[2]
    lease = work(accuser, lie=-1.0)
    assert is_audit(lease)
    disputed = next(audit for audit in audited.ledger.audits() if audit.reports)
    assert audited.ledger.key_standing(disputed.update.worker).suspected
    assert audited.ledger.key_standing(accuser.id).suspected
    for _ in range(4):
        work(next(x for x in honest[:2] if x.id != disputed.update.worker))
        if audited.ledger.key_standing(accuser.id).excluded:
            break
    assert audited.ledger.key_standing(accuser.id).excluded == "quarantined"
    assert audited.ledger.audit(disputed.number).outcome == "passed"
    assert not audited.ledger.key_standing(disputed.update.worker).excluded


def test_what_an_excluded_worker_sent_and_is_not_merged_is_left_out(audited):
    liar, *honest = members = [audited.member() for _ in range(4)]
    lied = liar.lease()
    leases = [member.lease() for member in honest]
    liar.send(lied, liar.payload(lied, -1e-3))
    audited.ledger.exclude(liar.id, "quarantined", "for this test", audited.now_s)
    for member, lease in zip(honest, leases, strict=True):
        assert member.send(lease, member.payload(lease, steps_of(lease))).status_code == 200
    merged = audited.ledger.merged_updates(0, 0)
    assert {update.worker for update in merged} == {member.id for member in honest}
    assert list(audited.ledger.left_out().values()) == ["quarantined: for this test"]
    assert len(members) == len(merged) + 1


def test_every_report_of_an_audit_is_signed_by_its_worker(audited):
    members = [audited.member() for _ in range(3)]
    one_round(members)
    work(members[0])
    initial = initial_blocks_folder(audited.folder, audited.ledger.run().spec_digest)
    initial.mkdir(parents=True)
    for block in range(audited.spec.model.blocks):
        initial_block_file(initial, block).write_bytes(encode(audited.coordinator._blocks.initial_block(block)))
    report = verify(audited.folder)
    assert (report.faults, report.signatures) == ([], 4)
    with audited.ledger.database.writing() as connection:
        connection.exec_driver_sql("UPDATE audit_leases SET loss = 1.0 WHERE payload IS NOT NULL")
    assert [fault.kind for fault in verify(audited.folder).faults] == ["signature"]


def test_an_audit_must_repeat_every_step(audited):
    members = [audited.member() for _ in range(3)]
    one_round(members)
    lease = members[0].lease()
    assert is_audit(lease)
    fewer = {"steps": lease.steps - 1, "tokens": (lease.steps - 1) * audited.spec.step_tokens}
    answer = members[0].send(lease, members[0].payload(lease), **fewer)
    assert (answer.status_code, answer.json()["code"]) == (422, "steps")


def test_the_lease_of_an_audit_belongs_to_one_worker_and_is_reported_once(audited):
    members = [audited.member() for _ in range(3)]
    one_round(members)
    lease = members[0].lease()
    data = members[0].payload(lease, steps_of(lease))
    assert members[1].send(lease, data).json()["code"] == "owner"
    receipts = [members[0].send(lease, data).json() for _ in range(2)]
    assert [(x["weight"], x["duplicate"]) for x in receipts] == [(0.0, False), (0.0, True)]


def test_audits_on_versions_that_are_deleted_end_without_an_outcome(new_house):
    house = new_house(**(ALWAYS | {"swarm.min_updates": 1, "swarm.keep_versions": 4}))
    gone, left = house.member(), house.member()
    work(gone)
    for _ in range(7):  # the first of them is the audit of the other's update
        work(left)
    assert outcomes(house)[:3] == ["passed", "undecided", "undecided"]
    assert outcomes(house)[-1] is None


def test_what_open_audits_compare_is_not_deleted(audited):
    members = [audited.member() for _ in range(3)]
    one_round(members)
    lease = work(members[0], lie=-1.0)
    disputed = next(audit for audit in audited.ledger.audits() if audit.reports)
    live = audited.ledger.live_blobs(audited.spec.swarm.keep_versions)
    assert {disputed.update.id, disputed.asked[0].payload} <= live
    assert disputed.asked[0].id == lease.lease
