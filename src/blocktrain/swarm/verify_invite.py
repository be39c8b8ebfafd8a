"""Verify from outside: checks a running swarm with what everybody who has an invite can get: the bytes of the newest
versions, the signature of every update, every round that is still kept, merged again, and your own receipts. What only
the coordinator's directory shows is said, not checked. It changes nothing.
Next: verify.py, which checks a directory; coordinator/trust/history.py, what it asks for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
from pydantic import ValidationError

from blocktrain.errors import BlobError, BlockTrainError, ConfigError, RequestRefused, TensorError
from blocktrain.model.block import block_shapes
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.blocks import Blocks
from blocktrain.swarm.coordinator.merging import Merger
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import MergeWeight, Update, Version
from blocktrain.swarm.signatures import is_signed
from blocktrain.swarm.verify import Fault, HashedBlobs, VerifyReport, notice_of
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.messages import Blob, RunInfo, UpdateReceipt
from blocktrain.wire.safetensors import Tensors

NOT_SEEN = (
    "the ledger itself, its chain of acknowledged updates and its noted head",
    "rounds whose updates or versions are no longer kept",
    "audits, and the scores of vettings",
)


def verify_invite(client: CoordinatorClient, receipts: Path | None = None) -> VerifyReport:
    """`receipts` is a worker's file of what coordinators have signed for."""
    with TemporaryDirectory(prefix="blocktrain-verify-") as folder:
        return _OutsideVerifier(client, client.run_info(), Path(folder)).findings(receipts)


