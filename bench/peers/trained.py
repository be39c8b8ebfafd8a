"""What a worker does between the rounds of the training part, the same on every side: BlockTrainer on its own shard;
and the held-out loss of what came out. Needs blocktrain in the environment. Next: work.py, how it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from work import Cell, Floats

from blocktrain.data.corpus import load_corpus
from blocktrain.io.arrays import as_arrays, as_tensors
from blocktrain.model.stack import BlockModel
from blocktrain.spec import RunSpec
from blocktrain.train.evaluate import answer, evaluate
from blocktrain.train.trainer import BlockTrainer
from blocktrain.wire.safetensors import decode, encode

SCORED_WINDOWS = 256


class Trained:
    """A trainer of the run's only block that goes on from what was published, its optimiser its own."""

    def __init__(self, cell: Cell, number: int) -> None:
        self._spec = RunSpec.model_validate(cell.spec)
        self._corpus = load_corpus(self._spec.corpus, self._spec.model.context)
        self._trainer = BlockTrainer(self._spec, self._spec.phases[0], self._corpus.train, {}, shard=number)

    def weights(self, published: Mapping[str, Any]) -> dict[str, Floats]:
        """The published tensors after a round's steps."""
        self._trainer.adopt({0: as_tensors(published)})
        for _ in range(self._spec.swarm.round_steps):
            self._trainer.step()
        return as_arrays(self._trainer.weights()[0])

    def keep(self, path: Path) -> None:
        """For a process that ends with its round."""
        path.write_bytes(encode(as_arrays(self._trainer.state())))

    def go_on(self, path: Path, round_number: int) -> None:
        if path.exists():
            state = as_tensors(decode(path.read_bytes())[0])
            self._trainer.restore(state, round_number * self._spec.swarm.round_steps)

    def loss(self, published: Mapping[str, Any]) -> float:
        return held_out_loss(self._spec, self._corpus.valid, as_tensors(published))


def held_out_loss(spec: RunSpec, valid: Any, tensors: dict[str, Tensor]) -> float:
    model = BlockModel.from_tensors(spec, {0: tensors})
    return answer(evaluate(model, valid, max_windows=SCORED_WINDOWS)).nats_per_byte
