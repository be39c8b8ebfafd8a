"""The figures of docs/operations.md are those of bench/results: after a new measurement this says what to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "operations.md").read_text().split())


def measured(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def test_the_bytes_of_a_round_are_those_measured():
    moved = measured("swarm")["bytes"]
    up, down = ({row["codec"]: row["bytes_per_parameter"] for row in moved[way]} for way in ("up", "down"))
    assert f"{up['int8']:.2f} × P bytes with `int8` (default), {up['sparse']:.3f} × P with `sparse`" in PAGE
    assert f"{down['int6']:.2f} × P bytes with `int6` (default)" in PAGE
    assert f"{4 + down['int6']:.1f} × P bytes each; an hour" in PAGE


def test_what_the_coordinator_takes_is_what_was_measured():
    rows = measured("swarm")["memory"]["rows"]
    of_block, replicas = [row["peak_of_block"] for row in rows], [row["replicas"] for row in rows]
    assert f"about {round(rows[0]['idle_bytes'] / 1e6, -1):.0f} MB idle" in PAGE
    assert f"{min(of_block):.1f} to {max(of_block):.1f} times the block more, for {min(replicas)} to" in PAGE
    cpu_ms = {row["work"]: row["server_cpu_ms"] for row in measured("swarm")["load"]["rows"]}
    assert f"{cpu_ms['leases']:.0f} ms a lease, {cpu_ms['updates']:.0f} ms an update" in PAGE


def test_what_a_worker_takes_is_what_was_measured():
    (row,) = [row for row in measured("worker")["memory"] if (row["name"], row["blocks"]) == ("middle, scaffold", 4)]
    assert f"{row['rss_peak_ratio']:.1f} of what training the whole model takes" in PAGE
