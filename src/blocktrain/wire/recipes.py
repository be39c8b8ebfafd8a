"""Recipes: a version described by the updates that it was merged from. A few small updates take fewer bytes than any
difference between two versions, and they are exact; a worker already has its own. Pure: no files.
Next: swarm/coordinator/merging.py, which publishes recipes; swarm/worker/block_cache.py, which follows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field, ValidationError

from blocktrain.wire.codecs.base import damaged
from blocktrain.wire.messages import Blob, Message, Natural
from blocktrain.wire.safetensors import Encoded, Floats
from blocktrain.wire.updates import EncodedUpdate, Named, in_order, tensor_shapes

MAX_WEIGHT = 2.0**100  # far beyond training; no merge writes more, so that the next one can be computed in float32
MAX_RECIPE_UPDATES = 256
MAX_RECIPE_BLOCKS = 4096
MAX_RECIPE_BYTES = 2**17  # four times those of as many updates and a few dozen blocks


class RecipeUpdate(Message):
    payload: Blob
    share: Annotated[float, Field(ge=0.0, le=1e6)]  # a float32: the version moved by this share of the update's Δ


class Recipe(Message):
    """How a version was merged. Its JSON text takes the place of the difference from the version before."""

    blocks: Annotated[tuple[Natural, ...], Field(min_length=1, max_length=MAX_RECIPE_BLOCKS)]  # that the updates train
    updates: Annotated[tuple[RecipeUpdate, ...], Field(min_length=1, max_length=MAX_RECIPE_UPDATES)]

    def encode(self) -> bytes:
        return self.model_dump_json().encode()


def is_recipe(data: Encoded) -> bool:
    """Safetensors bytes never begin with this character: they begin with the header's length, a multiple of eight."""
    return data[:1] == b"{"


def read_recipe(data: Encoded) -> Recipe:
    if len(data) > MAX_RECIPE_BYTES:
        raise damaged(f"its recipe takes {len(data)} bytes and at most {MAX_RECIPE_BYTES} are accepted")
    try:
        return Recipe.model_validate_json(bytes(data))
    except ValidationError as error:
        raise damaged(f"its recipe cannot be read: {error.errors()[0]['msg']}") from None


def follow_recipe(base: Named, updates: Sequence[tuple[EncodedUpdate, float]], earlier: Named) -> dict[str, Floats]:
    """The version after `base`: base - Σ share · Δ over the updates and their shares. It is computed in float32 and in
    this order, and each product is rounded before it is added, so that every machine gets the same bits. `earlier` is
    the version before `base`, for updates that are coded from the course."""
    version = {}
    for name in in_order(tensor_shapes(base)):
        tensor = base[name]
        total = np.zeros_like(tensor)
        for update, share in updates:
            total += update.change(name, tensor, earlier.get(name)) * np.float32(share)
        np.subtract(tensor, total, out=total)
        version[name] = total.clip(-MAX_WEIGHT, MAX_WEIGHT, out=total)
    return version
