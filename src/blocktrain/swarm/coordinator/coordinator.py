"""Coordinator: what workers and people ask. A request records facts and returns; loop.py does what follows from them.
It holds no state of its own: several may share one ledger. It never builds a model; initial blocks are given to it.
Next: granting.py and intake.py, which check requests; loop.py, which opens phases and merges rounds."""

from __future__ import annotations

from collections.abc import Callable
from random import SystemRandom
from typing import BinaryIO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.errors import RequestRefused
from blocktrain.spec import Phase, RunSpec
from blocktrain.swarm.coordinator.attaching import attached
from blocktrain.swarm.coordinator.bell import Bell
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.blocks import Blocks, own_blobs
from blocktrain.swarm.coordinator.granting import Granting
from blocktrain.swarm.coordinator.intake import CheckedUpdate, Intake, phase_over
from blocktrain.swarm.coordinator.loop import CoordinatorLoop
from blocktrain.swarm.coordinator.merging import Merger
from blocktrain.swarm.coordinator.quotas import Quotas, StorageLimits
from blocktrain.swarm.coordinator.trust.auditing import Auditing
from blocktrain.swarm.coordinator.trust.history import History
from blocktrain.swarm.coordinator.trust.orders import Orders
from blocktrain.swarm.coordinator.trust.vetting import Vetting
from blocktrain.swarm.coordinator.watching.status import Watching
from blocktrain.swarm.ledger.audits import is_audit
from blocktrain.swarm.ledger.chain import NotedHead
from blocktrain.swarm.ledger.database import retry_on_conflict
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import Audit, AuditLease, Run, Standing, Update
from blocktrain.swarm.run_clock import RunClock
from blocktrain.swarm.signatures import public_half, sign
from blocktrain.wire.attached import Held, encode_attached
from blocktrain.wire.messages import (
    INDEX_BLOB,
    LeaseReply,
    LeaseRequest,
    ModelManifest,
    RunInfo,
    TrainLease,
    UpdateNotice,
    UpdateReceipt,
    VetNotice,
)
from blocktrain.wire.people_messages import BanOrder, RollbackOrder
from blocktrain.wire.safetensors import Encoded, Tensors

UNFORESEEN = SystemRandom().random


