"""Audits: a share of the updates is computed again by other workers. A lease is a function of public facts: the
versions, the shard and the steps; in an audited run each lease starts with new optimiser state. Two honest workers
therefore get the same update, bit for bit on equal hardware. Who is asked does not learn that it is an audit. Pure: no
clock, socket, disk or randomness.
Next: standing.py, what follows for a worker; ../coordinator/trust/auditing.py, which asks and compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from blocktrain.settings import SwarmSpec

MOST_REPORTS = 4  # of one audit: workers that all contradict each other are not asked for ever
NEWCOMER_PASSES = 2  # audits that a worker must have passed to be audited as rarely as others

Outcome = Literal["passed", "failed", "undecided"]


@dataclass(frozen=True)
class AuditReport:
    """What one worker got for the audited lease, compared with what the audited worker and earlier reporters got."""

    worker: str
    distances: Mapping[str, float]  # worker: distance to its result, in the norm of the longer one


@dataclass(frozen=True)
class Finding:
    outcome: Outcome
    liars: tuple[str, ...]  # whose results two others contradict
    reason: str


def share_of(passes: int, spec: SwarmSpec) -> float:
    """The chance that an update of a worker is audited."""
    if not spec.starts_afresh:
        return 0.0
    return spec.audit_share if passes >= NEWCOMER_PASSES else max(spec.audit_share, spec.audit_newcomer_share)


def finding(audited: str, reports: Sequence[AuditReport], spec: SwarmSpec) -> Finding | None:
    """Two results that agree decide. None while more reports are needed: a first report that differs counts against
    both workers until a third one decides."""
    agree = {(x.worker, y): d <= spec.audit_tolerance for x in reports for y, d in x.distances.items()}
    everyone = [audited, *(report.worker for report in reports)]
    for trusted in everyone:
        side = {trusted} | {x for x in everyone if agree.get((x, trusted)) or agree.get((trusted, x))}
        if len(side) < 2:
            continue
        liars = tuple(x for x in everyone if x not in side)
        if audited in side:
            return Finding("passed", liars, f"{len(side) - 1} of {len(reports)} workers got the same")
        return Finding("failed", liars, f"{len(side)} workers got the same, and something else than it sent")
    if len(reports) < MOST_REPORTS:
        return None
    return Finding("undecided", (), f"{len(everyone)} workers got {len(everyone)} different results")


def is_disputed(audited: str, reports: Sequence[AuditReport], spec: SwarmSpec) -> bool:
    """Whether workers contradict each other and nobody has decided yet."""
    return bool(reports) and finding(audited, reports, spec) is None


def may_audit(worker: str, delivered: int, audited: str, asked: Sequence[str]) -> bool:
    """Whether this worker may compute an audited lease again: it has delivered something, is not the audited worker,
    and was not asked before."""
    return delivered > 0 and worker != audited and worker not in asked
