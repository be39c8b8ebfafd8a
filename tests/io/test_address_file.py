"""The address file, by which one process learns where another listens."""

from __future__ import annotations

import json
import os

from blocktrain.io.address_file import read_address, write_address


def test_the_address_is_read_once_its_process_has_written_it(tmp_path):
    path = tmp_path / "stage.json"
    assert read_address(path, os.getpid()) is None
    write_address(path, "tcp://127.0.0.1:7001")
    assert read_address(path, os.getpid()) == "tcp://127.0.0.1:7001"
    assert json.loads(path.read_text()) == {"address": "tcp://127.0.0.1:7001", "pid": os.getpid()}


def test_a_file_of_an_earlier_process_does_not_count(tmp_path):
    write_address(tmp_path / "stage.json", "tcp://127.0.0.1:7001")
    assert read_address(tmp_path / "stage.json", os.getpid() + 1) is None


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_address(None, "tcp://127.0.0.1:7001")
    assert list(tmp_path.iterdir()) == []
