"""Updates of a small block, by every codec."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from blocktrain.model.block import block_shapes
from blocktrain.spec import preset
from blocktrain.wire.codecs.sparse import Sparse
from blocktrain.wire.codecs.table import CODECS, make_codec
from blocktrain.wire.safetensors import decode, encode
from blocktrain.wire.updates import (
    encode_update,
    read_update,
)

SHAPES = {"embedding": (16, 20), "gain": (7,), "layers.0.up": (24, 16), "temperature": (), "unused": (0, 4)}
SMALL = Sparse(chunk=64, kept=5, value_bits=2)
ALL = [*(make_codec(codec) for codec in CODECS), SMALL]
LOSSY = [codec for codec in ALL if not codec.lossless]
WIKITEXT = block_shapes(preset("wikitext"), 1)

all_codecs = pytest.mark.parametrize("codec", ALL, ids=lambda codec: "-".join(codec.describe().values()))
lossy_codecs = pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: "-".join(codec.describe().values()))
seeds = st.integers(0, 2**32)
scales = st.integers(-60, 60).map(lambda exponent: 2.0**exponent)
sparse_codecs = st.integers(1, 300).flatmap(
    lambda chunk: st.builds(Sparse, st.just(chunk), st.integers(1, chunk), st.integers(1, 4))
)


def normal(shapes, seed, scale=1.0):
    generator = np.random.default_rng(seed)
    return {
        name: np.asarray(scale * generator.standard_normal(shape, np.float32), np.float32)
        for name, shape in shapes.items()
    }


def trained(before, seed, scale=0.01):
    """Each tensor moved by its own size of step, as optimisers do."""
    moves = normal({name: tensor.shape for name, tensor in before.items()}, seed, scale)
    return {name: np.asarray(before[name] - moves[name] * 4.0**i) for i, name in enumerate(sorted(before))}


def deltas(update, base=None):
    return {name: update.delta(name, None if base is None else base[name]) for name in update.names}


def one_vector(values, codec):
    """The decoded Δ of a block of one tensor."""
    data = encode_update({"x": values}, {"x": np.zeros_like(values)}, codec)
    return read_update(data, {"x": tuple(values.shape)}, expected=codec).delta("x").astype(np.float32)


def equal(left, right):
    return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)


def same(left, right):
    return left.dtype == right.dtype and np.array_equal(left, right)


def close(left, right, **tolerances):
    return left.dtype == right.dtype and np.allclose(left, right, **tolerances)


def parts_of(codec, shapes=SHAPES):
    before = normal(shapes, 1)
    return decode(encode_update(before, trained(before, 2), codec))


def remade(codec, new_metadata=(), **new_parts):
    parts, metadata = parts_of(codec)
    tables = ({**parts, **new_parts}, {**metadata, **dict(new_metadata)})
    return encode(*({key: value for key, value in table.items() if value is not None} for table in tables))