class Coordinator:
    """`initial_block` gives a block's tensors before any training; `memory_bytes` says what training a phase takes.
    `clock` never goes back. `receipt_key` signs receipts; without one, it is made for this coordinator. `noted_head`
    keeps the head of the chain of updates beside the ledger. `chance` chooses the updates that are audited: nobody can
    foresee it."""

    def __init__(
        self,
        spec: RunSpec,
        ledger: Ledger,
        blobs: Blobs,
        *,
        initial_block: Callable[[int], Tensors],
        memory_bytes: Callable[[Phase], int] = lambda _: 0,
        clock: Callable[[], float] | None = None,
        storage: StorageLimits | None = None,
        receipt_key: Ed25519PrivateKey | None = None,
        noted_head: NotedHead | None = None,
        chance: Callable[[], float] = UNFORESEEN,
    ) -> None:
        clock = clock or RunClock(ledger.latest_moment_s())
        self._spec, self._ledger, self.blobs, self._clock = spec, ledger, blobs, clock
        self._noted_head = noted_head
        self._receipt_key = receipt_key or Ed25519PrivateKey.generate()
        ledger.add_coordinator_key(public_half(self._receipt_key), clock())
        run, self._blocks = self._run(), Blocks(spec, ledger, blobs, initial_block)
        self._run_id = run.id
        self._auditing = Auditing(spec, ledger, blobs, self._blocks, memory_bytes, run.id, chance)
        self.bell = Bell()
        self._vetting = Vetting(spec, ledger, self._blocks, memory_bytes, run.id, chance, self.bell.ring)
        trust = self._auditing, self._vetting
        index = run.corpus.get(INDEX_BLOB)
        self._granting = Granting(spec, ledger, blobs, self._blocks, memory_bytes, run.id, *trust, index)
        self.quotas = Quotas(blobs, storage or StorageLimits())
        self.intake = Intake(spec, ledger, blobs, self._blocks, self.quotas, clock, run.id)
        self.watching = Watching(spec, ledger, self.quotas, clock)
        self.history = History(ledger, blobs)
        self._orders = Orders(spec, ledger, blobs, Merger(spec.swarm, self._blocks, blobs))
        self.loop = CoordinatorLoop(spec, ledger, blobs, self._blocks, self.quotas, *trust, self.bell, clock)

    def _run(self) -> Run:
        run = self._ledger.run()
        assert run is not None, "a coordinator is started on a ledger with a run"
        return run

    def info(self) -> RunInfo:
        run, public = self._run(), self._spec.without_paths()
        with own_blobs():
            corpus = {split: self._blocks.blob(sha256) for split, sha256 in run.corpus.items()}
        return RunInfo(
            run=run.id,
            coordinators=self._ledger.coordinator_keys(),
            spec=public.model_dump(mode="json"),
            spec_digest=public.digest(),
            corpus_sha256=run.corpus_sha256,
            corpus=corpus,
        )

    def lease(self, request: LeaseRequest, admitted: bool = False, access_token: str | None = None) -> LeaseReply:
        """`admitted`: this very request was checked and answered with a wait, and is asked once more."""
        if not admitted:
            self._granting.require_fit(request)
        with own_blobs():
            reply, standing = self._granting.work(request, self._clock(), admitted, access_token)
        self.loop.follow(standing)
        return reply

    def with_blobs(self, lease: TrainLease, held: Held, worker: str) -> list[Encoded] | None:
        """The lease with the small blobs that the worker lacks, in chunks; None if there are none."""
        found = attached(lease, held, self.blobs)
        self.watching.traffic.sent(sum(blob.num_bytes for blob in found), worker)
        return encode_attached(lease, tuple(found), found.values()) if found else None

    def update(self, notice: UpdateNotice, part: BinaryIO | None = None) -> UpdateReceipt:
        """Check, record, follow. When this returns, the update survives a kill. A refused one leaves an event for
        people to see, and nothing else. Its payload was uploaded before, or came with it as this `part`, a file."""
        try:
            with own_blobs():
                if found := self._ledger.audit_lease(notice.lease) if is_audit(notice.lease) else None:
                    return self._audited(notice, part, *found)
                checked = self.intake.check(notice, part)
                if isinstance(checked, Update):
                    return self._receipt(checked, duplicate=True)
                recorded, standing = self._record(checked)
            self.loop.follow(standing)
            if recorded is None:  # another coordinator has just ended the phase
                raise phase_over(checked.lease.phase)
            if self._noted_head and (head := self._ledger.chain_head()):
                self._noted_head.note(head)
            return self._receipt(*recorded)
        except RequestRefused as refused:
            data = {"code": refused.code, "worker": notice.worker, "lease": notice.lease}
            self._ledger.add_event("refused", str(refused), self._clock(), data)
            raise

    @retry_on_conflict
    def _record(self, checked: CheckedUpdate) -> tuple[tuple[Update, bool] | None, Standing]:
        """The update, and whether it was there already; None when its phase is over. And how things stand with it."""
        with self._ledger.transaction() as transaction:
            # A merge since the check may have made the update too old. Its facts are read again in this transaction.
            new = self.intake.facts(transaction, checked)
            recorded = transaction.record_update(new)
            if recorded and not recorded[1]:
                self._auditing.consider(transaction, new)
            return recorded, transaction.standing()

    def _audited(self, notice: UpdateNotice, part: BinaryIO | None, lease: AuditLease, audit: Audit) -> UpdateReceipt:
        """The result of an audit is compared, and weighs nothing."""
        new = self._auditing.report(notice, self.intake.opened(notice, part), lease, audit, self._clock())
        self.quotas.finished(notice.lease)
        self.loop.due.set()
        payload = notice.payload.sha256 if new else lease.payload or notice.payload.sha256
        return self._signed_receipt(payload, lease.id, lease.worker, lag=0, weight=0.0, duplicate=not new)

    def _receipt(self, update: Update, duplicate: bool) -> UpdateReceipt:
        return self._signed_receipt(update.id, update.lease, update.worker, update.lag, update.weight, duplicate)

    def _signed_receipt(
        self, update: str, lease: str, worker: str, lag: int, weight: float, duplicate: bool
    ) -> UpdateReceipt:
        unsigned = UpdateReceipt(
            coordinator=public_half(self._receipt_key),
            update=update,
            lease=lease,
            worker=worker,
            lag=lag,
            weight=weight,
            duplicate=duplicate,
        )
        return sign(unsigned, self._receipt_key, self._run_id)

    def vetted(self, notice: VetNotice) -> None:
        """The scores of a worker that was asked to score the updates of a round."""
        self._vetting.report(notice)
        self.loop.due.set()

    def manifest(self) -> ModelManifest:
        info, newest = self.info(), self._ledger.consistent_manifest()
        with own_blobs():
            blocks = tuple(self._blocks.reference(version) for version in newest.blocks.values())
        return ModelManifest(
            spec=info.spec,
            spec_digest=info.spec_digest,
            corpus_sha256=info.corpus_sha256,
            blocks=blocks,
            finished=tuple(phase.phase for phase in newest.phases if phase.finished),
            steps={phase.phase: phase.step for phase in newest.phases},
            combine={path: tuple(weights) for path, weights in newest.combine.items()},
        )

    def ban(self, order: BanOrder) -> str:
        return self._orders.ban(order, self._clock())

    def roll_back(self, order: RollbackOrder) -> str:
        with own_blobs():
            done = self._orders.roll_back(order, self._clock())
        self.bell.ring()
        return done

    def pause(self, paused: bool) -> None:
        """Workers at work may still send their updates. No worker gets more work until the run is resumed."""
        self._ledger.set_paused(paused, self._clock())
        self.bell.ring()
