"""Standing: how much a worker's updates weigh, by what it has shown. A newcomer weighs little until it has passed an
audit: many new keys are worth little. A worker that is quarantined, by an audit, or banned, by an operator, gets no
work, and what it sent and is not merged is left out. Where workers decide about each other, a participant has one vote,
whatever the number of its keys. Pure: no clock, socket or disk.
Next: audits.py, which decides who lied; ../ledger/audits.py, which keeps the facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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


def votes_of(participants: Sequence[str]) -> list[float]:
    """With how much each update of a merge decides what is left out, by the participants that sent them: each of them
    has one vote, which its updates share. Standing does not count here. Liars can earn it from each other, or by honest
    work before others have come, and would then decide, however few they are."""
    updates = Counter(participants)
    return [1 / updates[participant] for participant in participants]


def refusal_of(standing: KeyStanding) -> str | None:
    """What the user of an excluded worker reads."""
    if standing.excluded is None:
        return None
    remedy = "if you think that this is wrong, check your hardware and write to the operator of the run"
    return f"this worker's key is {standing.excluded}: {standing.reason or 'the operator gave no reason'}; {remedy}"
