"""Chaos on real processes, briefly: `make chaos` takes longer. The events are planned; nothing depends on what happens
between two of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from chaos import Plan, run_plan

EVENTS = ("storm", "kill worker", "stop worker", "kill coordinator", "fair", "stop coordinator")


@pytest.mark.timeout(600)
def test_no_acknowledged_update_is_lost_whatever_happens(tmp_path, text):
    report, counts = run_plan(Plan(seed=1, workers=2, events=EVENTS), text, tmp_path)
    assert report.updates >= counts["receipts"] > 0
    assert report.versions > 0
    assert report.signatures >= report.updates
