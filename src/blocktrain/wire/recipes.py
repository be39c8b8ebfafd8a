"""Relay: a version told by the updates that it was merged from. Where these are few and small, they lead from one
version to the next in fewer bytes than any difference does, and exactly; a worker has its own already. Pure: no files.
Next: ../swarm/merging.py, which publishes such versions; ../swarm/worker.py, which follows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field, ValidationError

from blocktrain.wire.codecs.base import damaged
from blocktrain.wire.messages import Blob, Message, Natural
from blocktrain.wire.safetensors import Array, Encoded, Floats
from blocktrain.wire.updates import EncodedUpdate, Named

MAX_WEIGHT = 2.0**100  # far beyond training; no merge writes more, so that the next one can be computed in float32
MAX_RELAYED = 256  # updates of one version

Shared = tuple[EncodedUpdate, float]


class Relayed(Message):
    payload: Blob
    share: Annotated[float, Field(ge=0.0, le=1e6)]  # of its Δ that the version moved by, a float32


class Recipe(Message):
    """How a version was merged, a JSON text that stands in the place of the difference from the version before."""

    blocks: Annotated[tuple[Natural, ...], Field(min_length=1)]  # that the updates are of
    updates: Annotated[tuple[Relayed, ...], Field(min_length=1, max_length=MAX_RELAYED)]

    def encode(self) -> bytes:
        return self.model_dump_json().encode()


def is_recipe(data: Encoded) -> bool:
    """Tensors begin with the length of their header, a multiple of eight: never with this character."""
    return data[:1] == b"{"


def read_recipe(data: Encoded) -> Recipe:
    try:
        return Recipe.model_validate_json(bytes(data))
    except ValidationError as error:
        raise damaged(f"its recipe cannot be read: {error.errors()[0]['msg']}") from None


def follow(base: Named, updates: Sequence[Shared], earlier: Named) -> dict[str, Floats]:
    """The version after `base`: base - Σ share · Δ, in float32 and in this order, each product rounded before it is
    added. Every machine gets the same bits. `earlier` is the version before, for updates coded from the course."""
    return {name: _moved(name, base[name], updates, earlier.get(name)) for name in base}


def _moved(name: str, base: Array, updates: Sequence[Shared], earlier: Array | None) -> Floats:
    total = np.zeros_like(base)
    for update, share in updates:
        total += update.change(name, base, earlier) * np.float32(share)
    np.subtract(base, total, out=total)
    return total.clip(-MAX_WEIGHT, MAX_WEIGHT, out=total)
