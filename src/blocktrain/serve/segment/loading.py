"""Loading: some blocks of a run directory for a segment, never of two versions; and a first segment's drafter.
Next: segment.py computes with them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from blocktrain.data.tokenizer import Tokenizer, tokenizer_of_run
from blocktrain.errors import ConfigError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.io.manifest import Manifest
from blocktrain.io.tensor_file import MappedTensors
from blocktrain.model.block import Block, block_shapes, build_block
from blocktrain.model.offload import offloaded_block
from blocktrain.spec import RunSpec

BlockTensors = Mapping[int, Mapping[str, Tensor] | MappedTensors]


@dataclass(frozen=True)
class ReadBlocks:
    """What a segment is made of."""

    spec: RunSpec
    tensors: BlockTensors
    combine: Mapping[str, Sequence[float]]
    version: str
    tokenizer: Tokenizer
    drafter: Mapping[str, Tensor] | None


def read_blocks(directory: Path, blocks: Sequence[int] | None, offload: bool, with_drafter: bool) -> ReadBlocks:
    """All or some blocks of a run directory; it reads no files of other blocks."""
    run = RunDirectory.open(directory)
    tokenizer = tokenizer_of_run(run.spec.corpus.tokenizer, run.tokenizer_file())
    while True:
        manifest, drafter = run.manifest(), None
        wanted = range(run.spec.model.blocks) if blocks is None else blocks
        _require_known(wanted, run.spec.model.blocks, directory)
        get = run.map_block if offload else run.load_block
        tensors: BlockTensors = {index: get(index, block_shapes(run.spec, index)) for index in wanted}
        if with_drafter and min(wanted) == 0 and (last := max(wanted)) in manifest.drafters:
            drafter = run.load_drafter(last, block_shapes(run.spec, last + 1))
        if run.manifest() == manifest:  # otherwise a block was published while we read: never mix two versions
            return ReadBlocks(run.spec, tensors, manifest.combine, model_digest(manifest), tokenizer, drafter)


def model_digest(manifest: Manifest) -> str:
    """A name for exactly these blocks and weights."""
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()[:16]


def loaded_block(spec: RunSpec, index: int, tensors: Mapping[str, Tensor] | MappedTensors) -> Block:
    if isinstance(tensors, MappedTensors):
        return offloaded_block(spec, index, tensors.tensors, tensors)
    block = build_block(spec, index)
    block.load_state_dict(dict(tensors))
    return block.eval().requires_grad_(False)


def require_consecutive(blocks: Sequence[int], count: int) -> None:
    if not blocks or list(blocks) != list(range(blocks[0], blocks[-1] + 1)) or blocks[-1] >= count:
        raise ConfigError(
            f"a segment holds consecutive blocks of 0 to {count - 1}, got {list(blocks)}: name for example 0-1"
        )


def _require_known(wanted: Iterable[int], count: int, directory: str | Path) -> None:
    if strange := sorted(set(wanted) - set(range(count))):
        raise ConfigError(f"there is no block {strange[0]}: {directory} has blocks 0 to {count - 1}, name some of them")
