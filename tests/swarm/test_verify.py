"""Damage to a run's folder is found, said and repaired where it can be: a real run, with bytes that are changed."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from blocktrain.errors import ConfigError, StorageError
from blocktrain.swarm.coordinator.initial_files import initial_blocks_folder
from blocktrain.swarm.coordinator.loop import REPAIR_EVERY_S
from blocktrain.swarm.coordinator.server import _require_head, _require_ledger
from blocktrain.swarm.ledger.chain import HEAD_FILE, ChainHead, NotedHead
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.verify import VerifyReport, verify
from blocktrain.wire.safetensors import encode_chunks


@pytest.fixture
def trained(house, member) -> Path:
    """The folder of a run after three rounds, as a coordinator leaves it."""
    for _ in range(3):
        member.work()
    run = house.ledger.run()
    initial = initial_blocks_folder(house.folder, run.spec_digest)
    initial.mkdir(parents=True)
    for block in range(house.spec.model.blocks):
        data = b"".join(bytes(x) for x in encode_chunks(house.coordinator._blocks.initial_block(block)))
        (initial / f"block-{block}.safetensors").write_bytes(data)
    NotedHead(house.folder / HEAD_FILE).note(house.ledger.chain_head())
    return house.folder


def change(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "ledger.db")) as database, database:
        database.execute(statement)


def blob_of(house, block: int, version: int) -> Path:
    return house.folder / "blobs" / "blobs" / house.weights()[block, version]


def kinds(found: VerifyReport) -> set[str]:
    return {fault.kind for fault in found.faults}


def test_a_good_run_is_good_and_nothing_of_it_is_changed(house, trained):
    before = house.facts()
    found = verify(trained)
    assert (found.good, found.faults) == (True, [])
    assert (found.updates, found.signatures, found.versions, found.not_merged_again) == (3, 3, 6, 0)
    assert house.facts() == before


@pytest.mark.parametrize(
    "statement, kind, text",
    [
        ("UPDATE updates SET loss = 0.1 WHERE number = 2", "chain", "update 2, or one before it, is not what was"),
        ("UPDATE updates SET loss = 0.1 WHERE number = 2", "signature", "update 2 is not signed by worker"),
        ("UPDATE updates SET weight = weight * 2 WHERE number = 1", "chain", "update 1, or one before it"),
        ("DELETE FROM chain WHERE number = 3", "chain", "update 3 is not in the chain"),
        ("DELETE FROM updates WHERE number = 3", "chain", "update 3 was acknowledged and is not in the ledger"),
        ("DELETE FROM chain WHERE number = 3", "chain", "update 3 was acknowledged, by ledger-head"),
    ],
)
def test_facts_that_were_changed_or_lost_are_found(trained, statement, kind, text):
    change(trained, statement)
    found = verify(trained)
    assert not found.good
    assert any(fault.kind == kind and fault.text.startswith(text) for fault in found.faults)


@pytest.mark.parametrize("damage", [b"", b"short", None], ids=["empty", "other bytes", "missing"])
def test_a_damaged_version_is_found_and_merged_again_from_its_updates(house, trained, damage):
    blob = blob_of(house, 1, 2)
    good = blob.read_bytes()
    blob.unlink() if damage is None else blob.write_bytes(damage)
    assert kinds(verify(trained)) == {"version"}
    repaired = verify(trained, repair=True)
    assert repaired.good
    assert repaired.faults
    assert blob.read_bytes() == good
    assert verify(trained).faults == []


def test_what_can_no_longer_be_merged_is_named(house, trained):
    (house.folder / "blobs" / "blobs" / house.ledger.contributions()[1].update.id).unlink()
    blob_of(house, 0, 2).write_bytes(b"damaged")
    found = verify(trained, repair=True)
    assert not found.good
    assert any("what it was merged from is no longer kept" in fault.text for fault in found.faults)


def test_a_folder_without_a_run_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match="give the --dir of a coordinator"):
        verify(tmp_path)


# What a coordinator does by itself


def test_a_truncated_blob_is_never_served_and_is_merged_again(house, member, trained):
    blob = blob_of(house, 0, 3)
    good = blob.read_bytes()
    blob.write_bytes(good[:-1])
    answer = house.ask_only("GET", f"/v1/blobs/{blob.name}")
    assert (answer.status_code, answer.json()["retry"]) == (503, True)
    assert "is damaged" in answer.json()["message"]
    house.settle()
    assert house.ask("GET", f"/v1/blobs/{blob.name}").content == good
    said = [event.text for event in house.ledger.events() if event.kind == "damaged"]
    assert said == [f"blob {blob.name}: it was merged again from its updates"]


def test_a_blob_that_is_damaged_a_second_time_is_merged_again_a_second_time(house, trained):
    blob = blob_of(house, 0, 3)
    good = blob.read_bytes()
    for damage in (good[:-1], b"damaged"):
        blob.write_bytes(damage)
        assert house.ask_only("GET", f"/v1/blobs/{blob.name}").status_code == 503
        house.settle()
        assert blob.read_bytes() == good
    assert [event.kind for event in house.ledger.events()].count("damaged") == 2


def test_a_version_that_cannot_be_stored_when_it_is_merged_again_is_tried_again_later(house, trained, monkeypatch):
    """The disk was full when the damage was found."""
    blob = blob_of(house, 0, 3)
    good = blob.read_bytes()
    blob.write_bytes(b"damaged")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as for_now:
        for_now.setattr(os, "replace", refuse)
        assert house.ask_only("GET", f"/v1/blobs/{blob.name}").status_code == 503
        house.settle()
    assert "damaged" not in [event.kind for event in house.ledger.events()]
    house.now_s += REPAIR_EVERY_S
    house.settle()
    assert blob.read_bytes() == good


def test_blobs_without_their_ledger_found_no_new_run(trained):
    _require_ledger(trained, None)
    shutil.move(trained / "ledger.db", trained / "elsewhere.db")
    with pytest.raises(StorageError, match=r"has blobs and no ledger\.db: restore the ledger from a backup"):
        _require_ledger(trained, None)
    _require_ledger(trained, "postgresql://elsewhere")


@pytest.mark.parametrize("noted, lost", [(None, False), (2, False), (3, False), (4, True)])
def test_a_ledger_that_lost_an_acknowledged_update_is_refused_with_the_remedy(house, trained, noted, lost):
    links = house.ledger.chain_links()
    (trained / HEAD_FILE).unlink()
    head = NotedHead(trained / HEAD_FILE)
    if noted is not None:
        head.note(ChainHead(noted, links[noted][1] if noted in links else "e" * 64))
    with closing(Ledger(trained / "ledger.db")) as ledger:
        if not lost:
            _require_head(ledger, head)
            return
        with pytest.raises(StorageError, match="update 4 was acknowledged and is not in it"):
            _require_head(ledger, head)


def test_the_head_is_noted_before_the_receipt_is_sent(house, member):
    house.coordinator._noted_head = NotedHead(house.folder / HEAD_FILE)
    for number in (1, 2):
        member.work()
        assert NotedHead(house.folder / HEAD_FILE).read() == house.ledger.chain_head()
        assert house.ledger.chain_head().number == number


def test_an_update_that_is_damaged_while_it_waits_can_be_sent_again(house, member):
    lease = member.lease()
    data = member.payload(lease)
    assert member.send(lease, data).status_code == 200
    (update,) = house.ledger.contributions()
    (house.folder / "blobs" / "blobs" / update.update.id).write_bytes(b"damaged")
    assert house.ask_only("GET", f"/v1/blobs/{update.update.id}").status_code == 503
    assert member.send(lease, data).json()["duplicate"]
    assert bytes(house.blobs.get(update.update.id)) == data
