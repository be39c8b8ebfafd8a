"""Audits: how often, who decides, and who lied; standing: what follows."""

from __future__ import annotations

import pytest

from blocktrain.spec import SwarmSpec
from blocktrain.swarm.policy.audits import (
    MOST_REPORTS,
    AuditReport,
    finding,
    may_audit,
    share_of,
    votes_needed,
    waits_for_auditors,
)
from blocktrain.swarm.policy.standing import KeyStanding, refusal_of, votes_of, weight_factor

SPEC = SwarmSpec(audit_tolerance=0.1)
SAME, OTHER = 0.01, 1.5


def report(worker: str, **distances: float) -> AuditReport:
    return AuditReport(worker, distances)


def found(reports, num_voters=3, exhausted=False):
    answer = finding("ada", reports, num_voters, exhausted, SPEC)
    return (answer.outcome, answer.liars) if answer else None


@pytest.mark.parametrize(
    "reports, outcome",
    [
        ([], None),
        ([report("bob", ada=SAME)], ("passed", ())),
        ([report("bob", ada=OTHER)], None),
        ([report("bob", ada=OTHER), report("eve", ada=SAME, bob=OTHER)], ("passed", ("bob",))),
        ([report("bob", ada=OTHER), report("eve", ada=OTHER, bob=SAME)], ("failed", ("ada",))),
        ([report("bob", ada=OTHER), report("eve", ada=OTHER, bob=OTHER)], None),
    ],
)
def test_of_three_workers_two_results_that_agree_decide(reports, outcome):
    assert found(reports) == outcome


def test_two_liars_of_six_cannot_frame_an_honest_worker():
    """Bob and Eve agree with each other against Ada. The others agree with Ada."""
    liars = [report("bob", ada=OTHER), report("eve", ada=OTHER, bob=SAME)]
    assert found(liars, num_voters=6) is None
    honest = [report(x, ada=SAME, bob=OTHER, eve=OTHER, **{y: SAME for y in "xyz" if y < x}) for x in "xyz"]
    assert found([*liars, *honest[:2]], num_voters=6) is None
    assert found([*liars, *honest], num_voters=6) == ("passed", ("bob", "eve"))


@pytest.mark.parametrize("num_voters, votes", [(2, 2), (3, 2), (4, 3), (6, 4), (16, 9), (10_000, 9)])
def test_most_workers_decide_a_dispute_or_a_sample_of_a_large_swarm(num_voters, votes):
    assert votes_needed(num_voters) == votes


def test_a_dispute_ends_undecided_when_nobody_is_left_to_be_asked():
    reports = [report("bob", ada=OTHER), report("eve", ada=OTHER, bob=OTHER)]
    assert found(reports, exhausted=True) == ("undecided", ())
    many = [report(str(n), ada=OTHER, **{str(m): OTHER for m in range(n)}) for n in range(MOST_REPORTS)]
    assert found(many[:-1], num_voters=99) is None
    assert found(many, num_voters=99) == ("undecided", ())


def test_newcomers_are_audited_more_often():
    spec = SwarmSpec(audit_share=0.05)
    assert share_of(0, spec) > share_of(2, spec) == spec.audit_share


@pytest.mark.parametrize("changes", [{"audit_share": 0.0}, {"update": "vector"}, {"round_steps": 9}])
def test_a_run_whose_leases_cannot_be_repeated_has_no_audits(changes):
    spec = SwarmSpec(**{"audit_share": 0.05, **changes})
    assert share_of(0, spec) == 0.0
    assert weight_factor(KeyStanding(), spec) == 1.0


@pytest.mark.parametrize(
    "updates, present, auditing, waits",
    [(2, 6, 4, True), (4, 6, 2, True), (5, 6, 1, False), (2, 6, 0, False), (1, 1, 0, False), (9, 16, 3, True)],
)
def test_a_round_waits_for_auditors_while_a_third_of_the_workers_could_decide_it(updates, present, auditing, waits):
    assert waits_for_auditors(updates, present, auditing, disputed=False) == waits


@pytest.mark.parametrize("auditing, waits", [(3, True), (1, True), (0, False)])
def test_in_a_dispute_a_round_waits_for_every_auditor(auditing, waits):
    """Seven liars of sixteen are the majority of a round that three honest workers, who audit, are missing in."""
    assert waits_for_auditors(16 - auditing, 16, auditing, disputed=True) == waits


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
    spec = SwarmSpec(audit_share=0.05)
    assert weight_factor(standing, spec) == (1.0 if whole else spec.newcomer_weight)


def test_the_updates_of_one_participant_vote_like_one_of_them():
    assert votes_of(["ada", "eve", "eve"]) == [1.0, 0.5, 0.5]


def test_the_user_of_an_excluded_worker_reads_why():
    assert refusal_of(KeyStanding()) is None
    told = refusal_of(KeyStanding(excluded="quarantined", reason="its result differs"))
    assert "quarantined: its result differs" in told
    assert "write to the operator" in told
