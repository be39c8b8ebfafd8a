"""A liar who evaluates breaks neither the model that people get, nor the curves: a real coordinator and its ledger."""

from __future__ import annotations

import pytest

from blocktrain.swarm.signatures import sign
from blocktrain.wire.messages import EvaluateLease, EvaluationNotice

TRUE = {"combined": 2.0, "last": 2.1, "weights": (0.25, 0.75)}
WORSE = {"combined": 0.01, "last": 0.02, "weights": (90.0, -90.0)}


@pytest.fixture
def evaluated(new_house):
    """A run of two blocks after its first round, whose composed model is due."""
    house = new_house(**{"model.blocks": 2, "swarm.evaluate_every": 2})
    house.member().work()
    return house


def lease_of(house, member) -> EvaluateLease:
    answer = house.ask("POST", "/v1/leases", json=member.request()).json()
    return EvaluateLease.model_validate(answer)


def report(house, member, lease, combined, last, weights) -> int:
    scores = tuple(
        {"path": "stack", "reading": reading, "nats_per_byte": nats}
        for reading, nats in (("last", last), ("combined", combined))
    )
    notice = EvaluationNotice(lease=lease.lease, worker=member.id, scores=scores, combine={"stack": weights})
    return house.ask(
        "POST", "/v1/evaluations", json=sign(notice, member.key, house.run).model_dump(mode="json")
    ).status_code


def combine(house) -> dict:
    return house.ask("GET", "/v1/manifest").json()["combine"]


def test_two_workers_evaluate_each_model_and_a_third_only_if_they_disagree(evaluated):
    first, second, third = (evaluated.member() for _ in range(3))
    leases = lease_of(evaluated, first), lease_of(evaluated, second)
    assert leases[0].blocks == leases[1].blocks
    assert evaluated.ask("POST", "/v1/leases", json=third.request()).json()["kind"] == "train"
    for member, lease in zip((first, second), leases, strict=True):
        assert report(evaluated, member, lease, **TRUE) == 204
    assert combine(evaluated) == {"stack": [0.25, 0.75]}
    assert evaluated.ask("GET", "/v1/status").json()["evaluations"][-1]["confirmed"] is True


def test_one_liar_cannot_break_the_model_or_its_curve(evaluated):
    liar, second, third = (evaluated.member() for _ in range(3))
    assert report(evaluated, liar, lease_of(evaluated, liar), **WORSE) == 204
    assert combine(evaluated) == {}  # nobody has confirmed it, and it could do harm
    assert report(evaluated, second, lease_of(evaluated, second), **TRUE) == 204
    assert combine(evaluated) == {}
    assert evaluated.ask("GET", "/v1/curves").json()["held_out"] == []
    assert report(evaluated, third, lease_of(evaluated, third), **TRUE) == 204
    assert combine(evaluated) == {"stack": [0.25, 0.75]}
    assert [x["nats_per_byte"] for x in evaluated.ask("GET", "/v1/curves").json()["held_out"]] == [2.0]


def test_who_asks_for_an_evaluation_and_never_reports_keeps_nobody_from_evaluating(evaluated):
    silent, honest = evaluated.member(), evaluated.member()
    lease_of(evaluated, silent)
    assert report(evaluated, honest, lease_of(evaluated, honest), **TRUE) == 204
    assert combine(evaluated) == {"stack": [0.25, 0.75]}


def test_a_worker_that_died_while_it_evaluated_keeps_no_later_model_from_being_evaluated(evaluated):
    dead, honest = evaluated.member(), evaluated.member()
    lease = lease_of(evaluated, dead)
    assert report(evaluated, honest, lease_of(evaluated, honest), **TRUE) == 204
    for _ in range(4):
        honest.work()
    assert lease_of(evaluated, honest).blocks != lease.blocks


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0, 0.0), (1.0, 1e8), ()])
def test_weights_that_do_not_fit_the_model_are_refused(evaluated, weights):
    member = evaluated.member()
    assert report(evaluated, member, lease_of(evaluated, member), 2.0, 2.1, weights) == 422
    assert combine(evaluated) == {}
