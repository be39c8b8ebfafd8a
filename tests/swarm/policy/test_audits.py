"""Audits: how often, who decides, and who lied; standing: what follows."""

from __future__ import annotations

import pytest

from blocktrain.spec import SwarmSpec
from blocktrain.swarm.policy.audits import MOST_REPORTS, AuditReport, finding, is_disputed, may_audit, share_of
from blocktrain.swarm.policy.standing import KeyStanding, refusal_of, weight_factor

SPEC = SwarmSpec(audit_tolerance=0.1)
SAME, OTHER = 0.01, 1.5


def report(worker: str, **distances: float) -> AuditReport:
    return AuditReport(worker, distances)


@pytest.mark.parametrize(
    "reports, outcome, liars",
    [
        ([], None, ()),
        ([report("bob", ada=SAME)], "passed", ()),
        ([report("bob", ada=OTHER)], None, ()),
        ([report("bob", ada=OTHER), report("eve", ada=SAME, bob=OTHER)], "passed", ("bob",)),
        ([report("bob", ada=OTHER), report("eve", ada=OTHER, bob=SAME)], "failed", ("ada",)),
        ([report("bob", ada=OTHER), report("eve", ada=OTHER, bob=OTHER)], None, ()),
    ],
)
def test_two_results_that_agree_decide(reports, outcome, liars):
    found = finding("ada", reports, SPEC)
    assert (found.outcome if found else None, found.liars if found else ()) == (outcome, liars)


def test_workers_that_all_contradict_each_other_are_not_asked_for_ever():
    reports = [report(str(n), ada=OTHER, **{str(m): OTHER for m in range(n)}) for n in range(MOST_REPORTS)]
    assert finding("ada", reports[:-1], SPEC) is None
    assert is_disputed("ada", reports[:-1], SPEC)
    found = finding("ada", reports, SPEC)
    assert (found.outcome, found.liars) == ("undecided", ())


def test_newcomers_are_audited_more_often():
    assert share_of(0, SwarmSpec()) > share_of(2, SwarmSpec()) == SwarmSpec().audit_share


@pytest.mark.parametrize("changes", [{"audit_share": 0.0}, {"update": "vector"}])
def test_a_run_whose_leases_cannot_be_repeated_has_no_audits(changes):
    spec = SwarmSpec(**changes)
    assert share_of(0, spec) == 0.0
    assert weight_factor(KeyStanding(), spec) == 1.0


@pytest.mark.parametrize(
    "worker, delivered, may", [("ada", 1, False), ("bob", 1, False), ("eve", 0, False), ("eve", 1, True)]
)
def test_nobody_audits_twice_or_itself_or_before_it_delivered(worker, delivered, may):
    assert may_audit(worker, delivered, audited="ada", asked=["bob"]) == may


@pytest.mark.parametrize(
    "standing, whole",
    [(KeyStanding(), False), (KeyStanding(passes=1), True), (KeyStanding(passes=9, suspected=True), False)],
)
def test_newcomers_and_suspects_weigh_little(standing, whole):
    assert weight_factor(standing, SwarmSpec()) == (1.0 if whole else SwarmSpec().newcomer_weight)


def test_the_user_of_an_excluded_worker_reads_why():
    assert refusal_of(KeyStanding()) is None
    told = refusal_of(KeyStanding(excluded="quarantined", reason="its result differs"))
    assert "quarantined: its result differs" in told
    assert "write to the operator" in told
