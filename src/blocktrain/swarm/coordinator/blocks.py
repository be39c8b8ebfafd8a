"""Blocks: the versions that the ledger names, as tensors and as references for messages, and the shapes they must have.
It only reads: it decides and records nothing.
Next: merging.py, which makes versions; intake.py, which checks updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

from blocktrain.errors import BlobError, StorageError
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import Version
from blocktrain.swarm.policy.averaging.norms import norm_of
from blocktrain.wire.codecs.base import Codec
from blocktrain.wire.codecs.table import update_codec
from blocktrain.wire.messages import Blob, BlockVersion
from blocktrain.wire.safetensors import Shapes, Tensors, decode, flat
from blocktrain.wire.updates import EncodedUpdate

KNOWN_NORMS = KNOWN_VERSIONS = 1024  # a few numbers each


class Blocks:
    """`initial_block` gives a block's tensors before any training."""

    def __init__(self, spec: RunSpec, ledger: Ledger, blobs: Blobs, initial_block: Callable[[int], Tensors]) -> None:
        self._spec, self._ledger, self._blobs, self.initial_block = spec, ledger, blobs, initial_block
        self._shapes: dict[int, Shapes] = {}
        self.version = lru_cache(KNOWN_VERSIONS)(self._version)
        self._norm = lru_cache(KNOWN_NORMS)(lambda sha256: norm_of(self.tensors(sha256).values()))

    def shapes(self, phase: int) -> Shapes:
        """The shapes of the tensors of an update of the phase."""
        if phase not in self._shapes:
            self._shapes[phase] = {
                f"{block}.{name}": tuple(tensor.shape)
                for block in self._spec.phases[phase].blocks
                for name, tensor in self.initial_block(block).items()
            }
        return self._shapes[phase]

    def codec(self, phase: int) -> Codec:
        """The largest that updates of this phase may have: that of its last round."""
        steps = self._spec.phases[phase].steps
        return update_codec(self._spec.swarm, steps, steps)

    def tensors(self, sha256: str) -> Tensors:
        """Read-only."""
        return decode(self._blobs.get(sha256), in_place=True)[0]

    def _version(self, block: int, version: int) -> Version:
        return recorded_version(self._ledger, block, version)

    def around(self, update: EncodedUpdate, base: Mapping[int, int]) -> tuple[Tensors, Tensors]:
        """What reading an update needs: the versions that it was built on, and the versions before them."""
        return self.named(base if update.needs_base else {}), self.named(before(base) if update.from_course else {})

    def named(self, versions: Mapping[int, int]) -> Tensors:
        """The tensors of these versions under the names of an update: "1.readout"."""
        return flat({block: self.tensors(self.version(block, number).sha256) for block, number in versions.items()})

    def norm(self, versions: Mapping[int, int], blocks: Sequence[int]) -> float:
        """The Euclidean norm of all weights of these versions together."""
        squared = sum(self._norm(self.version(block, versions[block]).sha256) ** 2 for block in blocks)
        return float(squared**0.5)

    def reference(self, version: Version) -> BlockVersion:
        difference = self.blob(version.difference_sha256) if version.difference_sha256 else None
        return BlockVersion(
            block=version.block, version=version.version, tensors=self.blob(version.sha256), from_previous=difference
        )

    def blob(self, sha256: str) -> Blob:
        return Blob(sha256=sha256, num_bytes=self._blobs.whole_size(sha256))


def recorded_version(ledger: Ledger, block: int, version: int) -> Version:
    """One that the ledger's own records name. In a transaction, `ledger` is the one of the transaction."""
    found = ledger.version(block, version)
    assert found is not None, f"version {version} of block {block} is in the ledger's own records"
    return found


def before(versions: Mapping[int, int]) -> dict[int, int]:
    """The version before each, if there is one."""
    return {block: version - 1 for block, version in versions.items() if version > 0}


@contextmanager
def own_blobs() -> Iterator[None]:
    """A blob that the coordinator itself misses is not the caller's fault: the caller may ask again when it is back."""
    try:
        yield
    except BlobError as error:
        raise StorageError(str(error)) from None