class _Versions:
    """What `Blocks` needs of a ledger: the versions that the coordinator told of."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], Version] = {}
        self.sizes: dict[str, int | None] = {}

    def version(self, block: int, version: int) -> Version:
        if (block, version) not in self.known:
            raise BlobError(f"version {version} of block {block} was not told of")
        return self.known[block, version]

    def add(self, told: Mapping[str, Any]) -> Version:
        names = ("block", "version", "sha256", "momentum_sha256", "difference_sha256")
        nowhere: dict[str, Any] = {"phase": None, "round": None, "parent": None, "created_s": 0.0}
        version = Version(**{name: told[name] for name in names}, **nowhere)
        self.known[version.block, version.version] = version
        self.sizes |= {told["sha256"]: told["num_bytes"]}
        if told["momentum_sha256"]:
            self.sizes |= {told["momentum_sha256"]: told["momentum_bytes"]}
        return version


class _RemoteBlobs(HashedBlobs):
    """Blobs that are downloaded when they are read. The client checks their hashes."""

    def __init__(self, client: CoordinatorClient, folder: Path, sizes: Mapping[str, int | None]) -> None:
        super().__init__(folder)
        self._client, self._cache, self._sizes = client, folder, sizes

    def get(self, sha256: str) -> memoryview:
        num_bytes = self._sizes.get(sha256)
        if num_bytes is None:
            raise BlobError(f"blob {sha256} is no longer kept")
        try:
            return self._client.download(Blob(sha256=sha256, num_bytes=num_bytes), self._cache)
        except RequestRefused as refused:
            raise BlobError(str(refused)) from None


class _OutsideVerifier:
    def __init__(self, client: CoordinatorClient, info: RunInfo, folder: Path) -> None:
        self._client, self._info, self._spec = client, info, RunSpec.model_validate(info.spec)
        self._versions = _Versions()
        self._blobs = _RemoteBlobs(client, folder, self._versions.sizes)
        self._blocks = Blocks(self._spec, cast(Ledger, self._versions), cast(Blobs, self._blobs), self._empty)
        self._found, self._updates = VerifyReport(not_seen=NOT_SEEN), dict[str, Update]()

    @staticmethod
    def _zeros(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
        return {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}

    def _empty(self, block: int) -> Tensors:
        """Only its shapes are looked at."""
        return self._zeros(self._shapes(block))

    @lru_cache(None)  # noqa: B019 (it lives as long as the command)
    def _shapes(self, block: int) -> dict[str, tuple[int, ...]]:
        return block_shapes(self._spec, block)

    def _say(self, kind: str, text: str) -> None:
        self._found.faults.append(Fault(kind, text))

    def findings(self, receipts: Path | None) -> VerifyReport:
        self._check_newest()
        self._check_updates()
        for phase in self._spec.phases:
            for merge in self._merges(phase.index):
                self._check_merge(merge)
        if receipts is not None:
            self._check_receipts(receipts)
        return self._found

    def _check_newest(self) -> None:
        """Every byte of the model that is handed out has the hash under which it was announced."""
        for version in self._client.manifest().blocks:
            self._versions.sizes |= {version.tensors.sha256: version.tensors.num_bytes}
            self._found.blobs += 1
            try:
                self._blobs.get(version.tensors.sha256)
            except BlockTrainError as error:
                self._say("blob", f"version {version.version} of block {version.block}: {error}")

    def _check_updates(self) -> None:
        after = 0
        while page := self._client.contributions(after):
            for told in page:
                update = Update(**{**told["update"], "base": {int(k): v for k, v in told["update"]["base"].items()}})
                if update.number <= after:
                    self._say("chain", f"update {update.number} is told after update {after}")
                after = update.number
                self._updates[update.id] = update
                self._versions.sizes |= {update.id: update.num_bytes}
                self._check_signature(update)

    def _check_signature(self, update: Update) -> None:
        self._found.updates += 1
        self._found.signatures += 1
        if not is_signed(notice_of(update, self._blocks), self._info.run):
            self._say("signature", f"update {update.number} is not signed by worker {update.worker[:12]}…")

    def _merges(self, phase: int) -> Iterator[dict[str, Any]]:
        first = 0
        while page := self._client.merges(phase, first):
            yield from page
            first = page[-1]["round"] + 1

    def _check_merge(self, merge: Mapping[str, Any]) -> None:
        base = {version.block: version.version for version in map(self._versions.add, merge["base"])}
        made = [self._versions.add(told) for told in merge["versions"]]
        weights, name = [MergeWeight(**weight) for weight in merge["weights"]], f"phase {merge['phase']}"
        missing = [weight.update for weight in weights if weight.update not in self._updates]
        if missing:
            self._say("version", f"{name}, round {merge['round']} has update {missing[0][:12]}…, which was not told of")
            return
        updates = sorted((self._updates[weight.update] for weight in weights), key=lambda update: update.number)
        if not updates:  # of a ledger that recorded no weights yet
            self._found.not_merged_again += 1
            return
        merger = Merger(self._spec.swarm, self._blocks, cast(Blobs, self._blobs))
        try:
            again = {x.block: x for x in merger.again(merge["phase"], merge["round"], base, updates, weights)}
        except (BlobError, TensorError):
            self._found.not_merged_again += 1
            return
        for version in made:
            self._found.versions += 1
            if again[version.block].sha256 != version.sha256:
                self._say("version", f"version {version.version} of block {version.block} is not what its updates give")

    def _check_receipts(self, path: Path) -> None:
        """What was acknowledged to you is among the contributions."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror}): give a worker's receipts.jsonl") from None
        for line in lines:
            try:
                fields = json.loads(line)
                run, receipt = fields.pop("run"), UpdateReceipt.model_validate(fields)
            except (ValueError, KeyError, AttributeError, ValidationError):
                continue  # torn by a kill
            if run != self._info.run:
                continue  # of another run
            self._found.receipts += 1
            name = f"update {receipt.update[:12]}…"
            if receipt.coordinator not in self._info.coordinators or not is_signed(receipt, run):
                self._say("receipt", f"the receipt of {name} is signed by no coordinator of the run")
            elif receipt.weight and receipt.update not in self._updates:
                self._say("receipt", f"{name} was acknowledged and is not among the contributions")
