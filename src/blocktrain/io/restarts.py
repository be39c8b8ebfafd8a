"""When a process that ended is started again: soon, or after growing pauses while it keeps failing at its start. Pure.
Next: cli/shared/stage_processes.py and fleet/supervisor.py, which start processes again."""

from __future__ import annotations

LONGEST_PAUSE_S = 10.0
STABLE_S = 30.0  # a process that ran this long did not fail at its start


def next_pause_s(pause_s: float, first_s: float, ran_s: float) -> float:
    """The pause after `pause_s`, for a process that ran for `ran_s` and then failed."""
    return min(2 * pause_s, LONGEST_PAUSE_S) if ran_s < STABLE_S else first_s
