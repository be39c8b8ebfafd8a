"""Coordinator: what workers and people ask. A request records facts and returns; loop.py does what follows from them.
It holds no state of its own: several may share one ledger. It never builds a model; initial blocks are given to it.
Next: granting.py and intake.py, which check requests; loop.py, which opens phases and merges rounds."""

from __future__ import annotations

import time
from collections.abc import Callable

from blocktrain.errors import RequestRefused
from blocktrain.spec import Phase, RunSpec
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.blocks import Blocks, Tensors, own_blobs
from blocktrain.swarm.coordinator.granting import Granting
from blocktrain.swarm.coordinator.intake import CheckedUpdate, Intake, phase_over
from blocktrain.swarm.coordinator.loop import Bell, CoordinatorLoop
from blocktrain.swarm.coordinator.status import Watching
from blocktrain.swarm.ledger.database import retry_on_conflict
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import Standing, Update
from blocktrain.wire.messages import (
    LeaseReply,
    LeaseRequest,
    ModelManifest,
    RunInfo,
    UpdateNotice,
    UpdateReceipt,
)


class Coordinator:
    """`initial_block` gives a block's tensors before any training; `memory_bytes` says what training a phase takes."""

    def __init__(
        self,
        spec: RunSpec,
        ledger: Ledger,
        blobs: Blobs,
        *,
        initial_block: Callable[[int], Tensors],
        memory_bytes: Callable[[Phase], int] = lambda _: 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._spec, self._ledger, self.blobs, self._clock = spec, ledger, blobs, clock
        self._blocks = Blocks(spec, ledger, blobs, initial_block)
        self._granting = Granting(spec, ledger, self._blocks, memory_bytes)
        self.intake = Intake(spec, ledger, blobs, self._blocks, clock)
        self.watching = Watching(spec, ledger, clock)
        self.bell = Bell()
        self.loop = CoordinatorLoop(spec, ledger, blobs, self._blocks, self.bell, clock)

    def info(self) -> RunInfo:
        run = self._ledger.run()
        assert run is not None, "a coordinator is started on a ledger with a run"
        with own_blobs():
            corpus = {split: self._blocks.blob(sha256) for split, sha256 in run.corpus.items()}
        return RunInfo(
            spec=self._spec.model_dump(mode="json"),
            spec_digest=run.spec_digest,
            corpus_sha256=run.corpus_sha256,
            corpus=corpus,
        )

    def lease(self, request: LeaseRequest, admitted: bool = False) -> LeaseReply:
        """`admitted`: this very request was answered with a wait, and is asked once more."""
        self._granting.require_fit(request)
        with own_blobs():
            reply, standing = self._granting.work(request, self._clock(), admitted)
        self.loop.follow(standing)
        return reply

    def update(self, notice: UpdateNotice) -> UpdateReceipt:
        """Check, record, follow. When this returns, the update survives a kill. A refused one leaves an event for
        people to see, and nothing else."""
        try:
            with own_blobs():
                checked = self.intake.check(notice)
                if isinstance(checked, Update):
                    return _receipt(checked, duplicate=True)
                recorded, standing = self._record(checked)
            self.loop.follow(standing)
            if recorded is None:  # another coordinator has just ended the phase
                raise phase_over(checked.lease.phase)
            return _receipt(*recorded)
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
            return transaction.record_update(new), transaction.standing()

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
            combine=dict(newest.combine),
        )

    def pause(self, paused: bool) -> None:
        """Workers at work may still send their updates. No worker gets more work until the run is resumed."""
        self._ledger.set_paused(paused, self._clock())
        self.bell.ring()


def _receipt(update: Update, duplicate: bool) -> UpdateReceipt:
    return UpdateReceipt(update=update.id, lag=update.lag, weight=update.weight, duplicate=duplicate)
