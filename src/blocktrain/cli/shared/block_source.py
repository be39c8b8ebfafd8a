"""Where a stage's blocks come from: a model directory, or a training run by its invite. This is where the world of
serving and the swarm meet; neither knows the other. Next: stage.py, which asks for newer ones now and then."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.io.arrays import as_tensors
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import block_shapes
from blocktrain.serve.segment.segment import Segment, model_digest
from blocktrain.spec import RunSpec
from blocktrain.wire.safetensors import decode

if TYPE_CHECKING:
    from blocktrain.swarm.worker.client import CoordinatorClient
    from blocktrain.wire.messages import ModelManifest

VERSION_LETTERS = 16


class Source(Protocol):
    def num_blocks(self) -> int: ...

    def newest(self, blocks: Sequence[int] | None, known: str | None = None, **settings: Any) -> Segment | None:
        """The newest version of these blocks (None: all); None when it is the known one, or is not whole yet."""
        ...


class DirectorySource:
    """What blocktrain train or export has written; it may be written again while it is served."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def num_blocks(self) -> int:
        return RunDirectory.open(self._path).spec.model.blocks

    def newest(self, blocks: Sequence[int] | None, known: str | None = None, **settings: Any) -> Segment | None:
        run = RunDirectory.open(self._path)
        if known is not None and model_digest(run.manifest()) == known:
            return None
        return Segment.open(self._path, blocks, **settings)


class RunSource:
    """A coordinator's newest manifest. Only the tensors of the stage's own blocks are fetched; what a version is called
    follows from the manifest, so that stages that fetch different blocks of it agree."""

    def __init__(self, client: CoordinatorClient, cache: Path) -> None:
        self._client, self._cache = client, cache

    def num_blocks(self) -> int:
        return RunSpec.model_validate(self._client.manifest().spec).model.blocks

    def newest(self, blocks: Sequence[int] | None, known: str | None = None, **settings: Any) -> Segment | None:
        manifest = self._client.manifest()
        spec, version = RunSpec.model_validate(manifest.spec), manifest_version(manifest)
        born = {each.block: each for each in manifest.blocks}
        unborn = [str(block) for block in range(spec.model.blocks) if block not in born]
        if unborn and known is None:
            raise CheckpointError(
                f"block {', '.join(unborn)} of {spec.model.blocks} is not born yet: start the stage again when its "
                f"turn in training has come (blocktrain status tells)"
            )
        if unborn or version == known:
            return None
        wanted = range(spec.model.blocks) if blocks is None else blocks
        if strange := [block for block in wanted if block not in born]:
            raise ConfigError(f"there is no block {strange[0]}: the run has blocks 0 to {spec.model.blocks - 1}")
        downloaded = {block: self._client.download(born[block].tensors, self._cache) for block in wanted}
        tensors = {
            block: as_tensors(decode(data, expected=block_shapes(spec, block))[0]) for block, data in downloaded.items()
        }
        return Segment(spec, tensors, manifest.combine, version=version, **settings)


def manifest_version(manifest: ModelManifest) -> str:
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()[:VERSION_LETTERS]


def next_look_s(now_s: float, every_s: float) -> float:
    """Seconds to the next full multiple on the wall clock: stages on different hosts look at the same moments, and so
    find the same version even where training makes them faster than they look."""
    return every_s - now_s % every_s
