"""Verify: checks everything that a run's folder holds. Every blob's hash, the chain of acknowledged updates, their
signatures, and every version, merged again from its updates while these are kept. It changes nothing unless it repairs.
Next: ledger/chain.py, the chain; coordinator/merging.py, which merges again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from blocktrain.errors import BlobError, BlockTrainError, ConfigError, StorageError, TensorError
from blocktrain.io.private import LEDGER_FILE
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.blocks import Blocks
from blocktrain.swarm.coordinator.initial_files import initial_blocks_folder, initial_blocks_in
from blocktrain.swarm.coordinator.merging import Merger
from blocktrain.swarm.coordinator.server import BLOBS_FOLDER
from blocktrain.swarm.coordinator.setup import spec_of
from blocktrain.swarm.coordinator.storage.folder import Data
from blocktrain.swarm.coordinator.trust.orders import past_merges
from blocktrain.swarm.ledger.chain import HEAD_FILE, START, NotedHead, link
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import RollbackRecord, Run, Update, Version
from blocktrain.swarm.policy.vetting import verdict_of
from blocktrain.swarm.signatures import is_signed
from blocktrain.wire.messages import Blob, UpdateNotice, VetNotice


@dataclass(frozen=True)
class Fault:
    kind: str  # "ledger", "blob", "chain", "signature", "vetting", "version"
    text: str
    repaired: bool = False


@dataclass
class VerifyReport:
    """What was checked, counted, and what is wrong."""

    blobs: int = 0
    updates: int = 0
    signatures: int = 0
    versions: int = 0  # merged again with the same bytes
    not_merged_again: int = 0  # their updates were deleted by now
    receipts: int = 0  # of a worker, whose updates are there
    not_seen: tuple[str, ...] = ()  # what cannot be checked from outside
    faults: list[Fault] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return all(fault.repaired for fault in self.faults)


def verify(
    folder: Path, ledger_url: str | None = None, blobs_url: str | None = None, repair: bool = False
) -> VerifyReport:
    """Checks the run of a coordinator's folder. The coordinator may be running, but not with `repair`."""
    if ledger_url is None and not (folder / LEDGER_FILE).exists():
        raise ConfigError(f"{folder} has no {LEDGER_FILE}: give the --dir of a coordinator")
    ledger = Ledger(ledger_url or folder / LEDGER_FILE)
    try:
        run = ledger.run()
        if run is None:
            raise ConfigError(f"the ledger at {ledger.database.where} holds no run: give that of a coordinator")
        return _Verifier(folder, run, ledger, Blobs(blobs_url or folder / BLOBS_FOLDER), repair).findings()
    finally:
        ledger.close()


class HashedBlobs(Blobs):
    """The same blobs. What is put is hashed and not stored."""

    def put(self, data: Data | Iterable[Data], sha256: str | None = None) -> str:
        digest = hashlib.sha256()
        for chunk in [data] if isinstance(data, bytes | memoryview) else data:
            digest.update(chunk)
        return digest.hexdigest()


