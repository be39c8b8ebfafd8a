"""Verify from outside, against a real coordinator: a version that is not what its updates give is found, and so is an
update with another's signature."""

from __future__ import annotations

import httpx
import pytest

from blocktrain.swarm.verify_invite import verify_invite
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.invite import Invite


class InHouse(httpx.BaseTransport):
    def __init__(self, house) -> None:
        self._house = house

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        asked = self._house.ask(request.method, request.url.raw_path.decode(), headers=dict(request.headers))
        return httpx.Response(asked.status_code, headers=asked.headers, content=asked.content)


@pytest.fixture
def client(house) -> CoordinatorClient:
    member = house.member()
    for _ in range(3):
        member.work()
    return CoordinatorClient(Invite("coordinator.test", 80, "worker"), transport=InHouse(house))


def change(house, statement: str) -> None:
    with house.ledger.database.writing() as connection:
        connection.exec_driver_sql(statement)


def test_a_run_as_it_should_be_has_no_faults_and_every_round_is_merged_again(client):
    report = verify_invite(client)
    assert (report.faults, report.updates, report.signatures) == ([], 3, 3)
    assert (report.versions, report.not_merged_again, report.blobs) == (6, 0, 2)
    assert report.not_seen


@pytest.mark.parametrize(
    "statement, kind",
    [
        ("UPDATE updates SET loss = 4.0 WHERE number = 2", "signature"),
        ("UPDATE merge_weights SET scale = 0.5 WHERE number = 2", "version"),
    ],
)
def test_what_was_changed_afterwards_is_found_from_outside(house, client, statement, kind):
    change(house, statement)
    assert {fault.kind for fault in verify_invite(client).faults} == {kind}


def test_rounds_whose_updates_are_gone_are_counted_and_no_fault(house, client):
    update = house.ledger.merged_updates(0, 1)[0]
    house.blobs.delete(update.id)
    report = verify_invite(client)
    assert (report.faults, report.not_merged_again) == ([], 1)
