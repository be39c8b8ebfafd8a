"""Which blobs come with a lease."""

import pytest

from blocktrain.swarm.coordinator import attaching
from blocktrain.wire.attached import HOLDS_HEADER, Held, read_attached
from blocktrain.wire.messages import TrainLease
from blocktrain.wire.recipes import read_recipe

VECTOR = {"swarm.update": "vector", "swarm.update_ratio": 20.0, "swarm.min_updates": 2}


def asked(member, held: Held):
    """The lease, and the hashes of what came with it."""
    answer = member.house.ask("POST", "/v1/leases", json=member.request(), headers={HOLDS_HEADER: held.header()})
    if answer.headers["content-type"] == "application/json":
        return TrainLease.model_validate(answer.json()), []
    lease, contents = read_attached(answer.content)
    return lease, [*contents]


def versions(lease):
    return frozenset((version.block, version.version) for version in lease.trained)


def test_initial_blocks_do_not_come_with_a_lease_since_workers_make_them(member):
    assert asked(member, Held())[1] == []


def test_who_holds_nothing_gets_whole_versions(member):
    member.work()
    lease, came = asked(member, Held())
    assert came == [version.tensors.sha256 for version in lease.trained]


def test_who_holds_the_versions_of_the_lease_gets_nothing(member):
    member.work()
    lease, _ = asked(member, Held())
    assert asked(member, Held(versions(lease)))[1] == []


def test_who_holds_the_version_before_gets_the_difference(member):
    held = Held(versions(member.lease()))
    member.work()
    lease, came = asked(member, held)
    assert {*came} == {version.from_previous.sha256 for version in lease.trained}


def test_a_recipe_comes_with_the_updates_of_the_others(new_house):
    house = new_house(**VECTOR)
    members = [house.member(), house.member()]
    leases = [member.lease() for member in members]
    sent = [member.payload(lease, step) for member, lease, step in zip(members, leases, (1e-3, 2e-3), strict=True)]
    for member, lease, payload in zip(members, leases, sent, strict=True):
        member.send(lease, payload)
    hashes = [each.update.id for each in house.ledger.contributions()]
    lease, came = asked(members[0], Held(versions(leases[0]), frozenset(hashes[:1])))
    ways = {version.from_previous.sha256 for version in lease.trained}
    assert {*came} == ways | {hashes[1]}
    assert {each.payload.sha256 for each in read_recipe(house.blobs.get(ways.pop())).updates} == {*hashes}


def test_what_is_large_is_left_to_be_fetched(member, monkeypatch):
    member.work()
    lease = member.lease()
    first, *others = [version.tensors for version in lease.trained]
    monkeypatch.setattr(attaching, "MAX_ATTACHED_BYTES", first.num_bytes)
    assert others
    assert asked(member, Held())[1] == [first.sha256]


def test_a_damaged_blob_is_left_to_be_asked_for(house, member):
    member.work()
    lease = member.lease()
    first, *others = [version.tensors for version in lease.trained]
    path = house.folder / "blobs" / "blobs" / first.sha256
    path.write_bytes(bytes(path.stat().st_size))
    assert [*attaching.attached(lease, Held(), house.blobs)] == others


@pytest.mark.parametrize("holds", [{}, {HOLDS_HEADER: "held"}])
def test_what_comes_with_a_lease_counts_as_the_workers_traffic(house, member, holds):
    member.work()
    answer = house.ask("POST", "/v1/leases", json=member.request(), headers=holds)
    whole = sum(version.tensors.num_bytes for version in member.lease().trained)
    assert house.coordinator.watching.traffic.totals()[1].get(member.id, 0) == (whole if holds else 0)
    assert answer.status_code == 200