class _Verifier:
    def __init__(self, folder: Path, run: Run, ledger: Ledger, blobs: Blobs, repair: bool) -> None:
        self._folder, self._run, self._ledger, self._blobs, self._repair = folder, run, ledger, blobs, repair
        self._spec = spec_of(run)
        self._found = VerifyReport()

    def findings(self) -> VerifyReport:
        with self._faults("ledger"):
            self._check_database()
        with self._faults("chain"):
            self._check_chain()
        with self._faults("signature"):
            self._check_audits()
            self._check_vettings()
        damaged = self._check_blobs()
        self._check_versions(damaged)
        return self._found

    def _faults(self, kind: str) -> _Faults:
        return _Faults(kind, self._found)

    def _say(self, kind: str, text: str, repaired: bool = False) -> None:
        self._found.faults.append(Fault(kind, text, repaired))

    def _check_database(self) -> None:
        with self._ledger.database.reading() as connection:
            if connection.dialect.name == "sqlite":
                for (said,) in connection.exec_driver_sql("PRAGMA integrity_check"):
                    if said != "ok":
                        self._say("ledger", str(said).partition("\n")[0])

    # Updates

    def _check_chain(self) -> None:
        links, previous = self._ledger.chain_links(), START
        for update in self._updates():
            if update.number not in links:
                if previous != START:
                    self._say("chain", f"update {update.number} is not in the chain of acknowledged updates")
                continue  # it was recorded before ledgers had a chain
            self._found.updates += 1
            before, recorded = links.pop(update.number)
            if before != previous or recorded != link(previous, update.number, update):
                self._say("chain", f"update {update.number}, or one before it, is not what was acknowledged")
            previous = recorded
            self._check_signature(update)
        for number in links:
            self._say("chain", f"update {number} was acknowledged and is not in the ledger")
        self._check_head()

    def _check_head(self) -> None:
        head = NotedHead(self._folder / HEAD_FILE).read()
        if head is not None and self._ledger.chain_links().get(head.number, ("", ""))[1] != head.sha256:
            self._say("chain", f"update {head.number} was acknowledged, by {HEAD_FILE}, and the ledger has it no more")

    def _updates(self) -> Iterator[Update]:
        after = 0
        while page := self._ledger.contributions(after):
            yield from (x.update for x in page)
            after = page[-1].update.number

    def _check_signature(self, update: Update) -> None:
        self._found.signatures += 1
        if not is_signed(notice_of(update, self._blocks), self._run.id):
            self._say("signature", f"update {update.number} is not signed by worker {update.worker[:12]}…")

    def _check_audits(self) -> None:
        """What workers reported of audited leases is signed by them."""
        for audit in self._ledger.audits():
            for asked in audit.asked:
                if asked.payload is None:
                    continue
                said = replace(
                    audit.update,
                    id=asked.payload,
                    worker=asked.worker,
                    lease=asked.id,
                    num_bytes=asked.num_bytes or 0,
                    loss=asked.loss or 0.0,
                    signature=asked.signature or "",
                )
                self._check_signature(said)

    def _check_vettings(self) -> None:
        """Scores are signed by their workers, and what was left out follows from them."""
        for vetting in self._ledger.all_vettings():
            for seat in vetting.seats:
                if seat.losses is None:
                    continue
                self._found.signatures += 1
                notice = VetNotice(lease=seat.id, worker=seat.worker, **seat.losses, signature=seat.signature or "")
                if not is_signed(notice, self._run.id):
                    self._say("signature", f"a score of vetting {vetting.number} is not signed by {seat.worker[:12]}…")
            if vetting.verdict and vetting.verdict["outcome"] == "vetted":
                found = verdict_of(vetting.reports, 0, ended=True)
                if {vetting.updates[at] for at in (found.harmful if found else ())} != set(vetting.harmful):
                    self._say("vetting", f"vetting {vetting.number} left out other updates than its scores say")

    # Blobs and versions

    def _check_blobs(self) -> set[str]:
        """Those that are damaged, or missing although something needs them."""
        damaged, needed = set[str](), self._ledger.live_blobs(self._spec.swarm.keep_versions)
        for sha256 in sorted({*self._blobs.iterate(), *needed}):
            self._found.blobs += 1
            try:
                self._blobs.get(sha256)
            except BlobError as error:
                if not self._blobs.exists(sha256) and sha256 not in needed:
                    continue  # deleted while we looked
                damaged.add(sha256)
                if sha256 not in needed and self._repair:
                    self._blobs.delete(sha256)
                    self._say("blob", f"{error} (nothing needs it: deleted)", repaired=True)
                elif not self._ledger.versions_with(sha256):
                    self._say("blob", str(error))
        return damaged

    def _check_versions(self, damaged: set[str]) -> None:
        merged = dict[tuple[int, int], list[Version]]()
        for version in self._ledger.all_versions():
            if version.phase is not None and version.round is not None:
                merged.setdefault((version.phase, version.round), []).append(version)
            elif version.version > 0:
                self._check_rollback(version)
            elif version.sha256 in damaged:
                self._say("version", f"initial block {version.block} is damaged: restore blob {version.sha256}")
        for (phase, round), versions in merged.items():
            with self._faults("version"):
                self._check_round(phase, round, versions, damaged)

    def _check_rollback(self, version: Version) -> None:
        """A version that no round made is one that an admin made, of versions and updates that there were."""
        made = [x for x in self._ledger.rollbacks() if (x.block, x.version) == (version.block, version.version)]
        name = f"version {version.version} of block {version.block}"
        if not made:
            self._say("version", f"{name} was made by no round and by no rollback")
            return
        source = self._ledger.version(version.block, made[0].source)
        sha256 = source.sha256 if source else None
        if worker := made[0].worker:
            first = self._first_round(made[0])
            past = past_merges(self._ledger, made[0].phase, first, made[0].round - 1, worker)
            try:
                sha256 = self._hashing.without(made[0].phase, past)[version.block]
            except (BlobError, TensorError):
                self._found.not_merged_again += 1
                return
        self._found.versions += 1
        if sha256 != version.sha256:
            self._say("version", f"{name} is not what its rollback gives")

    def _first_round(self, made: RollbackRecord) -> int:
        """The round that was based on the rollback's source."""
        records = self._ledger.rounds(made.phase, limit=10**6)
        return next(x.round.number for x in records if x.round.base.get(made.block) == made.source)

    def _check_round(self, phase: int, round: int, versions: list[Version], damaged: set[str]) -> None:
        updates = self._ledger.merged_updates(phase, round)
        if not updates:
            self._say("version", f"the updates of phase {phase}, round {round} are not in the ledger")
            return
        broken = damaged & {
            blob for x in versions for blob in (x.sha256, x.momentum_sha256, x.difference_sha256) if blob is not None
        }
        merger = self._storing if self._repair and broken else self._hashing
        try:
            base, weights = self._ledger.base_of(phase, round), self._ledger.merge_weights(phase, round)
            again = {x.block: x for x in merger.again(phase, round, base, updates, weights)}
        except (BlobError, TensorError):
            self._found.not_merged_again += 1
            for sha256 in sorted(broken):
                gone = "what it was merged from is no longer kept: restore it from a copy"
                self._say("blob", f"blob {sha256} of phase {phase}, round {round} is damaged, and {gone}")
            return
        for version in versions:
            self._found.versions += 1
            if again[version.block].sha256 != version.sha256:
                self._say("version", f"version {version.version} of block {version.block} is not what its updates give")
            elif broken:
                repaired = "merged again" if self._repair else "blocktrain verify --repair merges it again"
                text = f"version {version.version} of block {version.block} has a damaged blob: {repaired}"
                self._say("version", text, repaired=self._repair)

    @cached_property
    def _blocks(self) -> Blocks:
        return self._blocks_of(self._blobs)

    def _blocks_of(self, blobs: Blobs) -> Blocks:
        initial = initial_blocks_folder(self._folder, self._run.spec_digest)
        if not initial.is_dir():
            raise StorageError(f"{initial} is missing: start the coordinator once, it makes the initial blocks again")
        return Blocks(self._spec, self._ledger, blobs, initial_blocks_in(initial))

    @cached_property
    def _hashing(self) -> Merger:
        """Stores nothing."""
        blobs = HashedBlobs(self._blobs.where)
        return Merger(self._spec.swarm, self._blocks_of(blobs), blobs)

    @cached_property
    def _storing(self) -> Merger:
        return Merger(self._spec.swarm, self._blocks, self._blobs)


class _Faults:
    """An error that ends one check is a finding, and the others go on."""

    def __init__(self, kind: str, found: VerifyReport) -> None:
        self._kind, self._found = kind, found

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, BlockTrainError):
            return False
        self._found.faults.append(Fault(self._kind, str(error)))
        return True


def notice_of(update: Update, blocks: Blocks) -> UpdateNotice:
    """What the worker signed when it sent this update."""
    return UpdateNotice(
        worker=update.worker,
        lease=update.lease,
        tensors=dict(blocks.shapes(update.phase)),
        payload=Blob(sha256=update.id, num_bytes=update.num_bytes),
        steps=update.steps,
        tokens=update.tokens,
        loss=update.loss,
        signature=update.signature,
    )
