"""Vetting: which updates hurt, which scores agree, and who decides when they do not."""

from __future__ import annotations

import pytest

from blocktrain.swarm.policy.vetting import (
    MOST_UPDATES,
    SCORERS,
    VetReport,
    agree,
    divided,
    may_vet,
    seats_for,
    verdict_of,
)

HONEST = (-0.10, -0.11, -0.09, -0.10)
FLIPPED = 0.10


def report(worker: str, effects=(*HONEST, FLIPPED), together=None) -> VetReport:
    """`effects` are the changes of the loss by each update alone, in the common step a sixth of that."""
    step = 3.0 + sum(effects) / len(effects)
    lifts = [x / 6 for x in effects] if together is None else together
    return VetReport(worker, 3.0, step, tuple(3.0 + x for x in effects), tuple(step - x for x in lifts))


def harmful(effects, **how) -> set[int]:
    found = verdict_of([report(name, effects, **how) for name in "abc"], 5, ended=False)
    assert found is not None
    assert found.outcome == "vetted"
    return set(found.harmful)


@pytest.mark.parametrize(
    "effects, left_out",
    [
        (HONEST, set()),
        ((*HONEST, FLIPPED), {4}),
        ((FLIPPED, *HONEST, FLIPPED), {0, 5}),
        ((*HONEST, -0.02), set()),  # a slow worker's update helps less, and does not hurt
        ((*HONEST, 0.0), set()),
        ((0.001, -0.001, 0.002, -0.002, 0.0), set()),  # nothing stands out from the noise
    ],
)
def test_what_raises_the_held_out_loss_and_stands_out_is_left_out(effects, left_out):
    assert harmful(effects) == left_out


def test_an_update_that_hurts_only_in_the_common_step_is_left_out_too():
    assert harmful((*HONEST, -0.01), together=(-0.02, -0.02, -0.019, -0.021, 0.05)) == {4}


def test_the_reason_says_by_how_much_and_how_many_agree():
    found = verdict_of([report(name) for name in "abc"], 5, ended=False)
    assert found.harmful == {4: "vetting: alone it raises the held-out loss by 0.1000 (3 of 3 workers agree)"}


def test_where_half_of_the_updates_would_hurt_none_is_left_out():
    found = verdict_of([report(name, (0.1, 0.1, 0.1, -0.1, -0.1, -0.1)) for name in "abc"], 5, ended=False)
    assert (found.outcome, found.harmful) == ("undecided", {})


def test_scores_of_different_devices_agree_and_false_ones_do_not():
    rounded = report("b", tuple(x * 1.05 for x in (*HONEST, FLIPPED)))
    swapped = report("c", (FLIPPED, *HONEST[1:], -0.10))
    assert agree(report("a"), rounded)
    assert not agree(report("a"), swapped)
    assert not agree(report("a"), report("d", HONEST))


def test_a_lying_scorer_neither_frames_an_honest_update_nor_saves_a_lie():
    """It says the opposite; two more workers are asked, and most workers decide."""
    reports = [report("ada"), report("eve", tuple(-x for x in (*HONEST, FLIPPED))), report("bob")]
    assert verdict_of(reports, 6, ended=False) is None
    assert seats_for(reports, 6) > SCORERS
    found = verdict_of([*reports, report("cid"), report("dan")], 6, ended=False)
    assert (set(found.harmful), found.contradicted) == ({4}, ("eve",))


def test_within_the_tolerance_one_scorer_cannot_accuse_an_update():
    quiet = (-0.001, 0.0005, -0.001, -0.0005, 0.0)
    shifted = (-0.001, 0.0024, -0.001, -0.0005, 0.0)
    assert agree(report("a", quiet), report("eve", shifted))
    found = verdict_of([report("a", quiet), report("b", quiet), report("eve", shifted)], 6, ended=False)
    assert found.harmful == {}


@pytest.mark.parametrize(
    "scorers, outcome",
    [("", "undecided"), ("a", "undecided"), ("ab", "vetted"), ("abx", "vetted"), ("ax", "undecided")],
)
def test_when_its_time_is_over_most_of_those_that_scored_decide(scorers, outcome):
    reports = [report(name, (FLIPPED, *HONEST) if name == "x" else (*HONEST, FLIPPED)) for name in scorers]
    assert verdict_of(reports, 9, ended=True).outcome == outcome
    assert verdict_of(reports, 9, ended=False) is None


def test_many_updates_are_divided_among_more_workers_and_each_is_scored_once():
    ids = [str(number) for number in range(40)]
    groups = divided(ids, 0.3)
    assert sorted(x for group in groups for x in group) == sorted(ids)
    assert all(len(group) <= MOST_UPDATES for group in groups)
    assert divided(ids[:2], 0.3) == []


def test_workers_that_were_drawn_come_before_others():
    assert may_vet("ada", [], ["ada"], anyone=False)
    assert not may_vet("eve", [], ["ada"], anyone=False)
    assert may_vet("eve", [], ["ada"], anyone=True)
    assert not may_vet("ada", ["ada"], ["ada"], anyone=True)
