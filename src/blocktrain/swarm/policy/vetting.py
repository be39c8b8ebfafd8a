"""Vetting: before a round is merged, workers score its updates on held-out text. Each update is tried alone, and in the
common step with it replaced by zero. What hurts in one of the two, far more than the other updates do, is left out.
Scores are a function of public facts, so honest workers agree; where they do not, most workers decide. Pure: no clock,
socket, disk or randomness.
Next: audits.py, the other way to find lies; ../coordinator/trust/vetting.py, which asks workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

from blocktrain.swarm.policy.audits import votes_needed
from blocktrain.swarm.policy.averaging.base import FEWEST

SCORERS = 3  # that are asked first, by lot; if they agree, no others are asked
MOST_UPDATES = 16  # that one worker scores: more are divided among more workers
MOST_SEATS = 18  # workers that score the same updates, however much they contradict each other
HELD_OUT_TOKENS = 2048  # that each score is measured on, at least
SPREADS = 4.0  # median absolute deviations above the median effect, from which on an update stands out
TOLERANCE_SHARE = 0.1  # between the effects that two honest workers measure, in the largest one
TOLERANCE_NATS = 0.002  # the same, at least: devices round differently

VettingOutcome = Literal["vetted", "undecided"]


@dataclass(frozen=True)
class VetReport:
    """Losses on held-out text: of the version itself, of the common step, and for each update, in order, of the version
    moved by this update alone, and of the common step with this update replaced by zero."""

    worker: str
    base: float
    together: float
    alone: tuple[float, ...]
    without: tuple[float, ...]

    @property
    def hurts_alone(self) -> list[float]:
        """By how much each update alone raises the loss."""
        return [loss - self.base for loss in self.alone]

    @property
    def hurts_together(self) -> list[float]:
        """By how much each update raises the loss of the common step."""
        return [self.together - loss for loss in self.without]


@dataclass(frozen=True)
class VettingVerdict:
    outcome: VettingOutcome
    harmful: dict[int, str]  # position of the update: why it is left out
    contradicted: tuple[str, ...]  # workers whose scores most others contradict
    reason: str


def divided(updates: Sequence[str], chance: float) -> list[list[str]]:
    """The updates in groups for different workers, by lot: nobody chooses whom it is compared with."""
    if len(updates) < FEWEST:
        return []
    number = -(-len(updates) // MOST_UPDATES)
    turned = int(chance * len(updates))
    order = [*updates[turned:], *updates[:turned]]
    return [order[start::number] for start in range(number)]


def seats_for(reports: Sequence[VetReport], num_voters: int) -> int:
    """How many workers should have been asked by now."""
    first = min(SCORERS, num_voters)
    if len(reports) < first or len(_largest_side(reports)) == len(reports):
        return first
    return min(MOST_SEATS, max(first, 2 * votes_needed(num_voters)))


def verdict_of(reports: Sequence[VetReport], num_voters: int, ended: bool) -> VettingVerdict | None:
    """None while more reports are needed; `ended` says that none will come. `num_voters` workers could score."""
    first, side = min(SCORERS, num_voters), _largest_side(reports)
    agreed = len(side) == len(reports) and len(side) >= first
    if not agreed and len(side) < votes_needed(num_voters) and not ended:
        return None
    if len(side) < 2 or 2 * len(side) <= len(reports):
        return VettingVerdict("undecided", {}, (), f"{len(side)} of {len(reports)} workers that scored it agree")
    others = tuple(x.worker for x in reports if x not in side)
    harmful = _harmful(side)
    if 2 * len(harmful) >= len(side[0].alone):
        return VettingVerdict("undecided", {}, others, f"{len(harmful)} of {len(side[0].alone)} updates would hurt")
    said = f"{len(side)} of {len(reports)} workers agree"
    return VettingVerdict("vetted", {at: f"{why} ({said})" for at, why in harmful.items()}, others, said)


def agree(one: VetReport, other: VetReport) -> bool:
    """Whether two workers measured the same, within what devices explain."""
    mine = [*one.hurts_alone, *one.hurts_together]
    theirs = [*other.hurts_alone, *other.hurts_together]
    if len(mine) != len(theirs):
        return False
    largest = min(max(map(abs, mine), default=0.0), max(map(abs, theirs), default=0.0))
    bound = max(TOLERANCE_NATS, TOLERANCE_SHARE * largest)
    return all(abs(a - b) <= bound for a, b in zip(mine, theirs, strict=True))


def may_vet(worker: str, asked: Sequence[str], chosen: Sequence[str], anyone: bool) -> bool:
    """Workers drawn by lot come first: asking often gives no seat. After a while anyone may."""
    return worker not in asked and (anyone or worker in chosen)


def _largest_side(reports: Sequence[VetReport]) -> list[VetReport]:
    sides = [[x, *(y for y in reports if y is not x and agree(x, y))] for x in reports]
    return max(sides, key=len, default=[])


def _harmful(side: Sequence[VetReport]) -> dict[int, str]:
    """What every one of these workers finds harmful: within the tolerance, one liar can save an update, not accuse."""
    found = dict[int, str]()
    for at in range(len(side[0].alone)):
        alone, together = (
            min(_excess(of_one[at], of_one) for of_one in effects)
            for effects in ([x.hurts_alone for x in side], [x.hurts_together for x in side])
        )
        if alone > 0:
            found[at] = f"vetting: alone it raises the held-out loss by {_least(side, at, True):.4f}"
        elif together > 0:
            found[at] = f"vetting: it raises the held-out loss of its round by {_least(side, at, False):.4f}"
    return found


def _least(side: Sequence[VetReport], at: int, alone: bool) -> float:
    return min((x.hurts_alone if alone else x.hurts_together)[at] for x in side)


def _excess(effect: float, effects: Sequence[float]) -> float:
    """Above 0 if it raises the loss and stands out."""
    middle = median_low(effects)
    spread = median_low(abs(x - middle) for x in effects)
    return min(effect, effect - middle - SPREADS * spread)
