"""The route of a traversal: the cheapest exact cover by healthy stages, and why there is none."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.serve.chain.messages import ServedModel
from blocktrain.serve.chain.routing import (
    LONGEST_PAUSE_S,
    StageView,
    choose_route,
    cover_problem,
    expected_wait_s,
    model_problem,
    newest_whole,
    pause_s,
    version_problem,
)

BLOCKS = 4


def model(version: str = "v1", spec: str = "spec", blocks: int = BLOCKS) -> ServedModel:
    return ServedModel(
        name="m",
        version=version,
        objective="stacked",
        blocks=blocks,
        context=64,
        longest_sweep=0,
        survives_loss=True,
        spec_digest=spec,
    )


def view(address: str, first: int, last: int, *versions: str, **details: object) -> StageView:
    models = tuple(model(version) for version in versions or ("v1",))
    return StageView(address, tuple(range(first, last + 1)), models, **details)


@st.composite
def any_views(draw):
    views = []
    for n in range(draw(st.integers(1, 8))):
        first = draw(st.integers(0, BLOCKS - 1))
        last = draw(st.integers(first, BLOCKS - 1))
        versions = draw(st.lists(st.sampled_from(["v1", "v2"]), min_size=1, max_size=2, unique=True))
        details = {"healthy": draw(st.booleans()), "waiting": draw(st.integers(0, 5)), "out": draw(st.booleans())}
        views.append(view(f"s{n}", first, last, *versions, work_s=draw(st.floats(0, 9)), **details))
    return views


def blocks_of(views, route):
    held = {each.address: each.blocks for each in views}
    return [block for address in route.addresses for block in held[address]]


def covers(views, version):
    """Whether a chain exists, by trying all."""
    ends = {0}
    for _ in views:
        ends |= {
            each.end for each in views if each.healthy and each.rank(version) is not None and each.blocks[0] in ends
        }
    return BLOCKS in ends


@given(any_views(), st.randoms(use_true_random=False))
def test_a_route_covers_every_block_once_in_order_by_stages_that_are_well_and_of_the_version(views, rng):
    route = choose_route(views, "v1", BLOCKS, 0.0, rng=Random(rng.random()))
    assert (route is not None) == covers(views, "v1")
    if route is not None:
        assert blocks_of(views, route) == list(range(BLOCKS))
        used = [each for each in views if each.address in route.addresses]
        assert all(each.healthy and each.rank("v1") is not None for each in used)


@given(any_views())
def test_a_route_that_may_skip_names_exactly_what_it_lacks(views):
    route = choose_route(views, "v1", BLOCKS, 0.0, may_skip=range(BLOCKS))
    if route is not None:
        assert sorted([*blocks_of(views, route), *route.missing]) == list(range(BLOCKS))
        if covers(views, "v1"):
            assert route.missing == ()


@given(any_views())
def test_what_new_sessions_begin_with_is_whole(views):
    chosen = newest_whole(views)
    assert (chosen is not None) == any(covers(views, version) for version in ("v1", "v2"))
    assert chosen is None or covers(views, chosen.version)


@given(any_views(), st.sets(st.sampled_from([f"s{n}" for n in range(8)])))
def test_a_stage_to_avoid_is_used_only_where_there_is_no_other(views, avoid):
    route = choose_route(views, "v1", BLOCKS, 0.0, avoid=avoid)
    others = [each for each in views if each.address not in avoid and not each.out]
    if route is not None and covers(others, "v1"):
        assert not set(route.addresses) & avoid


def test_the_replica_with_the_least_expected_wait_is_chosen():
    views = [view("slow", 0, 3, work_s=2.0), view("busy", 0, 3, work_s=0.5, waiting=9), view("free", 0, 3, work_s=0.6)]
    assert choose_route(views, "v1", 4, 0.0).addresses == ("free",)


def test_a_session_stays_where_its_caches_are_until_that_stage_fails():
    views = [view("its own", 0, 3, work_s=1.0, waiting=3), view("free", 0, 3)]
    assert choose_route(views, "v1", 4, 0.0, prefer={"its own"}).addresses == ("its own",)
    views[0] = view("its own", 0, 3, out=True)
    assert choose_route(views, "v1", 4, 0.0, prefer={"its own"}).addresses == ("free",)


def test_ties_fall_differently():
    views = [view("a", 0, 3), view("b", 0, 3)]
    assert {choose_route(views, "v1", 4, 0.0, rng=Random(seed)).addresses for seed in range(20)} == {("a",), ("b",)}


def test_who_was_slow_long_ago_is_tried_again():
    slow = view("slow", 0, 3, work_s=10.0, measured_s=0.0)
    assert expected_wait_s(slow, 0.0) > 10
    assert expected_wait_s(slow, 600.0) < 0.02


def test_a_stage_may_be_cut_otherwise_than_its_replicas():
    views = [view("whole", 0, 3, waiting=99, work_s=1), view("left", 0, 1), view("right", 2, 3)]
    assert choose_route(views, "v1", 4, 0.0).addresses == ("left", "right")
    assert choose_route(views[:2], "v1", 4, 0.0).addresses == ("whole",)


def test_the_newest_version_that_all_blocks_have_is_the_one():
    swapped, late = view("a", 0, 1, "v2", "v1"), view("b", 2, 3, "v1")
    assert newest_whole([swapped, late]).version == "v1"
    assert newest_whole([swapped, view("b", 2, 3, "v2", "v1")]).version == "v2"
    assert newest_whole([swapped, view("b", 2, 3, "v3")]) is None


@pytest.mark.parametrize("failures, seconds", [(0, 0.0), (1, 0.25), (2, 0.5), (3, 1.0), (50, LONGEST_PAUSE_S)])
def test_who_fails_stays_out_longer_each_time(failures, seconds):
    assert pause_s(failures) == seconds


PROBLEMS = {
    "gap": (cover_problem, [view("a", 0, 0), view("b", 2, 3)], "no stage has block 1 of 0-3 .*a has 0, b has 2-3"),
    "gap at the end": (cover_problem, [view("a", 0, 1)], "no stage has block 2-3"),
    "overlap": (cover_problem, [view("a", 0, 2), view("b", 2, 3)], "overlaps"),
    "stray": (cover_problem, [view("a", 0, 1), view("b", 2, 3), view("c", 1, 2)], "^c with blocks 1-2 overlaps"),
    "version": (version_problem, [view("a", 0, 1, "v1"), view("b", 2, 3, "v2")], "a holds v1, b holds v2"),
    "model": (
        model_problem,
        [view("a", 0, 1), StageView("b", (2, 3), (model(spec="other"),))],
        "a serves m .spec spec. and b serves m .spec other.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROBLEMS)
def test_why_stages_are_no_model_is_said_with_their_addresses(name):
    import re

    problem_of, views, text = PROBLEMS[name]
    assert re.search(text, problem_of(views))


@pytest.mark.parametrize("problem_of", [model_problem, version_problem, cover_problem])
def test_stages_that_fit_have_no_problem(problem_of):
    assert problem_of([view("a", 0, 1), view("a2", 0, 1), view("b", 2, 3), view("whole", 0, 3)]) is None
