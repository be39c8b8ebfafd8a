"""Which evaluations are taken in, and which one counts: one liar changes neither the model nor its curve."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from blocktrain.spec import EndToEnd, ModelSpec, RunSpec, Stacked
from blocktrain.swarm.policy.evaluations import (
    Seat,
    fault_in,
    may_evaluate,
    that_counts,
    those_that_count,
    weights_that_count,
)

SPEC = RunSpec(model=ModelSpec(blocks=2, layers=2), objective=Stacked())
GOOD = {"stack": (0.25, 0.75)}


def scores(combined: float = 2.0, last: float = 2.1) -> list[dict[str, Any]]:
    return [
        {"path": "stack", "reading": "last", "nats_per_byte": last},
        {"path": "stack", "reading": "combined", "nats_per_byte": combined},
    ]


@dataclass
class Told:
    worker: str
    scores: list[dict[str, Any]] = field(default_factory=scores)
    combine: dict[str, tuple[float, ...]] = field(default_factory=lambda: dict(GOOD))
    versions: dict[int, int] = field(default_factory=lambda: {0: 1, 1: 1})


@pytest.mark.parametrize(
    "changes, fault",
    [
        ({}, None),
        ({"combine": {}}, None),
        ({"scores": []}, "scores of one or more readings"),
        ({"scores": scores() + scores()}, "each once"),
        ({"scores": [{"path": "stack", "reading": "block 2", "nats_per_byte": 1.0}]}, 'no reading "block 2"'),
        ({"scores": [{"path": "sideways", "reading": "last", "nats_per_byte": 1.0}]}, 'path "sideways"'),
        ({"scores": [{"path": "stack", "reading": "last"}]}, "None nats per byte"),
        ({"scores": [{"path": "stack", "reading": "last", "nats_per_byte": "low"}]}, "low nats per byte"),
        ({"scores": [{"path": "stack", "reading": "last", "nats_per_byte": -1.0}]}, "-1.0 nats per byte"),
        ({"combine": {"stack": (1.0,)}}, "one weight of sensible size for each of 2 blocks"),
        ({"combine": {"stack": (1.0, 1e9)}}, "one weight of sensible size"),
        ({"combine": {"mean": (1.0, 0.0)}}, "on path stack"),
        ({"present": (0,)}, "for a model that has none"),
        ({"spec": SPEC.with_(objective=EndToEnd())}, "for a model that has none"),
    ],
)
def test_an_evaluation_has_the_shape_and_range_of_its_model_or_is_refused(changes, fault):
    found = fault_in(**{"scores": scores(), "combine": GOOD, "present": (0, 1), "spec": SPEC, **changes})
    assert (found is None) if fault is None else (found is not None and fault in found)


LIE = {"scores": scores(0.01, 0.02)}


@pytest.mark.parametrize(
    "told, counts",
    [
        ([], None),
        ([Told("a")], ("a", False)),
        ([Told("a"), Told("b")], ("a", True)),
        ([Told("a"), Told("b", scores(2.015))], ("a", True)),
        ([Told("a"), Told("b", scores(2.05))], None),
        ([Told("a"), Told("b", combine={"stack": (0.5, 0.5)})], None),
        ([Told("a"), Told("b", combine={})], None),
        ([Told("liar", **LIE), Told("b")], None),
        ([Told("liar", **LIE), Told("b"), Told("c")], ("b", True)),
        ([Told("liar", **LIE), Told("liar", **LIE), Told("b")], None),
        ([Told("liar", **LIE), Told("liar", **LIE)], ("liar", False)),
    ],
)
def test_an_evaluation_counts_when_another_worker_agrees_or_while_it_is_the_only_one(told, counts):
    found = that_counts(told)
    assert (found and (found[0].worker, found[1])) == counts


def test_of_every_model_one_evaluation_counts_in_order():
    later = {"versions": {0: 2, 1: 1}}
    told = [Told("a"), Told("a", **later), Told("b"), Told("liar", **LIE, **later)]
    assert [(one.worker, confirmed) for one, confirmed in those_that_count(told)] == [("a", True)]


@pytest.mark.parametrize(
    "weights, losses, used",
    [
        ((0.25, 0.75), (2.0, 2.1), True),
        ((-0.2, 1.1), (2.0, 2.1), True),
        ((-5.0, 6.0), (2.0, 2.1), False),
        ((0.0, 0.0), (2.0, 2.1), False),
        ((0.25, 0.75), (2.5, 2.1), False),
    ],
)
def test_weights_that_nobody_confirmed_are_used_only_where_they_do_little_harm(weights, losses, used):
    alone = Told("a", scores(*losses), {"stack": weights})
    assert weights_that_count([alone]) == ({"stack": weights} if used else {})
    assert weights_that_count([alone, Told("b", scores(*losses), {"stack": weights})]) == {"stack": weights}


OPEN, DONE, GONE = (False, True), (True, False), (False, False)


@pytest.mark.parametrize(
    "seats, confirmed, may",
    [
        ([], False, True),
        ([OPEN], False, True),
        ([OPEN, OPEN], False, False),
        ([DONE], False, True),
        ([DONE, OPEN], False, False),
        ([DONE, DONE], False, True),
        ([DONE, DONE], True, False),
        ([GONE], False, True),
        ([GONE] * 5, False, False),
    ],
)
def test_two_workers_evaluate_a_model_and_a_third_decides_between_them(seats, confirmed, may):
    taken = [Seat(f"w{n}", *seat) for n, seat in enumerate(seats)]
    assert may_evaluate("new", taken, confirmed) == may
    assert not any(may_evaluate(seat.worker, taken, confirmed) for seat in taken)
