"""Standing: how much a worker's updates weigh, by what it has shown. A newcomer weighs little until it has passed an
audit: many new keys are worth little. A worker that is quarantined, by an audit, or banned, by an operator, gets no
work, and what it sent and is not merged is left out. Where workers decide about each other, a participant has one vote,
whatever the number of its keys. Pure: no clock, socket or disk.
Next: audits.py, which decides who lied; ../ledger/audits.py, which keeps the facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from blocktrain.settings import SwarmSpec

Exclusion = Literal["quarantined", "banned"]


@dataclass(frozen=True)
class KeyStanding:
    """What a run knows of a worker's key."""

    passes: int = 0  # audits of its own updates that it has passed
    suspected: bool = False  # in an audit in which two workers contradict each other
    excluded: Exclusion | None = None
    reason: str = ""  # why it is excluded, for its user


def weight_factor(standing: KeyStanding, spec: SwarmSpec) -> float:
    """What an update's weight is multiplied with. Without audits nobody can pass one, and all weigh the same."""
    if not spec.has_audits:
        return 1.0
    return spec.newcomer_weight if standing.suspected or not standing.passes else 1.0


def vote_shares(participants: Mapping[str, str]) -> dict[str, float]:
    """Worker: the share of its updates' weight with which it decides what is left out. `participants` says to whom a
    key belongs: all keys of one participant that take part in a round together vote like one of them."""
    keys = Counter(participants.values())
    return {worker: 1 / keys[participant] for worker, participant in participants.items()}


def refusal_of(standing: KeyStanding) -> str | None:
    """What the user of an excluded worker reads."""
    if standing.excluded is None:
        return None
    remedy = "if you think that this is wrong, check your hardware and write to the operator of the run"
    return f"this worker's key is {standing.excluded}: {standing.reason or 'the operator gave no reason'}; {remedy}"
