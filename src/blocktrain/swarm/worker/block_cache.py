"""The versions of blocks that a worker holds, and the cheapest way to get the ones it needs. In this order: make an
initial block locally, fetch the updates that a version was merged from, fetch the difference from the version before,
fetch the whole version. Does not train.
Next: worker.py, which trains the blocks; client.py, which fetches; wire/recipes.py and wire/updates.py, how a version
is made of updates and of differences."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from blocktrain.errors import RequestRefused, TensorError, foreign_bytes
from blocktrain.io.files import mapped, write_whole
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.attached import Held
from blocktrain.wire.messages import BlockVersion, EvaluateLease, TrainLease, VetLease
from blocktrain.wire.recipes import Recipe, follow_recipe, is_recipe, read_recipe
from blocktrain.wire.safetensors import Shapes, Tensors, by_block, continue_block, decode, encode, flat
from blocktrain.wire.updates import EncodedUpdate, apply_update, read_update


class BlockCache:
    """`shapes` gives the shapes of a block's tensors, `make_initial` makes an initial block. With `keep_earlier` the
    version before each trained one is kept too: updates may be coded from the course of their block."""

    def __init__(
        self,
        client: CoordinatorClient,
        folder: Path,
        *,
        shapes: Callable[[int], Shapes],
        make_initial: Callable[[int], Tensors],
        keep_earlier: bool,
    ) -> None:
        self._client, self._folder, self._keep_earlier = client, folder, keep_earlier
        self.shapes, self._make_initial = shapes, make_initial
        self._held: dict[tuple[int, int], Tensors] = {}  # (block, version) -> tensors
        self._in_files: set[tuple[int, int]] = set()  # the keys of `_held` whose tensors are mapped files
        self._last_payload = ""  # its hash
        self._recipe_updates = lru_cache(1)(self._fetch_recipe_updates)  # one recipe serves all blocks of its phase

    def named_shapes(self, blocks: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The shapes of an update of these blocks."""
        return {f"{block}.{name}": shape for block in blocks for name, shape in self.shapes(block).items()}

    def held(self) -> Held:
        """What need not come with the next lease."""
        return Held(frozenset(self._held), frozenset({self._last_payload} - {""}))

    def needed_blobs(self, lease: TrainLease | EvaluateLease | VetLease) -> set[str]:
        """The hashes of all blobs that the lease may need, and of the last payload, which may be part of a recipe."""
        versions = lease.blocks if isinstance(lease, EvaluateLease) else (*lease.trained, *lease.below, *lease.ahead)
        blobs = (blob for version in versions for blob in (version.tensors, version.from_previous))
        return {self._last_payload} | {blob.sha256 for blob in blobs if blob is not None}

    def keep_payload(self, payload: bytes) -> None:
        """Stores what this worker sends: it need not be fetched if it is part of a recipe."""
        if not self._keep_earlier:
            return  # the updates of this codec are too large for recipes
        self._last_payload = hashlib.sha256(payload).hexdigest()
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._folder / self._last_payload, payload, synced=False)

    def trained(self, versions: Sequence[BlockVersion]) -> dict[int, Tensors]:
        """The tensors of the versions to train. Of every other block, only the newest version is kept."""
        tensors = self._tensors(versions)
        self._held = {
            (block, number): held
            for (block, number), held in self._held.items()
            if block in tensors or (block, number + 1) not in self._held
        }
        return tensors

    def earlier(self, versions: Sequence[BlockVersion]) -> Tensors | None:
        """The versions before these, with the tensor names of an update. None unless all of them are held."""
        keys = [(version.block, version.version - 1) for version in versions]
        return flat({key[0]: self._held[key] for key in keys}) if all(key in self._held for key in keys) else None

    def mapped(self, versions: Sequence[BlockVersion]) -> dict[int, Tensors]:
        """The tensors of versions that only run, mapped from files: a worker loads no more of them than it uses."""
        for version in versions:
            key, tensors = (version.block, version.version), self._tensors([version])[version.block]
            if key not in self._in_files:
                self._held[key] = self._move_to_file(version, tensors)
            self._in_files = (self._in_files | {key}) & self._held.keys()
        return {version.block: self._held[version.block, version.version] for version in versions}

    def _move_to_file(self, version: BlockVersion, tensors: Tensors) -> Tensors:
        """Writes the whole version under its hash, also if it was made of a difference or of updates."""
        path = self._folder / version.tensors.sha256
        if not _is_whole(path, version.tensors.sha256):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, encode(tensors), synced=False)
        return decode(mapped(path), expected=self.shapes(version.block), in_place=True)[0]

    def _tensors(self, versions: Sequence[BlockVersion]) -> dict[int, Tensors]:
        """The tensors of these versions. Other versions of the same blocks are forgotten, except the one before each if
        `keep_earlier`."""
        wanted = {(version.block, version.version): version for version in versions}
        for key, version in wanted.items():
            with foreign_bytes(TensorError, f"version {version.version} of block {version.block}"):
                self._held[key] = self._held.get(key) or self._fetch(version)
        kept = wanted.keys() | ({(block, number - 1) for block, number in wanted} if self._keep_earlier else set())
        blocks = {block for block, _ in wanted}
        self._held = {key: held for key, held in self._held.items() if key[0] not in blocks or key in kept}
        return {block: self._held[block, number] for block, number in wanted}

    def _fetch(self, version: BlockVersion) -> Tensors:
        if version.version == 0 and (made := self._made_here(version)) is not None:
            return made
        shapes = self.shapes(version.block)
        before = self._held.get((version.block, version.version - 1))
        if before is not None and version.from_previous is not None:
            data = self._client.download(version.from_previous, self._folder)
            if not is_recipe(data):
                return apply_update(before, read_update(data, shapes))
            if (followed := self._follow(read_recipe(data), version, before)) is not None:
                return followed
        return decode(self._client.download(version.tensors, self._folder), expected=shapes, in_place=True)[0]

    def _made_here(self, version: BlockVersion) -> Tensors | None:
        """An initial block as the coordinator made it: new, or with the read-out of the block below. None if neither
        has the expected bytes: another version of torch may draw other random numbers."""
        below = [self._held[key] for key in sorted(self._held) if key[0] == version.block - 1]
        new = self._make_initial(version.block)
        continued = [continue_block(new, newest) for newest in below[-1:] if "readout" in newest]
        for tensors in (new, *continued):
            if hashlib.sha256(encode(tensors)).hexdigest() == version.tensors.sha256:
                return tensors
        return None

    def _follow(self, recipe: Recipe, version: BlockVersion, before: Tensors) -> Tensors | None:
        """The version, made of the updates that it was merged from. None if one of them is no longer available, or if
        they are coded from a course that this worker has not seen."""
        try:
            updates = self._recipe_updates(recipe)
        except RequestRefused:
            return None
        block, earlier = version.block, self._held.get((version.block, version.version - 2))
        if earlier is None and any(update.from_course for update, _ in updates):
            return None
        followed = follow_recipe(flat({block: before}), updates, flat({block: earlier} if earlier else {}))
        return by_block(followed)[block]

    def _fetch_recipe_updates(self, recipe: Recipe) -> list[tuple[EncodedUpdate, float]]:
        shapes = self.named_shapes(recipe.blocks)
        payloads = [(self._client.download(each.payload, self._folder), each.share) for each in recipe.updates]
        return [(read_update(data, shapes), share) for data, share in payloads]


def _is_whole(path: Path, sha256: str) -> bool:
    """A power failure may leave a file of the cache without its bytes."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    return False


def prune_cache(folder: Path, needed: Collection[str], before_s: float) -> None:
    """Removes files that are not needed and were written before then. A file that cannot be removed stays until the
    next time."""
    for file in list(folder.glob("*")):
        with suppress(OSError):
            if file.name not in needed and file.stat().st_mtime < before_s:
                file.unlink()
