"""Merging: the updates of a closed round become the next version of each of its blocks, tensor after tensor. Tensors
stay in their files until they are used, so memory does not grow with the number of updates. Where the updates
themselves are the smallest download, workers get them instead of a difference, and the version is computed as workers
will. It writes blobs and records no facts.
Next: ../policy/averaging/table.py and ../../wire/recipes.py, the mathematics; loop.py, which records the versions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from blocktrain.io.files import forget
from blocktrain.spec import SwarmSpec
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.blocks import Blocks, before
from blocktrain.swarm.ledger.records import MergeWeight, NewVersion, Update
from blocktrain.swarm.policy.averaging.base import Deltas, WeightedUpdate
from blocktrain.swarm.policy.averaging.outer import outer_step
from blocktrain.swarm.policy.averaging.table import merge_pieces, shares, weigh
from blocktrain.swarm.policy.rounds import Round
from blocktrain.wire.codecs.table import make_codec
from blocktrain.wire.messages import Blob
from blocktrain.wire.recipes import MAX_RECIPE_UPDATES, Recipe, RecipeUpdate, follow_recipe
from blocktrain.wire.safetensors import Floats, Tensors, by_block, encode_chunks
from blocktrain.wire.updates import EncodedUpdate, encode_difference, in_order, max_update_bytes, read_update

Named = tuple[str, Iterable[Floats]]
FLOAT32_BYTES = 4
REMEMBERED_BYTES = 2**18  # of each file that is read for a merge: a piece of the largest tensors
LEFT_OUT = {  # why a rule left an update out, for people
    "screened": "it points elsewhere than the other updates of its round, or moved far less in as many steps",
    "krum": "it is further from its neighbours than the other updates of its round",
}


@dataclass(frozen=True)
class PastMerge:
    """A round as it was merged: the versions that it was based on, its updates, and what they weighed."""

    base: Mapping[int, int]
    updates: Sequence[Update]
    weights: Sequence[MergeWeight]


class Merger:
    def __init__(self, spec: SwarmSpec, blocks: Blocks, blobs: Blobs) -> None:
        self._spec, self._blocks, self._blobs = spec, blocks, blobs

    def weigh(
        self,
        phase: int,
        updates: Sequence[Update],
        recent_norms: Sequence[float] = (),
        factors: Sequence[float] = (),
        votes: Sequence[float] = (),
    ) -> list[MergeWeight]:
        """What each update weighs in a merge, by the run's rule. `factors` are those of their workers' standing,
        `votes` those of their participants on what is left out."""
        parts = [self._part(update) for update in updates]
        for index, factor in enumerate(factors):
            parts[index] = replace(parts[index], weight=parts[index].weight * factor)
        for index, vote in enumerate(votes):
            parts[index] = replace(parts[index], vote=vote)
        weighed = weigh(parts, self._sizes(phase), self._spec, recent_norms)
        why = LEFT_OUT.get(self._spec.averaging, "left out")
        return [
            MergeWeight(update.id, part.weight, part.scale, "" if part.scale else why)
            for update, part in zip(updates, weighed, strict=True)
        ]

    def versions(self, round: Round, updates: Sequence[Update], weights: Sequence[MergeWeight]) -> Iterator[NewVersion]:
        by_id = {weight.update: weight for weight in weights}
        kept = [update for update in updates if by_id[update.id].weight > 0]
        parts = [self._weighed(x, by_id[x.id]) for x in kept]
        if recipe := self._recipe(round, kept, parts):
            yield from self._relayed(round, recipe)
            return
        sizes = self._sizes(round.phase)
        merged = self._lightly(merge_pieces(parts, sizes, self._spec), sizes, kept)
        for block, deltas in groupby(merged, key=lambda item: _block_of(item[0])):
            yield self._next(block, round.base[block], deltas)

    def again(
        self,
        phase: int,
        round: int,
        base: Mapping[int, int],
        updates: Sequence[Update],
        weights: Sequence[MergeWeight],
    ) -> list[NewVersion]:
        """The versions of a round that was merged before, bit for bit, from its updates while these are kept. Storing
        them repairs their blobs. BlobError if an update or a version that it was built on is gone. Older ledgers have
        no weights: their rules need no more than the updates."""
        merged = Round(phase, round, base, 0, 0, 0.0, 0.0, 0.0)
        return list(self.versions(merged, updates, weights or self.weigh(phase, updates)))

    def without(self, phase: int, past: Sequence[PastMerge]) -> dict[int, str]:
        """The blobs of a phase's blocks, if these rounds are merged one after the other with these updates only. The
        updates stay what they are: each is a change of the version that it was built on."""
        current = {name: tensor.copy() for name, tensor in self._blocks.named(past[0].base).items()}
        for one in past:
            by_id = {weight.update: weight for weight in one.weights}
            parts = [self._weighed(x, by_id.get(x.id) or MergeWeight(x.id, x.weight, 1.0)) for x in one.updates]
            parts = [part for part in parts if part.weight > 0]
            for name, delta in merge_pieces(parts, self._sizes(phase), self._spec) if parts else ():
                current[name], _ = outer_step(current[name], delta, None, self._spec)
        return {block: self._blobs.put(encode_chunks(tensors)) for block, tensors in by_block(current).items()}

    def _weighed(self, update: Update, weight: MergeWeight) -> WeightedUpdate:
        return replace(self._part(update), weight=weight.weight, scale=weight.scale)

    def _sizes(self, phase: int) -> dict[str, int]:
        """Block after block, and each block's tensors as they lie in an update."""
        shapes = self._blocks.shapes(phase)
        return {name: math.prod(shapes[name]) for name in sorted(in_order(shapes), key=_block_of)}

    def _lightly(self, merged: Iterator[Named], sizes: Mapping[str, int], updates: Sequence[Update]) -> Iterator[Named]:
        """The same items. What was read of the bases for one tensor does not stay in memory beside the next."""
        bases = {key for update in updates for key in update.base.items()}
        soon = _Forgetting([self._blobs.get(self._blocks.version(*key).sha256) for key in bases])
        for item in merged:
            yield item
            soon.was_read(sizes[item[0]] * FLOAT32_BYTES)

    def _recipe(self, round: Round, updates: Sequence[Update], parts: Sequence[WeightedUpdate]) -> Recipe | None:
        """How workers can compute the versions from the updates, if downloading those takes fewer bytes than
        downloading differences. Not with late updates: these were built on versions that workers may no longer have."""
        codec, download = self._blocks.codec(round.phase), make_codec(self._spec.download)
        own_shares = shares(parts, self._spec)
        if own_shares is None or not codec.uses_course or download.lossless or len(updates) > MAX_RECIPE_UPDATES:
            return None
        if any(update.base != round.base for update in updates):
            return None
        if sum(update.num_bytes for update in updates) >= max_update_bytes(download, self._blocks.shapes(round.phase)):
            return None
        relayed = [
            RecipeUpdate(payload=Blob(sha256=update.id, num_bytes=update.num_bytes), share=share)
            for update, share in zip(updates, own_shares, strict=True)
        ]
        return Recipe(blocks=tuple(round.base), updates=tuple(relayed))

    def _relayed(self, round: Round, recipe: Recipe) -> Iterator[NewVersion]:
        opened = [(self._read(each.payload.sha256, round.phase)[0], each.share) for each in recipe.updates]
        difference = self._blobs.put(recipe.encode())
        for block, version in round.base.items():
            base, by_course = {block: version}, any(update.from_course for update, _ in opened)
            earlier = self._blocks.named(before(base) if by_course else {})
            after = by_block(follow_recipe(self._blocks.named(base), opened, earlier))[block]
            sha256 = self._blobs.put(encode_chunks(after))
            yield NewVersion(block=block, version=version + 1, sha256=sha256, difference_sha256=difference)

    def _next(self, block: int, version: int, deltas: Iterable[Named]) -> NewVersion:
        """The outer step of one block, tensor by tensor, stored as blobs."""
        current = self._blocks.version(block, version)
        base = self._blocks.tensors(current.sha256)
        momentum = self._blocks.tensors(current.momentum_sha256) if current.momentum_sha256 else {}
        after: Tensors = {}
        for full_name, delta in deltas:
            name = full_name.partition(".")[2]
            after[name], moved = outer_step(base[name], delta, momentum.get(name), self._spec)
            if moved is not None:
                momentum[name] = moved
        difference = None
        if self._spec.download == "fp32":
            sha256 = self._blobs.put(encode_chunks(after))
        else:
            data, after = encode_difference(base, after, make_codec(self._spec.download))
            sha256, difference = self._blobs.put_all([encode_chunks(after), data])
        return NewVersion(
            block=block,
            version=version + 1,
            sha256=sha256,
            momentum_sha256=self._blobs.put(encode_chunks(momentum)) if momentum else None,
            difference_sha256=difference,
        )

    def _part(self, update: Update) -> WeightedUpdate:
        def opened() -> Deltas:
            encoded, data = self._read(update.id, update.phase)
            base, earlier = self._blocks.around(encoded, update.base)

            soon = _Forgetting([data])

            def alone(piece: Floats) -> Floats:
                soon.was_read(piece.size * FLOAT32_BYTES)
                return piece

            return lambda name: map(alone, encoded.pieces(name, base.get(name), earlier.get(name)))

        return WeightedUpdate(opened, update.weight, update.norm, steps=update.steps)

    def _read(self, sha256: str, phase: int) -> tuple[EncodedUpdate, memoryview]:
        """The update, checked, and the bytes that it is read from."""
        data = self._blobs.get(sha256)
        update = read_update(data, self._blocks.shapes(phase), expected=self._blocks.codec(phase))
        forget(data)
        return update, data


class _Forgetting:
    """Mapped files of which no more than a part stays in memory. To forget each small tensor by itself would take
    longer than to read it."""

    def __init__(self, files: Sequence[memoryview]) -> None:
        self._files, self._read_bytes = files, 0

    def was_read(self, num_bytes: int) -> None:
        """Of each file, at most so many bytes."""
        self._read_bytes += num_bytes
        if self._read_bytes >= REMEMBERED_BYTES:
            self._read_bytes = 0
            for data in self._files:
                forget(data)


def _block_of(name: str) -> int:
    """Of a tensor of an update, "1.readout"."""
    return int(name.partition(".")[0])
