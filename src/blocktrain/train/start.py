"""Starts a run from the blocks of another model: opens the directory of a trained or exported model and copies its
blocks to a new run, which then trains them further. Next: start_model.py, what must fit; run.py, which trains."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from blocktrain.errors import CheckpointError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.io.manifest import Manifest
from blocktrain.io.tensor_file import stored_as
from blocktrain.model.block import block_shapes
from blocktrain.start_model import StartModel


def open_start(path: str | Path) -> StartModel:
    """The model in the directory of a run or of an export. Every block must be there."""
    run = RunDirectory.open(path)
    manifest, every = run.manifest(), range(run.spec.model.blocks)
    if absent := [str(block) for block in every if block not in manifest.blocks]:
        raise CheckpointError(
            f"{path} has no trained block {', '.join(absent)} yet: train it to its end, or export a run whose blocks "
            f"are all there"
        )
    return StartModel(run.path, run.spec, weights_sha256(manifest))


def weights_sha256(manifest: Manifest) -> str:
    """The hash of a model's blocks, without the weights of its composition."""
    blocks = {str(block): entry.sha256 for block, entry in sorted(manifest.blocks.items())}
    return hashlib.sha256(json.dumps(blocks).encode()).hexdigest()


class StartBlocks(Mapping[int, Mapping[str, Tensor]]):
    """The blocks of a model in full precision, read from disk on each access."""

    def __init__(self, start: StartModel) -> None:
        self._run = RunDirectory.open(start.path)
        if weights_sha256(self._run.manifest()) != start.sha256:
            raise CheckpointError(
                f"the blocks in {start.path} have changed since they were looked at: end what trains there, then try "
                f"again"
            )

    def __getitem__(self, block: int) -> Mapping[str, Tensor]:
        if block not in range(len(self)):
            raise KeyError(block)
        return stored_as(self._run.load_block(block, block_shapes(self._run.spec, block)), torch.float32)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self._run.spec.model.blocks


def begin_from(run: RunDirectory, start: StartModel) -> None:
    """Makes the model's blocks those of a run that has none yet: all of them or none. The model stays as it is."""
    if not run.manifest().blocks:
        run.publish(StartBlocks(start), steps=0)
