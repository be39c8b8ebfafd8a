"""Attaching: which blobs go with a lease, so that a worker with a small model asks once instead of once per blob.
Next: ../../wire/attached.py, the form of the answer; ../worker/block_cache.py, which needs these blobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from blocktrain.errors import BlobError
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.wire.attached import MAX_ATTACHED, Held
from blocktrain.wire.messages import Blob, TrainLease
from blocktrain.wire.recipes import MAX_RECIPE_BYTES, is_recipe, read_recipe

MAX_ATTACHED_BYTES = 2**20  # of all blobs of a lease: a worker fetches the others, as far as it needs them


def attached(lease: TrainLease, held: Held, blobs: Blobs) -> dict[Blob, memoryview]:
    """The blobs that the worker lacks, in the order in which it needs them, as far as they are small."""
    found, left = dict[Blob, memoryview](), MAX_ATTACHED_BYTES
    for blob in _lacking(lease, held, blobs):
        if blob in found or blob.num_bytes > left or len(found) == MAX_ATTACHED:
            continue
        with suppress(BlobError):  # the worker gets the error if it asks for this one
            found[blob] = blobs.get(blob.sha256)
            left -= blob.num_bytes
    return found


def _lacking(lease: TrainLease, held: Held, blobs: Blobs) -> Iterator[Blob]:
    """An initial block is made by the worker itself."""
    for version in (*lease.trained, *lease.below, *lease.ahead):
        if version.version == 0 or (version.block, version.version) in held.versions:
            continue
        if version.from_previous is None or (version.block, version.version - 1) not in held.versions:
            yield version.tensors
            continue
        yield version.from_previous
        if version.from_previous.num_bytes <= MAX_RECIPE_BYTES:
            with suppress(BlobError):
                way = blobs.get(version.from_previous.sha256)
                updates = read_recipe(way).updates if is_recipe(way) else ()
                yield from (each.payload for each in updates if each.payload.sha256 not in held.payloads)
