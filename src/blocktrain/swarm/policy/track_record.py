"""Track records: what a worker has delivered, which is all that its leases depend on. What it says of itself buys
nothing. Pure: no socket, disk or clock.
Next: leases.py, which sizes leases by it; rounds.py, which waits for workers by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_high

MISSED_COSTS = 2  # updates that a worker must deliver after a lease that it did not
NEW_SHARE = 0.5  # of the newest update in the measured speed
SHORTEST_S = 1e-3  # that a lease is assumed to take, so that speeds stay finite


@dataclass(frozen=True)
class TrackRecord:
    """`owed` is the number of updates that the worker must deliver until rounds wait for it again."""

    delivered: int = 0
    owed: int = 0
    steps_per_s: float | None = None  # from the lease to its update: with download and upload

    def with_delivery(self, steps: int, took_s: float) -> TrackRecord:
        new = steps / max(took_s, SHORTEST_S)
        speed = new if self.steps_per_s is None else (1 - NEW_SHARE) * self.steps_per_s + NEW_SHARE * new
        return TrackRecord(self.delivered + 1, max(0, self.owed - 1), speed)

    def with_miss(self) -> TrackRecord:
        return replace(self, owed=after_a_miss(self.owed))


def after_a_miss(owed: int) -> int:
    """What a worker owes when it has not delivered a lease in its round. A lease that the round did not wait for costs
    nothing: an honest worker, whose updates come a little late for that reason, is waited for again."""
    return owed or MISSED_COSTS


def usual_steps_per_s(measured: Sequence[float]) -> float | None:
    """The speed that sets the pace of a phase: the middle one, of two middle ones the faster. One machine that is slow,
    or that claims work it has not done, does not change it where three or more work. None if nobody has delivered."""
    return median_high(measured) if measured else None
