"""When the demo kills a worker, and when it starts the worker again. tests/e2e/test_demo_process.py runs the demo."""

from __future__ import annotations

from typing import Any

import pytest

from blocktrain.cli.commands.demo.training import others_went_on, place_to_kill


def status(step: int, *leases: tuple[str, float | None], finished: bool = False) -> dict[str, Any]:
    """A run of 100 steps in its first phase, round 3; `leases` are (worker's name, when it reported)."""
    round = {"number": 3, "leases": [{"worker": f"id of {name}", "reported_s": at_s} for name, at_s in leases]}
    return {
        "steps": 100,
        "num_phases": 1,
        "phases": [{"phase": 0, "step": step, "finished": finished, "round": None if finished else round}],
        "workers": [{"id": f"id of {name}", "name": name} for name in ("one", "two")],
    }


@pytest.mark.parametrize(
    "now, place",
    [
        (status(10, ("two", None)), False),  # too early
        (status(20, ("two", None)), (0, 3)),
        (status(20, ("two", 5.0)), False),  # it has reported: wait for its next lease
        (status(20, ("one", None)), False),
        (status(40, ("two", 5.0)), None),  # late enough: between two leases
        (status(100, finished=True), False),
    ],
)
def test_a_worker_is_killed_in_a_lease_or_later_anyway(now, place):
    assert place_to_kill(now, "two") == place


def test_a_worker_that_has_not_joined_is_not_killed():
    assert place_to_kill(status(50, ("one", None)), "three") is False


@pytest.mark.parametrize(
    "now, lease, went_on",
    [
        (status(20, ("one", None), ("two", None)), (0, 3), False),
        (status(20, ("one", 5.0), ("two", None)), (0, 3), True),
        (status(20, ("two", None)), (0, 3), True),  # it is the only worker: nobody goes on without it
        (status(20, ("one", None), ("two", None)), (0, 2), True),  # that round is closed
        (status(20, ("one", None)), None, True),
    ],
)
def test_a_dead_worker_comes_back_when_the_others_have_gone_on(now, lease, went_on):
    assert others_went_on(now, "two", lease) is went_on
