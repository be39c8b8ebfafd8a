"""blocktrain verify, on the directory that a real coordinator and its workers left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from blocktrain.io.private import LEDGER_FILE
from blocktrain.swarm.ledger.ledger import Ledger


@pytest.fixture
def folder(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished.folder, tmp_path / "copy"))


def newest_version(folder: Path) -> str:
    """The blob of a version whose updates are kept, so that it can be merged again."""
    ledger = Ledger(folder / LEDGER_FILE)
    versions = [version for version in ledger.all_versions() if version.round is not None]
    ledger.close()
    return max(versions, key=lambda version: (version.phase, version.round)).sha256


def test_a_run_that_was_trained_is_good(run, folder):
    result = run("verify", folder)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "all is well")
    found = json.loads(run("verify", folder, "--json").stdout)
    assert found["good"]
    assert found["updates"] == found["signatures"] > 0
    assert found["versions"] > 0


def test_what_is_wrong_is_listed_with_exit_code_1_and_repaired_on_request(run, folder):
    blob = folder / "blobs" / "blobs" / newest_version(folder)
    blob.write_bytes(blob.read_bytes()[:-1])
    listed = run("verify", folder)
    assert listed.exit_code == 1
    assert "WRONG" in listed.stdout
    assert run("verify", folder, "--repair").exit_code == 0
    assert run("verify", folder).exit_code == 0


def test_a_directory_that_is_no_coordinator_s_is_a_user_error(run, tmp_path):
    result = run("verify", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")


def test_a_running_swarm_is_verified_from_outside(run, finished):
    receipts = finished.home / "receipts.jsonl"
    result = run("verify", finished.invite, "--receipts", receipts)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "all is well"), result.stdout + result.stderr
    assert "not seen from outside: the ledger itself" in result.stdout
    found = json.loads(run("verify", finished.invite, "--receipts", receipts, "--json").stdout)
    assert found["receipts"] == found["updates"] == found["signatures"] > 0
    assert found["versions"] > 0


def test_a_receipt_without_its_update_or_its_signature_is_found_from_outside(run, finished, tmp_path):
    told = [json.loads(line) for line in (finished.home / "receipts.jsonl").read_text().splitlines()]
    forged = tmp_path / "receipts.jsonl"
    forged.write_text(json.dumps({**told[0], "weight": 2.0}) + "\n" + '{"torn')
    result = run("verify", finished.invite, "--receipts", forged)
    assert result.exit_code == 1
    assert "is signed by no coordinator of the run" in result.stdout


def test_what_needs_the_directory_is_refused_for_an_invite(run, finished):
    result = run("verify", finished.invite, "--repair")
    assert (result.exit_code, result.stdout) == (2, "")
