"""Averaging: exact where possible, independent of order, robust against a minority of outliers, small in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.spec import SwarmSpec
from blocktrain.swarm.policy.averaging import base
from blocktrain.swarm.policy.averaging.base import WeightedUpdate, movements, reduced
from blocktrain.swarm.policy.averaging.norms import norm_of
from blocktrain.swarm.policy.averaging.outer import outer_step, plain
from blocktrain.swarm.policy.averaging.products import inner_products
from blocktrain.swarm.policy.averaging.table import RULES, merge, shares, weigh
from blocktrain.wire.recipes import MAX_WEIGHT
from blocktrain.wire.safetensors import Floats

KINDS = tuple(RULES)
SIZE = 5
values = st.floats(-1e3, 1e3, width=32)
vectors = st.lists(values, min_size=SIZE, max_size=SIZE).map(lambda xs: np.array(xs, np.float64))
weights = st.integers(1, 1000).map(float)
updates = st.lists(st.tuples(vectors, weights), min_size=1, max_size=7)


def parts(table: list[tuple[Floats, float]]) -> list[WeightedUpdate]:
    """Each comes in pieces of two values."""
    return [
        WeightedUpdate(
            lambda x=delta: lambda name: np.split(x.reshape(-1), range(2, x.size, 2)), weight, norm_of([delta])
        )
        for delta, weight in table
    ]


def merged(kind: str, table: list[tuple[Floats, float]], **settings: float) -> Floats:
    ((_, result),) = whole_merge(parts(table), {"tensor": table[0][0].size}, SwarmSpec(averaging=kind, **settings))
    return result


def whole_merge(parts: list[WeightedUpdate], sizes: dict[str, int], spec: SwarmSpec) -> Iterator[tuple[str, Floats]]:
    return merge(weigh(parts, sizes, spec), sizes, spec)


def mean(table: list[tuple[Floats, float]]) -> Floats:
    return merged("mean", table)


def close(a: Floats, b: Floats, tolerance: float = 1e-9) -> bool:
    return a.dtype == b.dtype and np.allclose(a, b, rtol=tolerance, atol=tolerance)


AWKWARD = [
    (0.0, 1e-45),  # from nothing to the smallest denormal
    (1e-45, -1e-45),
    (-1e-40, 1e-38),
    (1.0, -1.0),
    (1.0, 1.0000001),
    (-0.1, 0.1),
    (MAX_WEIGHT, -MAX_WEIGHT),
    (0.3, 0.0),
    (1.0, 1e-8),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", [1.0, 1 / 3, 1e-300, 7e18])
def test_one_update_of_any_weight_gives_its_weights_back_exactly(kind, weight):
    before, after = np.array(AWKWARD, np.float32).T
    delta = merged(kind, [(before.astype(np.float64) - after.astype(np.float64), weight)])
    moved, momentum = outer_step(before, [delta.reshape(-1)], None, SwarmSpec())
    assert moved.dtype == np.float32
    assert np.array_equal(moved, after)
    assert momentum is None


@given(st.lists(st.tuples(st.floats(2**-10, 1, width=32), st.floats(-1, 1, width=32)), min_size=1), weights)
def test_weights_of_any_likely_size_come_back_exactly(pairs, weight):
    before, after = np.array(pairs, np.float32).T
    after = np.where(np.abs(after) < 2**-29 * np.abs(before), 0.0, after)  # below that, float64 has no exact difference
    delta = mean([(before.astype(np.float64) - after.astype(np.float64), weight)])
    moved = plain(before, delta)
    assert moved.dtype == after.dtype
    assert np.array_equal(moved, after)


def test_a_tensor_keeps_its_shape_and_the_update_stays_as_it_was():
    theta, delta = np.ones((2, 3), np.float32), np.full((2, 3), 0.25)
    assert plain(theta, mean([(delta, 1.0), (delta * 3, 1.0)])).tolist() == [[0.5] * 3] * 2
    assert plain(theta, merged("median", [(delta, 1.0)])).shape == (2, 3)
    assert (delta == 0.25).all()


@given(updates)
def test_the_mean_is_the_weighted_mean(table):
    total = sum(weight for _, weight in table)
    assert close(mean(table), sum(delta * (weight / total) for delta, weight in table))


@pytest.mark.parametrize("kind", KINDS)
@given(table=updates, order=st.randoms(use_true_random=False))
def test_the_order_of_updates_does_not_matter(kind, table, order):
    shuffled = list(table)
    order.shuffle(shuffled)
    tolerance = 1e-6 if kind == "centered" else 1e-9  # which repeats its mean several times
    assert close(merged(kind, table), merged(kind, shuffled), tolerance)


@pytest.mark.parametrize("kind", ["mean", "trimmed", "median"])
@given(table=updates, share=st.integers(1, 9))
def test_an_update_split_in_two_weighs_the_same(kind, table, share):
    delta, weight = table[0]
    split = [(delta, weight * share), (delta, weight * (10 - share)), *((d, w * 10) for d, w in table[1:])]
    assert close(merged(kind, table), merged(kind, split))


@pytest.mark.parametrize("kind", KINDS)
@given(delta=vectors, copies=st.lists(weights, min_size=1, max_size=5))
def test_replicas_that_agree_are_believed(kind, delta, copies):
    assert close(merged(kind, [(delta, weight) for weight in copies]), delta)


@pytest.mark.parametrize("kind, wild", [("trimmed", 2), ("median", 4)])
@given(
    table=st.lists(vectors, min_size=5, max_size=5), monsters=st.lists(st.floats(-1e38, 1e38), min_size=4, max_size=4)
)
def test_a_wild_minority_is_ignored(kind, wild, table, monsters):
    sane = [(delta, 100.0) for delta in table]
    mad = [(np.full(SIZE, monster), 100.0) for monster in monsters[:wild]]
    result, all_sane = merged(kind, sane + mad, trim_share=0.3), np.stack(table)
    assert (result >= all_sane.min(0) - 1e-9).all()
    assert (result <= all_sane.max(0) + 1e-9).all()


def test_trimming_exactly_the_wild_ones_leaves_nothing_of_them():
    table = [(np.array([x], np.float32), 0.1) for x in (1e38, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1e38)]
    assert merged("trimmed", table, trim_share=0.1).item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    "numbers, half",
    [
        ([(1, 1), (2, 1), (9, 1)], 2),
        ([(1, 1), (2, 1)], 1.5),
        ([(1, 1), (2, 1), (9, 3)], 9),
        ([(1, 2), (2, 1), (9, 1)], 1.5),
        ([(5, 0.3)], 5),
    ],
)
def test_the_median_has_half_of_the_weight_on_either_side(numbers, half):
    assert merged("median", [(np.array([x], np.float32), w) for x, w in numbers]).item() == half


def test_the_trimmed_mean_cuts_weight_off_both_ends():
    table = [(np.array([x], np.float32), 1.0) for x in (0, 10, 20, 1000)]
    assert merged("trimmed", table, trim_share=0.25).item() == 15
    assert merged("trimmed", table, trim_share=0.125).item() == pytest.approx((0 * 0.5 + 10 + 20 + 1000 * 0.5) / 3)
    assert merged("trimmed", table, trim_share=0.0).item() == 257.5


def test_clipping_bounds_the_pull_of_a_wild_update():
    sane, wild = np.array([1.0, 0.0], np.float32), np.array([0.0, 1e30], np.float32)
    for table in ([sane, wild], [sane, sane, wild]):
        result = merged("clipped", [(delta, 1.0) for delta in table], clip_factor=2.0)
        assert result.tolist() == pytest.approx([(len(table) - 1) / len(table), 2 / len(table)])


def test_updates_that_moved_nothing_can_be_merged():
    still = [(np.zeros(3, np.float32), 1.0)] * 3
    assert all(merged(kind, still).tolist() == [0, 0, 0] for kind in KINDS)


@pytest.mark.parametrize("kind", ["median", "trimmed"])
def test_robust_means_hold_a_bounded_number_of_elements(kind, monkeypatch):
    monkeypatch.setattr(base, "SLICE_ELEMENTS", 64)
    asked = []

    def read(start: int, stop: int) -> Floats:
        asked.append((start, stop))
        return np.arange(start, stop)

    rule = RULES[kind](SwarmSpec())
    assert close(reduced([(read, 1.0)] * 20, 100, rule), np.arange(100, dtype=np.float64))
    assert max(stop - start for start, stop in asked) == 64 // 20
    assert sorted(asked)[::20] == [(start, min(start + 3, 100)) for start in range(0, 100, 3)]


@pytest.mark.parametrize("kind", ["mean", "clipped"])
def test_means_open_each_update_once_and_take_pieces_of_all_side_by_side(kind):
    asked: list[tuple[int, str]] = []

    def part(number: int) -> WeightedUpdate:
        def pieces(name: str) -> Iterator[Floats]:
            for piece in range(2):
                asked.append((number, f"{name}{piece}"))
                yield np.full(1, float(piece))

        return WeightedUpdate(lambda: pieces, 1.0, 1.0)

    merged = dict(whole_merge([part(0), part(1)], {"a": 2, "b": 2}, SwarmSpec(averaging=kind)))
    assert merged["b"].tolist() == [0, 1]
    assert asked == [(number, f"{name}{piece}") for name in "ab" for piece in range(2) for number in range(2)]


@pytest.mark.parametrize("kind, limit, opened", [("median", 40, 2), ("trimmed", 12, 8), ("median", 1000, 2)])
def test_robust_means_of_small_tensors_open_an_update_once_for_all_that_fit(kind, limit, opened, monkeypatch):
    monkeypatch.setattr(base, "SLICE_ELEMENTS", limit)
    times: list[int] = []

    def open_one():
        times.append(1)
        return lambda name: [np.full(sizes[name], sizes[name], np.float32)]

    sizes = {"a": 3, "b": 3, "c": 9, "d": 1}
    merged_by_name = dict(whole_merge([WeightedUpdate(open_one, 1.0, 1.0)] * 2, sizes, SwarmSpec(averaging=kind)))
    assert all(close(merged_by_name[name], np.full(n, float(n))) for name, n in sizes.items())
    assert len(times) == opened


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outer", ["plain", "nesterov"])
def test_no_merge_of_wild_updates_gives_a_number_that_is_none(kind, outer):
    spec, momentum = SwarmSpec(averaging=kind, outer=outer), None
    theta = np.array([0.0, 1.0, -MAX_WEIGHT, MAX_WEIGHT], np.float32)
    for sign in (1, 1, -1):
        wild = np.full(4, sign * 1e38)
        theta, momentum = outer_step(theta, [merged(kind, [(wild, 1.0), (wild, 1e18)]).reshape(-1)], momentum, spec)
        assert np.isfinite(theta).all()
        assert np.abs(theta).max() <= MAX_WEIGHT
        assert momentum is None or np.isfinite(momentum).all()


def honest_and(num_honest: int, *lies: Floats) -> list[tuple[Floats, float]]:
    """Updates that point in about one direction, as those of one round do, and lies."""
    noise = np.random.default_rng(0).standard_normal((num_honest, 200))
    return [(np.ones(200) + each, 1.0) for each in noise] + [(lie, 1.0) for lie in lies]


NOISE = np.random.default_rng(1).standard_normal(200)
LIES = {
    "turned around": -(np.ones(200) + NOISE),
    "turned around and long": -19 * (np.ones(200) + NOISE),
    "noise": 1.4 * NOISE,
    "nothing": np.zeros(200),
}


@pytest.mark.parametrize("kind", ["screened", "krum", "centered"])
def test_without_liars_robust_rules_cost_little_or_nothing(kind):
    table = honest_and(6)
    apart = np.linalg.norm(merged(kind, table) - mean(table)) / np.linalg.norm(mean(table))
    assert apart < 0.35 if kind == "krum" else np.array_equal(merged(kind, table), mean(table))


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@pytest.mark.parametrize("honest, liars", [(4, 2), (9, 7), (2, 1)])
def test_the_default_leaves_out_what_points_elsewhere(lie, honest, liars):
    table = honest_and(honest, *[lie] * liars)
    assert np.allclose(merged(SwarmSpec().averaging, table), mean(table[:honest]))


@pytest.mark.parametrize("kind", ["krum", "centered"])
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_two_liars_of_six_cannot_turn_distance_based_rules_around(kind, lie):
    table = honest_and(4, lie, lie)
    honest = mean(table[:4])
    assert np.linalg.norm(merged(kind, table) - honest) < np.linalg.norm(honest)


def test_an_update_of_few_steps_is_not_taken_for_a_lie():
    noise = np.random.default_rng(2).standard_normal(200)
    short = 0.25 * np.ones(200) + 0.5 * noise  # a quarter of the steps: less direction, more noise
    table = parts(honest_and(5, short))
    steps = [4, 4, 4, 4, 4, 1]
    leased = [replace(x, norm=x.norm / n**0.5, steps=n) for x, n in zip(table, steps, strict=True)]
    weighed = weigh(leased, {"tensor": 200}, SwarmSpec())
    assert [part.scale for part in weighed] == [1.0] * 6


@given(st.lists(st.integers(1, 50), min_size=3, max_size=9), st.floats(0.5, 1.0))
def test_whoever_trained_all_its_steps_moved_about_as_far_as_the_others(steps, growth):
    norms = [n ** (growth - 0.5) for n in steps]  # of n steps n**growth, divided by the root
    assert movements(norms, steps, np.ones(len(steps))).min() > 1 - 1e-9


@pytest.mark.parametrize("honest, lazy", [(4, 2), (9, 7), (2, 1)])
def test_the_default_leaves_out_updates_of_far_fewer_steps_than_were_claimed(honest, lazy):
    one_of_ten = 0.1 * (np.ones(200) + NOISE)
    table = honest_and(honest, *[one_of_ten] * lazy)
    assert np.allclose(merged(SwarmSpec().averaging, table), mean(table[:honest]))


def test_many_keys_of_one_participant_do_not_outvote_the_others():
    table = parts(honest_and(4, *[LIES["turned around"]] * 6))
    by_key = weigh(table, {"tensor": 200}, SwarmSpec())
    by_participant = weigh(
        [replace(x, vote=1 if k < 4 else 1 / 3) for k, x in enumerate(table)], {"tensor": 200}, SwarmSpec()
    )
    assert [part.scale for part in by_key] == [0.0] * 4 + [1.0] * 6
    assert [part.scale for part in by_participant] == [1.0] * 4 + [0.0] * 6


def test_liars_of_good_standing_do_not_outvote_more_participants_without_any():
    """Two liars that passed an audit, of each other perhaps, weigh four times as much as four newcomers."""
    table = parts(honest_and(4, *[LIES["turned around"]] * 2))
    weighed = weigh([replace(x, weight=1 if k < 4 else 4) for k, x in enumerate(table)], {"tensor": 200}, SwarmSpec())
    assert [part.scale for part in weighed] == [1.0] * 4 + [0.0] * 2


def test_many_long_updates_of_one_participant_do_not_make_the_others_short():
    table = [replace(x, vote=1 if k < 4 else 0.1) for k, x in enumerate(parts(honest_and(4, *[np.full(200, 9.0)] * 8)))]
    assert all(part.scale for part in weigh(table, {"tensor": 200}, SwarmSpec())[:4])


def test_the_norm_bound_knows_the_rounds_before():
    """Two of three updates are far too long: only the rounds before tell which one is right."""
    table = [(np.full(4, size), 1.0) for size in (1.0, 10.0, 10.0)]
    spec, sizes = SwarmSpec(averaging="clipped", clip_factor=2.0), {"tensor": 4}
    assert [x.scale for x in weigh(parts(table), sizes, spec)] == [1.0, 1.0, 1.0]
    assert [x.scale for x in weigh(parts(table), sizes, spec, [2.0] * 9)] == [1.0, 0.2, 0.2]
    assert [x.scale for x in weigh(parts(table[1:2]), sizes, spec, [2.0] * 9)] == [1.0]  # it is alone


def test_shares_leave_out_what_the_rule_leaves_out():
    weighed = weigh(parts(honest_and(3, LIES["noise"])), {"tensor": 200}, SwarmSpec())
    assert shares(weighed, SwarmSpec()) == [pytest.approx(1 / 3)] * 3 + [0.0]


@pytest.mark.parametrize("group", [1, 2, 3, 32])
def test_inner_products_are_the_same_however_many_updates_are_read_at_once(group, monkeypatch):
    monkeypatch.setattr("blocktrain.swarm.policy.averaging.products.GROUP", group)
    table = honest_and(5)
    whole = np.stack([delta for delta, _ in table])
    assert np.allclose(inner_products(parts(table), {"tensor": 200}), whole @ whole.T)


def test_the_table_has_the_rules_that_the_settings_allow():
    assert set(RULES) == set(get_args(SwarmSpec.model_fields["averaging"].annotation))
