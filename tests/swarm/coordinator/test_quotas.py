"""What workers may store is bounded, garbage goes by time, and a full disk is said everywhere and frees itself."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from blocktrain.errors import RequestRefused, StorageError
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.loop import PRUNE_EVERY_S, UNWANTED_FULL_S, UNWANTED_S
from blocktrain.swarm.coordinator.quotas import GIB, Quotas, StorageLimits


def stored(house) -> int:
    return house.blobs.used_bytes()


def test_one_lease_stores_one_upload_however_many_it_sends(house, member):
    lease = member.lease()
    before = stored(house)
    sizes = []
    for step in range(5):
        data = member.payload(lease, step=1e-3 * (step + 1))
        assert member.upload(lease.lease, data).status_code == 200
        sizes.append(stored(house) - before)
    assert sizes == [len(data)] * 5
    assert member.submit(member.notice(lease, data)).status_code == 200


@pytest.mark.parametrize("limit, refused", [(1000, False), (999, True)])
def test_the_unfinished_uploads_of_one_access_token_are_bounded(tmp_path, limit, refused):
    quotas = Quotas(Blobs(tmp_path), StorageLimits(access_token_bytes=limit))
    quotas.admit("lease 1", "token", 400)
    quotas.admit("lease 1", "token", 500)  # its next part
    quotas.admit("lease 2", "another token", 900)
    if refused:
        with pytest.raises(RequestRefused, match="would have 1000 bytes, at most 999 are kept: finish those"):
            quotas.admit("lease 3", "token", 500)
        quotas.finished("lease 1")
    quotas.admit("lease 3", "token", 500)


def test_storage_in_all_is_bounded_and_the_refusal_says_whose_it_is(house, member):
    lease = member.lease()
    data = member.payload(lease)
    house.coordinator.quotas._limits = StorageLimits(total_bytes=stored(house) + len(data) - 1)
    house.coordinator.quotas.measure()
    answer = member.upload(lease.lease, data)
    assert (answer.status_code, answer.json()["retry"]) == (503, True)
    assert "the coordinator's storage is full" in answer.json()["message"]
    house.coordinator.quotas._limits = StorageLimits()
    assert member.upload(lease.lease, data).status_code == 200


@pytest.fixture
def full_disk(house, monkeypatch):
    """The disk of the house has no free bytes until the fixture is given some."""
    disk = {"free": 0}
    monkeypatch.setattr(house.blobs, "disk_bytes", lambda: (100 * GIB, disk["free"]))
    return disk


def test_a_full_disk_is_an_event_a_status_and_the_worker_s_message(house, member, full_disk):
    full_disk["free"] = 50 * GIB
    lease = member.lease()
    full_disk["free"] = 5
    answer = member.upload(lease.lease, member.payload(lease))
    assert answer.status_code == 503
    said = "the coordinator's disk is full: 5 bytes are left. Its operator must free space on it"
    assert answer.json()["message"] == said
    assert house.ask("GET", "/v1/status").json()["storage"]["problem"] == said
    house.now_s += PRUNE_EVERY_S
    house.settle()
    full_disk["free"] = 50 * GIB
    house.now_s += PRUNE_EVERY_S
    house.settle()
    assert [x.text for x in house.ledger.events() if x.kind == "storage"] == [said, "there is room again"]
    assert house.ask("GET", "/v1/status").json()["storage"]["problem"] is None
    assert member.send(lease, member.payload(lease)).status_code == 200


def test_a_disk_that_others_fill_up_shows_in_the_status_at_once(house, full_disk):
    said = "the coordinator's disk is full: 0 bytes are left. Its operator must free space on it"
    assert house.ask("GET", "/v1/status").json()["storage"]["problem"] == said
    full_disk["free"] = 50 * GIB
    assert house.ask("GET", "/v1/status").json()["storage"]["problem"] is None


@pytest.mark.parametrize("full, age_s", [(False, UNWANTED_S), (True, UNWANTED_FULL_S)])
def test_garbage_is_deleted_by_time_without_a_merge_and_sooner_on_a_full_disk(house, full_disk, full, age_s):
    full_disk["free"] = 0 if full else 50 * GIB
    house.settle()
    old, young = house.blobs.put(b"old garbage"), house.blobs.put(b"young garbage")
    house.blobs.append("an-upload", 0, b"never finished")
    for path in (house.folder / "blobs" / "blobs" / old, *(house.folder / "blobs" / "uploads" / "an-upload").iterdir()):
        moment_s = path.stat().st_mtime - age_s - 1
        os.utime(path, (moment_s, moment_s))
    house.now_s += PRUNE_EVERY_S
    house.settle()
    assert not house.blobs.exists(old)
    assert house.blobs.exists(young)
    assert house.blobs.received("an-upload") == 0


def test_a_disk_that_is_full_for_the_ledger_too_ends_nothing(house, full_disk, monkeypatch):
    def no_room(*_: object) -> None:
        raise StorageError("the disk is full")

    house.settle()
    monkeypatch.setattr(house.ledger, "add_event", no_room)
    house.now_s += PRUNE_EVERY_S
    house.settle()
    assert replace(house.coordinator.quotas.state, problem=None) != house.coordinator.quotas.state
