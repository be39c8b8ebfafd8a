"""What an admin does about liars: bans, rollbacks of a block and of one contributor, and a limit of keys per token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.coordinator.initial_files import initial_block_file, initial_blocks_folder
from blocktrain.swarm.verify import VerifyReport, verify
from blocktrain.wire.safetensors import decode, encode


def order(house: Any, path: str, role: str = "admin", **fields: Any) -> Any:
    return house.ask("POST", f"/v1/{path}", role, json=fields)


def newest(house: Any) -> dict[int, int]:
    return {block: version.version for block, version in house.ledger.newest().items()}


def tensors(house: Any, block: int = 0) -> dict[str, np.ndarray]:
    return decode(house.blobs.get(house.ledger.newest()[block].sha256))[0]


def verified(house: Any) -> VerifyReport:
    """Everything that the run's folder holds."""
    run = house.ledger.run()
    folder = initial_blocks_folder(house.folder, run.spec_digest)
    folder.mkdir(parents=True, exist_ok=True)
    for block in range(house.spec.model.blocks):
        initial_block_file(folder, block).write_bytes(encode(house.coordinator._blocks.initial_block(block)))
    return verify(house.folder)


def excluded(house: Any, member: Any) -> str | None:
    answer = house.ask("POST", "/v1/leases", json=member.request())
    return answer.json()["message"] if answer.status_code == 403 else None


@pytest.mark.parametrize(
    "called", [lambda key: key, lambda key: key[:12].upper(), alias_of], ids=["key", "start", "alias"]
)
def test_a_banned_worker_gets_no_work_and_reads_why_until_the_ban_is_lifted(house, member, called):
    member.work()
    assert order(house, "bans", worker=called(member.id), reason="broken device").status_code == 200
    assert "is banned: broken device; if you think" in excluded(house, member)
    states = [(x["state"], x["why"]) for x in house.ask("GET", "/v1/status").json()["workers"]]
    assert states == [("banned", "broken device")]
    assert order(house, "bans", worker=called(member.id), lifted=True).status_code == 200
    assert excluded(house, member) is None
    assert [x.kind for x in house.ledger.events() if x.kind in ("banned", "lifted")] == ["banned", "lifted"]


@pytest.mark.parametrize(
    "path, fields, said",
    [
        ("bans", {"worker": "nobody"}, 'no worker is called "nobody"'),
        ("bans", {"worker": "nobody", "lifted": True}, "no worker is called"),
        ("rollbacks", {}, "give a block and a version"),
        ("rollbacks", {"block": 3, "version": 0}, "block 3 is not being trained now"),
        ("rollbacks", {"block": 0, "version": 9}, "version 9 of block 0 is not an earlier version"),
        ("rollbacks", {"without": "nobody"}, "no worker is called"),
    ],
)
def test_orders_that_cannot_be_done_say_why(house, member, path, fields, said):
    member.work()
    answer = order(house, path, **fields)
    assert (answer.status_code, answer.json()["code"]) == (422, "order")
    assert said in answer.json()["message"]


@pytest.mark.parametrize("path", ["bans", "rollbacks"])
def test_only_admins_give_orders(house, path):
    assert order(house, path, role="worker", worker="x").status_code == 403


def test_a_block_returns_to_a_kept_version_and_the_steps_are_trained_again(house, member):
    for step in (1e-3, 2e-3, 3e-3):
        member.work(step)
    wanted = house.ledger.version(0, 1)
    assert order(house, "rollbacks", block=0, version=1).status_code == 200
    assert newest(house) == {0: 4, 1: 4}
    assert house.ledger.newest()[0].sha256 == wanted.sha256
    assert house.ledger.phases()[0].step == house.spec.swarm.round_steps
    member.work(4e-3)
    assert newest(house) == {0: 5, 1: 5}
    report = verified(house)
    assert (report.faults, report.versions) == ([], 10)


def test_what_waits_and_what_was_leased_before_a_rollback_is_not_merged(new_house):
    house = new_house(**{"swarm.min_updates": 2})
    early, slow = house.member(), house.member()
    leases = [early.lease(), slow.lease()]
    for member, lease, step in zip((early, slow), leases, (1e-3, 2e-3), strict=True):
        member.send(lease, member.payload(lease, step))
    waiting, late = early.lease(), slow.lease()
    early.send(waiting, early.payload(waiting, 3e-3))
    assert order(house, "rollbacks", block=0, version=0).status_code == 200
    answer = slow.send(late, slow.payload(late, 4e-3))
    assert (answer.status_code, answer.json()["code"]) == (409, "stale")
    assert list(house.ledger.left_out().values()) == ["an admin returned to version 0 of block 0"]
    assert house.ledger.waiting_updates(0) == ()


def test_what_one_worker_contributed_is_removed_and_the_rest_stays(new_house):
    """Two workers move every weight by their steps. Without the liar, only the honest steps are left."""
    house = new_house(**{"swarm.min_updates": 2, "swarm.averaging": "mean", "swarm.download": "fp32"})
    honest, liar = house.member(), house.member()
    before = tensors_before = {name: x.copy() for name, x in house.coordinator._blocks.initial_block(0).items()}
    for round in range(2):
        leases = [honest.lease(), liar.lease()]
        for member, lease, step in zip((honest, liar), leases, (1e-3 + round * 1e-4, -1.0), strict=True):
            assert member.send(lease, member.payload(lease, step)).status_code == 200
    assert max(float(np.abs(tensors(house)[name] - before[name]).max()) for name in before) > 0.5
    assert order(house, "rollbacks", without=liar.id).status_code == 200
    for name, tensor in tensors(house).items():
        assert np.allclose(tensor, tensors_before[name] - 2.1e-3, atol=1e-5)
    assert newest(house) == {0: 3, 1: 3}
    report = verified(house)
    assert (report.faults, report.versions) == ([], 6)


def test_a_version_that_no_rollback_gives_is_found(house, member):
    for step in (1e-3, 2e-3):
        member.work(step)
    order(house, "rollbacks", block=0, version=1)
    with house.ledger.database.writing() as connection:
        connection.exec_driver_sql("UPDATE rollbacks SET source = 0")
    assert "is not what its rollback gives" in " ".join(fault.text for fault in verified(house).faults)


def test_one_access_token_brings_only_so_many_keys(new_house):
    house = new_house(**{"swarm.keys_per_token": 2})
    members = [house.member() for _ in range(3)]
    answers = [house.ask("POST", "/v1/leases", json=member.request()) for member in members]
    assert [answer.status_code for answer in answers] == [200, 200, 403]
    assert answers[2].json()["code"] == "keys"
    assert house.ask("POST", "/v1/leases", json=members[0].request()).status_code == 200
    assert house.ask("POST", "/v1/leases", role="admin", json=members[2].request()).status_code == 200
    assert len(house.ledger.workers()) == 3
