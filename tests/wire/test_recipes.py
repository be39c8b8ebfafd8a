"""Versions described by the updates they were merged from: every machine that follows a recipe gets the same bits."""

import json

import numpy as np
import pytest

from blocktrain.errors import TensorError
from blocktrain.wire.codecs.vector import Vector
from blocktrain.wire.messages import Blob
from blocktrain.wire.recipes import (
    MAX_RECIPE_BYTES,
    MAX_RECIPE_UPDATES,
    MAX_WEIGHT,
    Recipe,
    RecipeUpdate,
    follow_recipe,
    is_recipe,
    read_recipe,
)
from blocktrain.wire.safetensors import encode
from blocktrain.wire.updates import encode_update, read_update

SHAPES = {"0.up": (40, 60), "1.up": (40, 60), "1.gain": (7,)}
VECTOR = Vector(spent=2000)
RECIPE = Recipe(blocks=(0, 1), updates=(RecipeUpdate(payload=Blob(sha256="a" * 64, num_bytes=7), share=0.25),))


def normal(seed, scale=1.0):
    generator = np.random.default_rng(seed)
    return {name: scale * generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def moved(base, seed):
    step = normal(seed, 0.01)
    return {name: base[name] - step[name] for name in base}


def updates(base, earlier=None):
    """Two, of unequal shares."""
    payloads = [encode_update(base, moved(base, seed), VECTOR, earlier) for seed in (1, 2)]
    return [(read_update(data, SHAPES), share) for data, share in zip(payloads, (0.25, 0.75), strict=True)]


@pytest.mark.parametrize("by_course", [False, True])
def test_the_next_version_is_the_base_less_each_updates_share(by_course):
    earlier, base = normal(3), normal(4)
    first, second = (update for update, _ in updates(base, earlier if by_course else None))
    followed = follow_recipe(base, updates(base, earlier if by_course else None), earlier)
    for name in SHAPES:
        deltas = [update.delta(name, base[name], earlier[name]) for update in (first, second)]
        expected = base[name] - 0.25 * deltas[0] - 0.75 * deltas[1]
        assert np.allclose(followed[name].astype(np.float64), expected, atol=1e-6)


def test_one_block_of_several_is_followed_alone_to_the_same_bits():
    base = normal(4)
    whole = follow_recipe(base, updates(base), {})
    alone = follow_recipe({"1.up": base["1.up"]}, updates(base), {})
    assert alone["1.up"].dtype == whole["1.up"].dtype
    assert np.array_equal(alone["1.up"], whole["1.up"])


def test_no_version_goes_beyond_what_the_next_can_be_computed_from():
    base = {name: np.full(shape, MAX_WEIGHT, np.float32) for name, shape in SHAPES.items()}
    data = encode_update(base, {name: 2 * tensor for name, tensor in base.items()}, VECTOR)
    followed = follow_recipe(base, [(read_update(data, SHAPES), 1.0)], {})
    assert all(np.abs(tensor).max() <= MAX_WEIGHT for tensor in followed.values())


def test_a_recipe_is_read_as_it_was_written_and_is_not_taken_for_tensors():
    data = RECIPE.encode()
    assert read_recipe(data) == RECIPE
    assert is_recipe(data)
    assert not is_recipe(encode({"x": np.zeros(3, np.float32)}))


@pytest.mark.parametrize(
    "changes",
    [
        {"updates": []},
        {"blocks": [-1]},
        {"more": 1},
        {"updates": [{"payload": {"sha256": "a", "num_bytes": 7}, "share": 1.0}]},
        {"updates": [{"payload": {"sha256": "a" * 64, "num_bytes": 7}, "share": "NaN"}]},
    ],
)
def test_a_damaged_recipe_is_refused(changes):
    with pytest.raises(TensorError, match="its recipe cannot be read"):
        read_recipe(json.dumps({**RECIPE.model_dump(), **changes}).encode())


def test_the_largest_recipe_is_read_and_a_larger_one_is_refused():
    update = RecipeUpdate(payload=Blob(sha256="a" * 64, num_bytes=2**53 - 1), share=0.12345678806304932)
    largest = Recipe(blocks=tuple(range(256)), updates=(update,) * MAX_RECIPE_UPDATES)
    assert read_recipe(largest.encode()) == largest
    with pytest.raises(TensorError, match=f"at most {MAX_RECIPE_BYTES} are accepted"):
        read_recipe(largest.encode() + b" " * MAX_RECIPE_BYTES)


@pytest.mark.parametrize("number", ["9" * 20, "9" * 60_000, "1e308", "NaN"])
def test_a_recipe_with_a_number_beyond_belief_is_refused(number):
    with pytest.raises(TensorError, match="its recipe cannot be read"):
        read_recipe(RECIPE.encode().replace(b"0.25", number.encode()))
    with pytest.raises(TensorError, match="its recipe cannot be read"):
        read_recipe(RECIPE.encode().replace(b"7", number.encode()))
