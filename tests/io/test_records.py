"""Files of one record per line."""

from __future__ import annotations

import pytest


def test_metrics_come_back_in_order(run):
    assert run.metrics() == []
    run.log({"step": 1, "loss": 5.5})
    run.log({"step": 2, "loss": 5.25})
    assert run.metrics() == [{"step": 1, "loss": 5.5}, {"step": 2, "loss": 5.25}]


@pytest.mark.parametrize("half", [b'{"step": 2, "lo', b'{"step": 2, "name": "\xc3', b"17"])
def test_a_line_cut_short_costs_only_itself(run, half):
    run.log({"step": 1})
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(half)
    assert run.metrics() == [{"step": 1}]
    run.log({"step": 3})
    assert run.metrics() == [{"step": 1}, {"step": 3}]
