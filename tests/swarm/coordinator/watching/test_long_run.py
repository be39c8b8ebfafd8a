"""A run with more evaluations than one page of the ledger keeps its first ones where people read its history."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from blocktrain.cli.shared.story import save_story, story_of_export, story_of_ledger
from blocktrain.swarm.ledger.database import PAGE
from blocktrain.swarm.signatures import sign
from blocktrain.wire.messages import EvaluationNotice, Sample

NUM_EVALUATIONS = PAGE + 5


@pytest.fixture
def long_run(house, member):
    """Each version was evaluated, and is a little better than the one before."""
    member.work()
    for number in range(NUM_EVALUATIONS):
        house.now_s += 1
        lease = house.ledger.grant_evaluation(member.id, {0: number, 1: number}, 0.0, 1e9)
        loss = 3.0 - number / 100
        notice = EvaluationNotice(
            lease=str(lease.id),
            worker=member.id,
            scores=({"path": "stack", "reading": "combined", "nats_per_byte": loss},),
            combine={},
            samples=(Sample(prompt="In the ", text=f"end {number}"),),
        )
        body = sign(notice, member.key, house.run).model_dump(mode="json")
        assert house.ask("POST", "/v1/evaluations", json=body).status_code == 204
    return house


def losses(story) -> list[float]:
    return [each["scores"][-1]["nats_per_byte"] for each in story.evaluations]


def test_the_first_sample_keeps_its_loss(long_run):
    shown = long_run.ask("GET", "/v1/status").json()["samples"]
    assert shown[0]["nats_per_byte"] == 3.0


def test_the_history_of_a_coordinator_and_of_an_export_begins_with_the_first_evaluation(long_run, tmp_path):
    told = story_of_ledger(long_run.folder)
    assert (len(told.evaluations), losses(told)[0]) == (NUM_EVALUATIONS, 3.0)
    assert told.samples[0]["nats_per_byte"] == 3.0
    client = SimpleNamespace(
        status=lambda: long_run.ask("GET", "/v1/status").json(),
        curves=lambda: long_run.ask("GET", "/v1/curves").json(),
        contributions=lambda after: [],
    )
    save_story(client, tmp_path)
    exported = story_of_export(tmp_path, long_run.spec)
    assert losses(exported) == losses(told)
