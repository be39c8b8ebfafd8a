"""Merging: the updates of a closed round become the next version of each of its blocks. Means open every update once
and hold one mean of the phase's blocks; the outer step then takes one block at a time. It writes blobs and no facts.
Next: averaging.py, the mathematics; coordinator.py, which records the versions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from torch import Tensor

from blocktrain.spec import SwarmSpec
from blocktrain.swarm.averaging import Deltas, Part, merge, outer_step
from blocktrain.swarm.blobs import Blobs
from blocktrain.swarm.blocks import Blocks, Tensors
from blocktrain.swarm.ledger_records import NewVersion, Update
from blocktrain.swarm.rounds import Round
from blocktrain.wire.codecs import CodecSettings
from blocktrain.wire.deltas import encode_difference, read_update
from blocktrain.wire.tensors import encode


class Merger:
    def __init__(self, spec: SwarmSpec, blocks: Blocks, blobs: Blobs) -> None:
        self._spec, self._blocks, self._blobs = spec, blocks, blobs

    def versions(self, round: Round, updates: Sequence[Update]) -> Iterator[NewVersion]:
        sizes = {name: math.prod(shape) for name, shape in self._blocks.shapes(round.phase).items()}
        merged = merge([self._part(update) for update in updates], sizes, self._spec)
        for block, deltas in groupby(merged, key=lambda item: int(item[0].partition(".")[0])):
            yield self._next(block, round.base[block], deltas)

    def _next(self, block: int, version: int, deltas: Iterable[tuple[str, Tensor]]) -> NewVersion:
        """The outer step of one block, tensor by tensor, and its bytes."""
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
        if self._spec.download != "fp32":
            data, after = encode_difference(base, after, CodecSettings(self._spec.download))
            difference = self._blobs.put(data)
        return NewVersion(
            block=block,
            version=version + 1,
            sha256=self._blobs.put(encode(after)),
            momentum_sha256=self._blobs.put(encode(momentum)) if momentum else None,
            difference_sha256=difference,
        )

    def _part(self, update: Update) -> Part:
        def opened() -> Deltas:
            shapes, codec = self._blocks.shapes(update.phase), self._blocks.codec(update.phase)
            encoded = read_update(self._blobs.get(update.id), shapes, expected=codec)
            base = self._blocks.built_on(update.base, tuple(update.base)) if encoded.needs_base else {}
            return lambda name: encoded.pieces(name, base.get(name))

        return Part(opened, update.weight, update.norm)
