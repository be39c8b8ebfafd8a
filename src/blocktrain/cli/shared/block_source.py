"""Where a stage's blocks come from: a model directory, or a training run by its invite. Serving and the swarm do not
know each other; this module connects them. Next: cli/commands/serving/stage.py, which looks for newer versions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from blocktrain.cli.console import named_blocks
from blocktrain.data.tokenizer import Tokenizer, tokenizer_of_run
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.io.arrays import as_tensors
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import block_shapes
from blocktrain.serve.segment.loading import model_digest
from blocktrain.serve.segment.segment import Segment
from blocktrain.spec import RunSpec, usable_weights
from blocktrain.wire.messages import TOKENIZER_BLOB
from blocktrain.wire.safetensors import decode

if TYPE_CHECKING:
    from blocktrain.swarm.worker.client import CoordinatorClient
    from blocktrain.wire.messages import ModelManifest

VERSION_LETTERS = 16
INVITES = ("bt://", "bts://")


class BlockSource(Protocol):
    def num_blocks(self) -> int: ...

    def newest(self, blocks: Sequence[int] | None, known: str | None = None, **settings: Any) -> Segment | None:
        """The newest version of these blocks (None: all). Returns None if it is the known one, or is incomplete."""
        ...


class DirectorySource:
    """A directory of blocktrain train or export. It may be written again while it is served."""

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
    """A coordinator's newest manifest. Downloads only the tensors of the stage's own blocks. The version's name follows
    from the manifest, so stages with different blocks of it agree on the name."""

    def __init__(self, client: CoordinatorClient, cache: Path) -> None:
        self._client, self._cache = client, cache

    def num_blocks(self) -> int:
        return RunSpec.model_validate(self._client.manifest().spec).model.blocks

    def newest(self, blocks: Sequence[int] | None, known: str | None = None, **settings: Any) -> Segment | None:
        manifest = self._client.manifest()
        spec, version = RunSpec.model_validate(manifest.spec), manifest_version(manifest)
        present = {each.block: each for each in manifest.blocks}
        missing = [block for block in range(spec.model.blocks) if block not in present]
        if missing and known is None:
            raise CheckpointError(
                f"{named_blocks(missing, spec.model.blocks, 'does', 'do')} not exist yet: start the stage again when "
                f"their training has begun (see blocktrain status)"
            )
        if missing or version == known:
            return None
        wanted = range(spec.model.blocks) if blocks is None else blocks
        if unknown := [block for block in wanted if block not in present]:
            raise ConfigError(f"there is no block {unknown[0]}: the run has blocks 0 to {spec.model.blocks - 1}")
        downloaded = {block: self._client.download(present[block].tensors, self._cache) for block in wanted}
        tensors = {
            block: as_tensors(decode(data, expected=block_shapes(spec, block))[0]) for block, data in downloaded.items()
        }
        settings |= {"version": version, "tokenizer": self._tokenizer(spec)}
        return Segment(spec, tensors, usable_weights(manifest.combine, spec.model.blocks), **settings)

    def _tokenizer(self, spec: RunSpec) -> Tokenizer:
        if spec.corpus.tokenizer_sha256 is None:
            return tokenizer_of_run(None, None)
        file = self._client.download(self._client.run_info().corpus[TOKENIZER_BLOB], self._cache)
        return tokenizer_of_run(spec.corpus.tokenizer, bytes(file))


def manifest_version(manifest: ModelManifest) -> str:
    return hashlib.sha256(manifest.model_dump_json().encode()).hexdigest()[:VERSION_LETTERS]


def open_source(model: str, cache: Path, offload: bool) -> BlockSource:
    if not model.startswith(INVITES):
        return DirectorySource(Path(model))
    if offload:
        raise ConfigError("--offload needs the model's files: run blocktrain export first, then serve its directory")

    from blocktrain.swarm.worker.client import CoordinatorClient
    from blocktrain.wire.invite import parse_invite

    return RunSource(CoordinatorClient(parse_invite(model)), cache)


def next_look_s(now_s: float, every_s: float) -> float:
    """Seconds to the next multiple of `every_s` on the wall clock. Stages on different hosts look at the same moments
    and find the same version, even if training makes versions faster than they look."""
    return every_s - now_s % every_s
