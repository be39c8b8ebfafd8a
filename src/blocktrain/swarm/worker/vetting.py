"""Vetting on a worker: measures what each waiting update of a round does to the held-out loss. It needs no gradient and
no memory beyond that of training the phase: one candidate at a time is in the trainer.
Next: ../policy/vetting.py, what follows from the scores; worker.py, which calls this."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from blocktrain.data.windows import Tokens
from blocktrain.errors import TensorError, foreign_bytes
from blocktrain.io.arrays import as_tensors
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.train.trainer import BlockTrainer
from blocktrain.wire.messages import MAX_LOSS, BlockVersion, VetLease, VetUpdate
from blocktrain.wire.recipes import MAX_WEIGHT
from blocktrain.wire.safetensors import Array, Shapes, Tensors, by_block, decode, flat
from blocktrain.wire.updates import read_update

Step = Sequence[tuple[VetUpdate, float]]  # updates, and what each is multiplied with


@dataclass(frozen=True)
class UpdateScores:
    """Held-out losses in nats per token."""

    base: float
    together: float
    alone: tuple[float, ...]
    without: tuple[float, ...]


class Scoring:
    """Scores the updates of one lease. `shapes` are those of a block's tensors."""

    def __init__(
        self, client: CoordinatorClient, cache: Path, shapes: Callable[[int], Shapes], trainer: BlockTrainer
    ) -> None:
        self._client, self._cache, self._shapes, self._trainer = client, cache, shapes, trainer
        self._version = lru_cache(4)(self._fetch)

    def scores(self, lease: VetLease, published: Tensors, text: Tokens) -> UpdateScores:
        """`published` are the tensors of the version that the round is based on, with the names of an update."""

        def loss_after(step: Step) -> float:
            self._trainer.adopt({k: as_tensors(x) for k, x in by_block(self._moved(published, step)).items()})
            return finite(self._trainer.held_out_loss(text, lease.draw, lease.batches))

        common = [(update, update.share) for update in lease.updates]
        return UpdateScores(
            base=loss_after([]),
            together=loss_after(common),
            alone=tuple(loss_after([(update, 1.0)]) for update in lease.updates),
            without=tuple(loss_after([*common[:at], *common[at + 1 :]]) for at in range(len(common))),
        )

    def _moved(self, published: Tensors, step: Step) -> Tensors:
        """The version after a step by these updates, one update in memory at a time."""
        total = {name: np.array(tensor, np.float32) for name, tensor in published.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in published.items()}
        for update, factor in step:
            data = self._client.download(update.payload, self._cache)
            with foreign_bytes(TensorError, "an update to score"):
                encoded = read_update(data, shapes)
                base = self._named(update.base) if encoded.needs_base else {}
                earlier = self._named(update.earlier) if encoded.from_course else {}
                for name, tensor in total.items():
                    delta = encoded.delta(name, base.get(name), earlier.get(name))
                    tensor -= np.float32(factor) * delta.reshape(tensor.shape)
        return {name: tensor.clip(-MAX_WEIGHT, MAX_WEIGHT) for name, tensor in total.items()}

    def _named(self, versions: Sequence[BlockVersion]) -> Mapping[str, Array]:
        return flat({version.block: self._version(version) for version in versions})

    def _fetch(self, version: BlockVersion) -> Tensors:
        data = self._client.download(version.tensors, self._cache)
        return decode(data, expected=self._shapes(version.block), in_place=True)[0]


def finite(loss: float) -> float:
    """What a message can hold: a diverged block has the largest loss."""
    return min(loss, MAX_LOSS) if math.isfinite(loss) else MAX_LOSS
