"""Audits: a share of the updates is computed again by other workers. A lease is a function of public facts: the
versions, the shard and the steps. Where several workers train, each lease starts with new optimiser state; a worker
that is alone keeps its state, and trains what local training would. Two honest workers therefore get the same update,
bit for bit on equal hardware. Which updates are audited is drawn when they have come. Pure: no clock, socket, disk
or randomness.
Next: standing.py, what follows for a worker; ../coordinator/trust/auditing.py, which asks and compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from blocktrain.settings import SwarmSpec

MOST_VOTES = 9  # that a side of a dispute needs, however many workers there are
MOST_REPORTS = 2 * MOST_VOTES  # of one audit: workers that all contradict each other are not asked forever
NEWCOMER_PASSES = 1  # audits that a worker must have passed to be audited as rarely as others

Outcome = Literal["passed", "failed", "undecided"]


@dataclass(frozen=True)
class AuditReport:
    """What one worker got for the audited lease, compared with what the audited worker and earlier reporters got."""

    worker: str
    distances: Mapping[str, float]  # worker: distance to its result, in the norm of the longer one


@dataclass(frozen=True)
class AuditVerdict:
    outcome: Outcome
    liars: tuple[str, ...]  # whose results most others contradict
    reason: str


def share_of(passes: int, spec: SwarmSpec) -> float:
    """The chance that an update of a worker is audited."""
    if not spec.has_audits:
        return 0.0
    return spec.audit_share if passes >= NEWCOMER_PASSES else max(spec.audit_share, spec.audit_newcomer_share)


def finding(
    audited: str, reports: Sequence[AuditReport], num_voters: int, exhausted: bool, spec: SwarmSpec
) -> AuditVerdict | None:
    """A first report that agrees passes the update. One that differs counts against both until the others have decided:
    more workers are asked, until one result has the votes of most of them. None while more reports are needed.
    `num_voters` are the workers that could have a result, `exhausted` says that nobody is left to be asked."""
    if not reports:
        return None
    agree = {(x.worker, y) for x in reports for y, distance in x.distances.items() if distance <= spec.audit_tolerance}
    everyone = [audited, *(report.worker for report in reports)]
    sides = [{x, *(y for y in everyone if (x, y) in agree or (y, x) in agree)} for x in everyone]
    largest = max(sides, key=len)
    if len(largest) == len(everyone):
        return AuditVerdict("passed", (), f"{len(reports)} of {len(reports)} workers got the same result")
    if len(largest) >= votes_needed(num_voters):
        liars = tuple(x for x in everyone if x not in largest)
        if audited in largest:
            return AuditVerdict("passed", liars, f"{len(largest) - 1} of {len(reports)} workers got the same result")
        return AuditVerdict("failed", liars, f"{len(largest)} workers got the same result, which differs from its own")
    if not exhausted and len(reports) < MOST_REPORTS:
        return None
    return AuditVerdict("undecided", (), f"the largest of the sides has {len(largest)} of {len(everyone)} workers")


def votes_needed(num_voters: int) -> int:
    """Results that must agree to decide a dispute: those of most workers, so that less than half cannot frame an honest
    one. In a large swarm a sample decides."""
    return min(MOST_VOTES, max(2, num_voters // 2 + 1))


def waits_for_auditors(num_updates: int, num_present: int, num_auditing: int, disputed: bool) -> bool:
    """Whether a round that could close should wait, until its deadline, for workers that compute audits. Without them
    liars may be most of it: a third of the workers, while as many are away, decide what points elsewhere. In a dispute
    somebody lies, and most workers compute the same lease: the round then waits for every one of them."""
    return num_auditing > 0 and (disputed or 3 * num_updates <= 2 * num_present)


def may_audit(participant: str, delivered: int, audited: str, asked: Sequence[str]) -> bool:
    """Whether a worker of this participant may compute an audited lease again: the worker has delivered something, and
    no other key of its participant sent the audited update or was asked before."""
    return delivered > 0 and participant != audited and participant not in asked
