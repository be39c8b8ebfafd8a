"""When the files of a folder are synced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from blocktrain.swarm.coordinator.blobs import Blobs

DATA = bytes(range(256)) * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_parts_are_not_synced_since_what_a_power_cut_takes_is_sent_again(folder, monkeypatch):
    blobs = Blobs(folder)
    blobs.append("up", 0, DATA[:10])
    monkeypatch.setattr(os, "fsync", lambda handle: pytest.fail("a part was synced"))
    assert blobs.append("up", 10, DATA[10:20]) == 20


def test_bytes_and_names_are_synced_before_put_returns(folder, monkeypatch):
    blobs, synced, real = Blobs(folder), [], os.fsync

    def noted(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().relative_to(folder).parts[0])
        real(handle)

    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to see which file is synced")
    monkeypatch.setattr(os, "fsync", noted)
    blobs.put(DATA)
    assert synced == ["staging", "blobs"]
