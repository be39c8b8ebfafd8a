"""The versions of blocks that a worker holds, and the cheapest way to get the ones it needs. In this order: make an
initial block locally, fetch the updates that a version was merged from, fetch the difference from the version before,
fetch the whole version. Does not train.
Next: worker.py, which trains the blocks; client.py, which fetches; wire/recipes.py, wire/updates.py: how a version is
made of updates and of differences."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from blocktrain.errors import RequestRefused
from blocktrain.io.checkpoint import write_whole
from blocktrain.io.files import mapped
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.messages import BlockVersion, EvaluateLease, TrainLease
from blocktrain.wire.recipes import Recipe, follow, is_recipe, read_recipe
from blocktrain.wire.safetensors import Array, by_block, continue_block, decode, encode, flat
from blocktrain.wire.updates import EncodedUpdate, apply_update, read_update

Tensors = dict[str, Array]
Shapes = dict[str, tuple[int, ...]]


class BlockCache:
    """`shapes` gives those of a block's tensors, `newborn` an untrained block. With `by_course` the version before each
    that is trained stays too."""

    def __init__(
        self,
        client: CoordinatorClient,
        cache: Path,
        *,
        shapes: Callable[[int], Shapes],
        newborn: Callable[[int], Tensors],
        by_course: bool,
    ) -> None:
        self._client, self._cache, self._by_course = client, cache, by_course
        self._shapes, self._newborn = shapes, newborn
        self._held: dict[tuple[int, int], Tensors] = {}  # (block, version) -> tensors
        self._in_files: set[tuple[int, int]] = set()  # those of them that are mapped
        self._sent = ""  # the hash of the last payload
        self._opened = lru_cache(1)(self._open)  # a recipe serves all blocks of its phase

    def named_shapes(self, blocks: Sequence[int]) -> Shapes:
        """Of an update of these blocks."""
        return {f"{block}.{name}": shape for block in blocks for name, shape in self._shapes(block).items()}

    def wanted(self, lease: TrainLease | EvaluateLease) -> set[str]:
        """The hashes of all that the lease may have to be fetched for, and of what was sent last: it may be merged."""
        versions = lease.blocks if isinstance(lease, EvaluateLease) else (*lease.trained, *lease.below, *lease.ahead)
        blobs = (blob for version in versions for blob in (version.tensors, version.from_previous))
        return {self._sent} | {blob.sha256 for blob in blobs if blob is not None}

    def keep_payload(self, payload: bytes) -> None:
        """What this worker sends: it need not fetch it where the next version is told by its updates."""
        if not self._by_course:
            return  # too large to be relayed
        self._sent = hashlib.sha256(payload).hexdigest()
        self._cache.mkdir(parents=True, exist_ok=True)
        write_whole(self._cache / self._sent, payload, synced=False)

    def trained(self, versions: Sequence[BlockVersion]) -> dict[int, Tensors]:
        """The tensors of the versions to train. Of other blocks one version stays, the newest: nobody goes by their
        course any more."""
        tensors = self._tensors(versions)
        self._held = {
            (block, number): held
            for (block, number), held in self._held.items()
            if block in tensors or (block, number + 1) not in self._held
        }
        return tensors

    def _tensors(self, versions: Sequence[BlockVersion]) -> dict[int, Tensors]:
        """The tensors of these versions. Others of the same blocks are forgotten, but for the one before each by whose
        course the run goes."""
        wanted = {(version.block, version.version): version for version in versions}
        for key, version in wanted.items():
            self._held[key] = self._held.get(key) or self._fetch(version)
        kept = wanted.keys() | ({(block, number - 1) for block, number in wanted} if self._by_course else set())
        blocks = {block for block, _ in wanted}
        self._held = {key: held for key, held in self._held.items() if key[0] not in blocks or key in kept}
        return {block: self._held[block, number] for block, number in wanted}

    def earlier(self, versions: Sequence[BlockVersion]) -> Tensors | None:
        """The versions before these under the names of an update, where all of them are here."""
        keys = [(version.block, version.version - 1) for version in versions]
        return flat({key[0]: self._held[key] for key in keys}) if all(key in self._held for key in keys) else None

    def mapped(self, versions: Sequence[BlockVersion]) -> dict[int, Tensors]:
        """The same left in files, for blocks that only run: a worker holds no more of them than it uses."""
        for version in versions:
            key, tensors = (version.block, version.version), self._tensors([version])[version.block]
            if key not in self._in_files:
                self._held[key] = self._write_down(version, tensors)
            self._in_files = (self._in_files | {key}) & self._held.keys()
        return {version.block: self._held[version.block, version.version] for version in versions}

    def _write_down(self, version: BlockVersion, tensors: Tensors) -> Tensors:
        """In the cache, under the name of the whole version, also when only the way to it was fetched."""
        path = self._cache / version.tensors.sha256
        if not _is_whole(path, version.tensors.sha256):
            self._cache.mkdir(parents=True, exist_ok=True)
            write_whole(path, encode(tensors), synced=False)
        return decode(mapped(path), expected=self._shapes(version.block), in_place=True)[0]

    def _fetch(self, version: BlockVersion) -> Tensors:
        """Made here, or from the version before where that one is here and the way from it is offered, else whole."""
        if version.version == 0 and (made := self._made(version)) is not None:
            return made
        shapes = self._shapes(version.block)
        before = self._held.get((version.block, version.version - 1))
        if before is not None and version.from_previous is not None:
            difference = self._client.download(version.from_previous, self._cache)
            if not is_recipe(difference):
                return apply_update(before, read_update(difference, shapes))
            if (followed := self._followed(version, before, read_recipe(difference))) is not None:
                return followed
        return decode(self._client.download(version.tensors, self._cache), expected=shapes, in_place=True)[0]

    def _made(self, version: BlockVersion) -> Tensors | None:
        """A block that nobody has trained, as the coordinator made it: afresh, or to go on from the block below. None
        where neither gives its bytes, as the random numbers of another version of torch would."""
        below = [self._held[key] for key in sorted(self._held) if key[0] == version.block - 1]
        fresh = self._newborn(version.block)
        continued = [continue_block(fresh, newest) for newest in below[-1:] if "readout" in newest]
        for tensors in (fresh, *continued):
            if hashlib.sha256(encode(tensors)).hexdigest() == version.tensors.sha256:
                return tensors
        return None

    def _followed(self, version: BlockVersion, before: Tensors, recipe: Recipe) -> Tensors | None:
        """The version made of the updates that it was merged from. None where one of them is not there any more, or
        where they go by a course that this worker has not seen."""
        try:
            updates = self._opened(recipe)
        except RequestRefused:
            return None
        block, earlier = version.block, self._held.get((version.block, version.version - 2))
        if earlier is None and any(update.from_course for update, _ in updates):
            return None
        return by_block(follow(flat({block: before}), updates, flat({block: earlier} if earlier else {})))[block]

    def _open(self, recipe: Recipe) -> list[tuple[EncodedUpdate, float]]:
        shapes = self.named_shapes(recipe.blocks)
        payloads = [(self._client.download(each.payload, self._cache), each.share) for each in recipe.updates]
        return [(read_update(data, shapes), share) for data, share in payloads]


def _is_whole(path: Path, sha256: str) -> bool:
    """A power cut may leave a file of the cache without its bytes."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    return False


def prune_cache(cache: Path, wanted: Collection[str], before_s: float) -> None:
    """Remove what is not wanted and was written before then. What cannot be removed stays until the next time."""
    for file in list(cache.glob("*")):
        with suppress(OSError):
            if file.name not in wanted and file.stat().st_mtime < before_s:
                file.unlink()
