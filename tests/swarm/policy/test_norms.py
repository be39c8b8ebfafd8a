"""Which norms of updates are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.spec import SwarmSpec
from blocktrain.swarm.policy.averaging.norms import check_against_weights, check_norm, norm_of

SIZE = 5
values = st.floats(-1e3, 1e3, width=32)
vectors = st.lists(values, min_size=SIZE, max_size=SIZE).map(lambda xs: np.array(xs, np.float64))


@given(st.lists(vectors, max_size=4))
def test_the_norm_of_an_update_is_that_of_all_its_tensors(tensors):
    assert norm_of(tensors) == pytest.approx(math.sqrt(sum(float(np.square(x).sum()) for x in tensors)))


@pytest.mark.parametrize(
    "tensors",
    [[[math.nan], [1.0]], [[1.0], [math.inf]], [[math.inf], [math.nan]], [[math.nan], [math.inf], [0.0]]],
)
def test_an_update_that_is_not_finite_is_refused(tensors):
    verdict = check_norm(norm_of(np.array(x, np.float32) for x in tensors), [1.0] * 5, SwarmSpec())
    assert not verdict.accepted
    assert "lower the learning rate, or look for a broken device" in verdict.reason


@pytest.mark.parametrize(
    "norm, recent, accepted, reason",
    [
        (1e9, [], True, "norm 1e+09; 0 earlier ones known, 3 needed to compare"),
        (1e9, [0.0] * 9, True, "norm 1e+09; 0 earlier ones known, 3 needed to compare"),
        (8.0, [1.0, 1.0, 900.0], True, "norm 8, recent median 1"),
        (0.0, [1.0] * 3, True, "norm 0, recent median 1"),
        (
            9.0,
            [1.0, 1.0, 900.0],
            False,
            "the update's norm is 9, at most 8 times the recent median 1 is accepted: "
            "fetch the block again, or raise swarm.max_norm_factor",
        ),
    ],
)
def test_an_absurd_norm_is_refused_once_enough_are_known(norm, recent, accepted, reason):
    verdict = check_norm(norm, recent, SwarmSpec())
    assert (verdict.accepted, verdict.reason) == (accepted, reason)


@pytest.mark.parametrize(
    "norm, weights_norm, accepted, reason",
    [
        (8.0, 1.0, True, "norm 8 of weights of norm 1"),
        (1.0, 0.0, True, "norm 1 of weights of norm 0"),
        (1e38, 0.0, False, "at most 8 times the norm 0 of the weights"),
        (201.0, 10.0, False, "lower the learning rate, or raise swarm.max_norm_factor"),
        (math.nan, 10.0, False, "the update's norm is nan"),
    ],
)
def test_the_first_updates_are_measured_by_the_weights_they_were_built_on(norm, weights_norm, accepted, reason):
    verdict = check_against_weights(norm, weights_norm, SwarmSpec())
    assert verdict.accepted == accepted
    assert reason in verdict.reason
