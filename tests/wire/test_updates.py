"""Updates made small: what is lost is bounded, small and kept for later. What others send: test_foreign_updates.py."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import ConfigError, TensorError
from blocktrain.wire.codecs.base import BLOCK
from blocktrain.wire.codecs.floats import Float16, Float32
from blocktrain.wire.codecs.integers import Int4, Int6, Int8
from blocktrain.wire.codecs.sparse import Sparse
from blocktrain.wire.codecs.table import make_codec
from blocktrain.wire.codecs.vector import Vector
from blocktrain.wire.updates import (
    apply_update,
    encode_difference,
    encode_update,
    max_update_bytes,
    read_update,
)

sys.path.insert(0, str(Path(__file__).parent))
from made_updates import (
    SHAPES,
    WIKITEXT,
    all_codecs,
    close,
    deltas,
    equal,
    normal,
    one_vector,
    same,
    scales,
    seeds,
    sparse_codecs,
    trained,
)


@given(seeds, scales)
def test_fp32_gives_the_trained_weights_back_exactly(seed, scale):
    before = normal(SHAPES, seed, scale)
    after = trained(before, seed + 1, scale)
    update = read_update(encode_update(before, after, Float32()), SHAPES)
    assert equal(apply_update(before, update), after)
    for name in SHAPES:
        assert same((before[name] - update.delta(name, before[name])).astype(np.float32), after[name])


@pytest.mark.parametrize("codec, steps", [("int8", 127), ("int6", 31), ("int4", 7)])
@given(seed=seeds, scale=scales, size=st.integers(1, 3 * BLOCK))
def test_whole_steps_are_off_by_at_most_half_a_step_of_their_block(codec, steps, seed, scale, size):
    values = normal({"x": (size,)}, seed, scale)["x"]
    off = np.abs(one_vector(values, make_codec(codec)) - values)
    for begin in range(0, size, BLOCK):
        step = np.abs(values[begin : begin + BLOCK]).max() / steps * (1 + 2**-7)  # the scale is rounded up to bfloat16
        assert off[begin : begin + BLOCK].max() <= step / 2 * (1 + 2**-20)


@given(seeds, scales, st.integers(1, 3 * BLOCK))
def test_fp16_keeps_eleven_digits_at_any_scale(seed, scale, size):
    values = normal({"x": (size,)}, seed, scale)["x"]
    off = np.abs(one_vector(values, Float16()) - values)
    assert (off <= np.abs(values) * 2**-11 + np.abs(values).max() * 2**-38).all()


@given(seeds, sparse_codecs, st.integers(1, 9))
def test_sparse_keeps_the_largest_of_every_chunk(seed, codec, chunks):
    values = normal({"x": (chunks, codec.chunk)}, seed)["x"]
    sent = one_vector(values, codec)
    largest = np.zeros_like(values, bool)
    np.put_along_axis(largest, np.abs(values).argsort(axis=1)[:, -codec.kept :], True, axis=1)
    assert same(np.sign(sent), np.sign(values) * largest)
    smallest = np.where(largest, np.abs(values), np.inf).min(axis=1, keepdims=True)
    assert (np.abs(sent) <= np.abs(values).max(axis=1, keepdims=True) * (1 + 2**-8)).all()
    assert (np.abs(sent) >= smallest * (1 - 2**-8) * largest).all()


@given(seeds, sparse_codecs, st.integers(1, 700), scales)
def test_sparse_never_leaves_more_than_it_got(seed, codec, size, scale):
    values = normal({"x": (size,)}, seed, scale)["x"].astype(np.float64)
    assert np.linalg.norm(values - one_vector(values, codec)) <= np.linalg.norm(values) * (1 + 2**-7)


@given(seeds, st.integers(1, 16_000), st.integers(1, 3000), scales)
def test_vector_never_leaves_more_than_it_got(seed, spent, size, scale):
    values = normal({"x": (size,)}, seed, scale)["x"].astype(np.float64)
    rest = values - one_vector(values, Vector(spent=spent))
    assert np.linalg.norm(rest) <= np.linalg.norm(values) * (1 + 2**-7)


@pytest.mark.parametrize("power", [1, 3], ids=["normal", "few large"])
def test_one_stage_leaves_nine_thirteenths_of_any_energy_and_the_next_as_much_of_the_rest(power):
    values = normal({"x": (64, 1024)}, 1)["x"] ** power
    for spent, left in ((1000, 9 / 13), (2000, (9 / 13) ** 2), (6000, (9 / 13) ** 6)):
        rest = values - one_vector(values, Vector(spent=spent))
        assert float(np.square(rest).sum() / np.square(values).sum()) == pytest.approx(left, rel=0.05)


def test_stages_go_to_the_rows_that_lack_most():
    values = normal({"x": (8, 1024)}, 1)["x"] * np.array([[10.0]] * 2 + [[0.1]] * 6, np.float32)
    sent = one_vector(values, Vector(spent=1000))
    assert sent[:2].any(axis=1).all()
    assert not sent[2:].any()


def test_four_values_in_a_chunk_of_two_levels_come_back_whole():
    values = np.zeros(4096, np.float32)
    values[[0, 17, 4000, 4095]] = [0.5, -0.5, 3.0, -3.0]
    assert same(one_vector(values, Sparse(kept=4, value_bits=2)), values)


@all_codecs
def test_an_update_of_nothing_is_nothing(codec):
    before = normal(SHAPES, 1)
    update = read_update(encode_update(before, before, codec), SHAPES)
    assert equal(apply_update(before, update), before)
    assert update.squared_norm(before) == 0


@all_codecs
@pytest.mark.parametrize("shapes", [{}, {"unused": (0, 4)}, {"temperature": ()}])
def test_blocks_of_next_to_nothing_come_back(codec, shapes):
    before = normal(shapes, 1)
    after = {name: np.asarray(tensor - 1) for name, tensor in before.items()}
    got = apply_update(before, read_update(encode_update(before, after, codec), shapes, expected=codec))
    allowed = 1.0 if codec.name == "vector" else 0.01  # a lone value is little of a row of 1024, and comes in time
    for name in shapes:
        assert close(got[name], after[name], rtol=0.0, atol=allowed)


@all_codecs
def test_a_tensor_alone_is_what_it_is_among_the_others(codec):
    before = normal(SHAPES, 1)
    update = read_update(encode_update(before, trained(before, 2), codec), SHAPES)
    together = deltas(update, before)
    assert update.names == ("layers.0.up", "embedding", "gain", "temperature", "unused")
    for name in reversed(update.names):
        alone = update.delta(name, before[name])
        assert alone.dtype == np.float64
        assert alone.shape == before[name].shape
        assert same(alone, together[name])
    norm = sum(np.square(tensor).sum().item() for tensor in together.values())
    assert update.squared_norm(before) == pytest.approx(norm)


@all_codecs
def test_equal_tensors_give_equal_bytes_in_any_order_and_layout(codec):
    before = normal(SHAPES, 1)
    after = trained(before, 2)
    turned = {
        name: np.asfortranarray(after[name], np.float64) if after[name].ndim == 2 else after[name] for name in after
    }
    backwards = dict(reversed(turned.items()))
    assert encode_update(before, after, codec) == encode_update(before, backwards, codec)


@pytest.mark.parametrize(
    "codec, times_smaller",
    [
        (Float32(), 0.99),
        (Float16(), 1.98),
        (Int8(), 3.9),
        (Int6(), 5.2),
        (Int4(), 7.8),
        (Sparse(), 200),
        (Sparse(kept=184), 92),
        (Sparse(value_bits=2), 180),
        (Sparse(value_bits=3), 160),
        (Sparse(value_bits=4), 140),
        (Vector(), 84),
        (Vector(spent=250), 300),
    ],
)
def test_a_block_of_the_wikitext_preset_gets_this_much_smaller(codec, times_smaller):
    before = normal(WIKITEXT, 1)
    data = encode_update(before, trained(before, 2), codec)
    assert 4 * sum(map(math.prod, WIKITEXT.values())) / len(data) >= times_smaller
    assert len(data) <= max_update_bytes(codec, WIKITEXT)


@all_codecs
def test_differences_keep_every_worker_in_step_with_the_coordinator(codec):
    published = normal(SHAPES, 1)
    workers = [{name: tensor.copy() for name, tensor in published.items()} for _ in range(2)]
    for version in range(5):
        merged = trained(published, version)
        data, published = encode_difference(published, merged, codec)
        workers = [apply_update(worker, read_update(data, SHAPES)) for worker in workers]
        assert all(equal(worker, published) for worker in workers)
        assert not codec.lossless or equal(published, merged)


def test_a_download_as_int6_is_four_times_smaller_and_off_by_a_thirtieth_of_the_step():
    old = normal(WIKITEXT, 1)
    new = trained(old, 2, scale=1e-6)
    data, published = encode_difference(old, new, Int6())
    assert 4 * len(data) < 4 * sum(map(math.prod, WIKITEXT.values()))
    for name in WIKITEXT:
        assert np.linalg.norm(published[name] - new[name]) < np.linalg.norm(new[name] - old[name]) / 30


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"name": "zip"}, 'codec = "zip" is unknown: use one of fp32, fp16, int8, int6, int4, sparse, vector'),
        ({"chunk": 0}, "chunk = 0 must be a whole number from 1 to 65536"),
        ({"chunk": 2**16 + 1}, "chunk = 65537 must be"),
        ({"chunk": 64.0}, "chunk = 64.0 must be"),
        ({"kept": 0}, "kept = 0 must be a whole number from 1 to 4096"),
        ({"kept": 4097}, "kept = 4097 must be"),
        ({"value_bits": 5}, "value_bits = 5 must be a whole number from 1 to 4"),
        ({"name": "vector", "spent": 0}, "spent = 0 must be a whole number from 1 to 16000"),
        ({"name": "vector", "spent": 16001}, "spent = 16001 must be"),
    ],
)
def test_settings_are_checked_when_a_codec_is_made(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_codec(**{"name": "sparse", **changes})


@all_codecs
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38])
def test_a_diverged_update_is_not_encoded(codec, value):
    with pytest.raises(TensorError, match=r'tensor "x" holds NaN, Inf or more than 9e\+37'):
        encode_update({"x": np.zeros(3, np.float32)}, {"x": np.array([0, value, 0], np.float32)}, codec)


@pytest.mark.parametrize(
    "after", [{}, {"x": np.ones(2, np.float32)}, {"x": np.ones(3, np.float32), "y": np.ones(1, np.float32)}]
)
def test_two_states_of_different_blocks_make_no_update(after):
    with pytest.raises(TensorError, match=r'tensor "[xy]" is not the same in the two'):
        encode_update({"x": np.ones(3, np.float32)}, after, Int8())


@pytest.mark.parametrize("base", [None, np.ones(3, np.float32)])
def test_fp32_needs_the_version_that_it_was_built_on(base):
    before = normal(SHAPES, 1)
    update = read_update(encode_update(before, before, Float32()), SHAPES)
    assert update.needs_base
    with pytest.raises(TensorError, match=r'a base of shape \(7,\) is needed for tensor "gain" and .* was given'):
        update.delta("gain", base)
