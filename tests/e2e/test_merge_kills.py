"""A coordinator that is killed for real, at every write of taking an update in and merging it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import closing
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("kill_at_every_write.py")
LEAST_WRITES = 30  # seven blobs, four moments each, and the transactions


def script() -> ModuleType:
    spec = spec_from_file_location("kill_at_every_write", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome(module: ModuleType, text: Path, folder: Path) -> tuple[object, ...]:
    """After a restart, in which the worker announces its update once more."""
    coordinator, ledger = module.coordinator_of(text, folder)
    with closing(ledger):
        coordinator.loop.settle()
        receipt = coordinator.update(module.notice_in(folder))
        coordinator.loop.settle()
        versions = tuple((x.version, x.sha256, x.momentum_sha256) for block in (0, 1) for x in ledger.versions(block))
        merged = tuple((x.update.id, x.update.merged_round) for x in ledger.contributions())
        assert ledger.waiting_updates(0) == ()
        return receipt.update, versions, merged, ledger.phases()


def lives(text: Path, folder: Path, *places: str) -> list[int]:
    """How the lives before the last one ended, which survived."""
    command = [sys.executable, str(SCRIPT), str(text), str(folder), *places]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    *killed, survived = json.loads(said.stdout)
    assert (set(killed), survived) == ({-signal.SIGKILL}, 0)
    return list(killed)


@pytest.mark.timeout(300)  # some forty short lives, each with its fsyncs
def test_a_kill_9_at_any_write_of_a_merge_changes_no_weight_and_loses_no_update(tmp_path, text):
    killed = lives(text, tmp_path / "lives")
    assert len(killed) >= LEAST_WRITES
    module = script()
    outcomes = {outcome(module, text, tmp_path / "lives" / str(life)) for life in range(len(killed) + 1)}
    assert len(outcomes) == 1


def test_coordinators_of_one_database_and_bucket_that_die_one_after_the_other_merge_the_same(
    tmp_path, text, postgres, bucket
):
    assert len(lives(text, tmp_path / "dying", postgres, bucket)) >= 10
    module = script()
    (alone := tmp_path / "alone").mkdir()
    module.prepare(text, alone)
    assert outcome(module, text, tmp_path / "dying" / "shared") == outcome(module, text, alone)
