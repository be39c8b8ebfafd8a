"""Updates that others send: whatever is wrong with one is refused with a sentence, before it costs much."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import TensorError
from blocktrain.wire.codecs.floats import Float16, Float32
from blocktrain.wire.codecs.integers import Int8
from blocktrain.wire.codecs.sparse import Sparse
from blocktrain.wire.codecs.vector import Vector
from blocktrain.wire.safetensors import encode
from blocktrain.wire.updates import (
    apply_update,
    encode_update,
    read_update,
)

sys.path.insert(0, str(Path(__file__).parent))
from made_updates import SHAPES, SMALL, all_codecs, deltas, normal, parts_of, remade, trained


def changed(codec, name, index, value):
    """An update with one value of one part replaced."""
    parts, metadata = parts_of(codec)
    parts[name].reshape(-1)[index] = value
    return encode(parts, metadata)


def u8(*shape):
    return np.zeros(shape, np.uint8)


INT8 = Int8()
VECTOR = Vector()


@pytest.mark.parametrize(
    "data, complaint",
    [
        (b"", "not whole safetensors bytes"),
        (encode({}), 'got an update of format "None" and "1" is read here'),
        (remade(SMALL, {"update": "2"}), 'format "2" and "1" is read here: run the version of blocktrain'),
        (remade(SMALL, {"codec": "pickle"}), 'codec = "pickle" is unknown'),
        (remade(SMALL, {"codec": None}), "its metadata names no codec"),
        (remade(SMALL, {"layout": None}), "its metadata names no layout"),
        (remade(SMALL, {"layout": "f" * 16}), 'made for tensors of layout "ffffffffffffffff" and this block of 5'),
        (remade(SMALL, {"chunk": "999999999"}), "chunk = 999999999 must be"),
        (remade(SMALL, {"chunk": "9" * 30}), "chunk = -1 must be"),
        (remade(SMALL, {"chunk": "9" * 600}), "its metadata holds more than 64 characters under one key"),
        (remade(SMALL, {"chunk": "-64"}), "chunk = -1 must be"),
        (remade(SMALL, {"chunk": "٦٤"}), "chunk = -1 must be"),
        (remade(SMALL, {"chunk": "064"}), "its metadata is not exactly what codec sparse takes"),
        (remade(SMALL, {"kept": None}), "its metadata is not exactly what codec sparse takes"),
        (remade(SMALL, {"kept": "6"}), "a chunk holds 5 places and 6 are expected"),
        (remade(SMALL, {"kept": "9"}), r'part "codes" is uint8 \(12, 2\) and uint8 \(12, 4\) is expected'),
        (remade(SMALL, {"self": "1"}), "its metadata is not exactly"),
        (remade(INT8, {"chunk": "64"}), "its metadata is not exactly what codec int8 takes"),
        (remade(INT8, {"codec": "fp16"}), r'part "codes" is uint8 \(3, 256\) and float16'),
        (remade(INT8, {"codec": "fp32"}), "it has 2 parts, not exactly values"),
        (remade(INT8, scale=None), "it has 1 parts, not exactly codes, scale"),
        (remade(INT8, extra=u8(1)), "it has 3 parts, not exactly codes, scale"),
        (remade(INT8, codes=u8(2, 256)), r'part "codes" is uint8 \(2, 256\) and uint8 \(3, 256\)'),
        (remade(INT8, codes=u8(3 * 256)), r'part "codes" is uint8 \(768,\)'),
        (remade(INT8, codes=u8(3, 256).astype(np.int8)), r'part "codes" is int8'),
        (changed(INT8, "scale", 1, math.nan), 'part "scale" holds NaN, Inf or more than 7e'),
        (changed(INT8, "scale", 1, math.inf), 'part "scale" holds NaN, Inf'),
        (changed(INT8, "scale", 1, -1e37), 'part "scale" holds NaN, Inf'),
        (changed(Float16(), "codes", 5, math.nan), 'part "codes" holds NaN, Inf'),
        (changed(Float16(), "codes", 5, math.inf), 'part "codes" holds NaN, Inf'),
        (changed(Float16(), "scale", 1, math.inf), 'part "scale" holds NaN, Inf'),
        (changed(Float32(), "values", 9, math.nan), 'part "values" holds NaN, Inf'),
        (changed(Float32(), "values", 9, -math.inf), 'part "values" holds NaN, Inf'),
        (changed(SMALL, "levels", 3, math.nan), 'part "levels" holds NaN, Inf'),
        (changed(SMALL, "levels", 3, 1e38), 'part "levels" holds NaN, Inf'),
        (remade(VECTOR, {"spent": "2000"}), r'part "gains" is bfloat16 \(1, 1\) and bfloat16 \(2, 1\)'),
        (
            remade(VECTOR, {"spent": None, "kept": "1"}),
            "its metadata is not exactly what codec vector takes: codec, spent",
        ),
        (changed(VECTOR, "counts", 0, 2), "its rows name 2 stages where 1 are expected, and at most 32 per row"),
        (changed(Vector(spent=16_000), "counts", 0, 33), "its rows name 33 stages where 16"),
        (changed(VECTOR, "gains", 0, math.nan), 'part "gains" holds NaN, Inf'),
        (changed(VECTOR, "gains", 0, 3e36), 'part "gains" holds NaN, Inf'),
        (changed(SMALL, "high", 2, 0), "a chunk holds .* places and 5 are expected"),
        (changed(SMALL, "high", 2, 255), "a chunk holds .* places and 5 are expected"),
        (remade(SMALL, high=np.full((12, 2), 0b00011111, np.uint8)), "a chunk holds 10 places"),
        (remade(SMALL, high=np.array([[0, 0b11111000]] * 12, np.uint8)), "a place is .* in a chunk of 64"),
        (
            remade(SMALL, high=np.array([[0b00011111, 0]] * 12, np.uint8), low=u8(12, 3)),
            "the places of a chunk repeat or do not rise",
        ),
    ],
)
def test_an_update_that_lies_is_refused(data, complaint):
    with pytest.raises(TensorError, match=complaint):
        read_update(data, SHAPES)


@pytest.mark.parametrize("codec", [Sparse(), Sparse(64, 6, 2), Float16()])
def test_another_coding_than_the_run_takes_is_refused(codec):
    before = normal(SHAPES, 1)
    data = encode_update(before, before, codec)
    with pytest.raises(TensorError, match=r"coded as codec = .* and codec = sparse, chunk = 64, kept = 5, .* expected"):
        read_update(data, SHAPES, expected=SMALL)


@pytest.mark.parametrize(
    "sent, taken",
    [(Sparse(64, 3, 2), SMALL), (Vector(spent=400), Vector())],
)
def test_a_smaller_update_than_the_run_takes_is_accepted(sent, taken):
    before = normal(SHAPES, 1)
    data = encode_update(before, trained(before, 2), sent)
    assert read_update(data, SHAPES, expected=taken).codec == sent


@all_codecs
@pytest.mark.parametrize(
    "shapes", [{}, SHAPES | {"gain": (7, 1)}, SHAPES | {"more": (0,)}, {**SHAPES, "layers.0.up": (16, 24)}]
)
def test_an_update_of_another_block_is_refused(codec, shapes):
    before = normal(SHAPES, 1)
    with pytest.raises(TensorError, match=r"made for tensors of layout|at most \d+ are accepted"):
        read_update(encode_update(before, before, codec), shapes)


def test_more_bytes_than_any_update_of_the_block_takes_are_not_looked_at():
    padding = {"padding": np.zeros(2000, np.float32)}
    with pytest.raises(TensorError, match=r"got \d+ bytes of tensors and at most \d+ are accepted"):
        read_update(encode(padding), SHAPES, expected=SMALL)
    with pytest.raises(TensorError, match="at most 99 are accepted"):
        read_update(remade(SMALL), SHAPES, max_bytes=99)


@all_codecs
@given(data=st.data())
def test_changed_bytes_give_finite_deltas_or_our_error_and_nothing_else(codec, data):
    before = normal(SHAPES, 1)
    whole = bytearray(encode_update(before, trained(before, 2), codec))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(TensorError):
        update = read_update(bytes(whole), SHAPES)
        assert all(np.isfinite(tensor).all() for tensor in deltas(update, before).values())
        assert all(np.isfinite(tensor).all() for tensor in apply_update(before, update).values())
