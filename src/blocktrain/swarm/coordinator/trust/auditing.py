"""Auditing: chooses updates by chance, gives their leases to other workers, and compares what these send. A worker gets
an audit as a lease like any other, and sends its update like any other; it is compared and not merged. It decides
nothing itself. Next: ../../policy/audits.py, which decides; ../../ledger/audits.py, which keeps the facts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from blocktrain.errors import BlobError, RequestRefused, TensorError, foreign_bytes
from blocktrain.spec import Phase, RunSpec
from blocktrain.swarm.coordinator.blobs import Blobs, Uploaded
from blocktrain.swarm.coordinator.blocks import Blocks, recorded_version
from blocktrain.swarm.coordinator.intake import require_tensors
from blocktrain.swarm.ledger.database import retry_on_conflict
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import Audit, AuditLease, NewUpdate
from blocktrain.swarm.policy.audits import (
    AuditReport,
    AuditVerdict,
    finding,
    may_audit,
    share_of,
    votes_needed,
    waits_for_auditors,
)
from blocktrain.swarm.policy.rounds import Round, decide
from blocktrain.swarm.signatures import require_signature
from blocktrain.wire.messages import LeaseRequest, TrainLease, UpdateNotice
from blocktrain.wire.updates import EncodedUpdate, energy, read_update

PRESENT_S = 3600.0  # since a worker's last request: one that trains asks rarely
LIMITS = 2.0  # time limits of a round, that an audit may take


class Auditing:
    """`chance` gives numbers from 0 to 1 that nobody can foresee."""

    def __init__(
        self,
        spec: RunSpec,
        ledger: Ledger,
        blobs: Blobs,
        blocks: Blocks,
        memory_bytes: Callable[[Phase], int],
        run_id: str,
        chance: Callable[[], float],
    ) -> None:
        self._spec, self._ledger, self._blobs, self._blocks = spec, ledger, blobs, blocks
        self._memory_bytes, self._run_id, self._chance = memory_bytes, run_id, chance

    # Who is audited, and by whom

    def consider(self, ledger: Ledger, update: NewUpdate) -> None:
        """Opens an audit of an update that was just recorded, by chance."""
        share = share_of(ledger.key_standing(update.worker).passes, self._spec.swarm) if self._on else 0.0
        if share and self._chance() < share and self._can_be_repeated(ledger, update):
            ledger.open_audit(update, update.received_s)

    @property
    def _on(self) -> bool:
        return self._spec.swarm.has_audits

    def _can_be_repeated(self, ledger: Ledger, update: NewUpdate) -> bool:
        """Not if its worker kept optimiser state, or a block around the trained ones has changed since the grant."""
        lease, newest = ledger.lease(update.lease), ledger.newest()
        assert lease is not None, "the ledger has the lease of an update"
        if not ledger.is_in_company(lease):
            return False
        around = {*self._spec.phases[update.phase].below, *self._spec.phases[update.phase].ahead}
        return all(newest[block].created_s < lease.granted_s for block in around & newest.keys())

    def offer(
        self, ledger: Ledger, request: LeaseRequest, now_s: float, rounds: Mapping[int, Round]
    ) -> TrainLease | None:
        """The oldest audit that this worker may do. Not while it has a lease, or a round waits for it: these come
        first."""
        if not self._on or any(x.is_at_work(request.worker, now_s) for x in rounds.values()):
            return None
        if any(self._is_awaited(ledger, request.worker, round, now_s) for round in rounds.values()):
            return None
        delivered = ledger.track_record(request.worker).delivered
        for audit in ledger.open_audits():
            who = self._participants(ledger, audit, request.worker)
            asked = [who[x.worker] for x in audit.asked]
            pending = sum(x.payload is None and now_s < x.deadline_at_s for x in audit.asked)
            most = votes_needed(len(self._voters(ledger, audit, now_s))) if audit.reports else 1
            if pending >= most or not may_audit(who[request.worker], delivered, who[audit.update.worker], asked):
                continue
            if self._memory_bytes(self._spec.phases[audit.update.phase]) > request.memory_bytes:
                continue
            limit_s = rounds[audit.update.phase].limit_s if audit.update.phase in rounds else 0.0
            deadline_at_s = now_s + LIMITS * max(limit_s, self._spec.swarm.deadline_floor_s)
            return self._message(ledger, ledger.grant_audit(audit, request.worker, now_s, deadline_at_s), audit)
        return None

    def _is_awaited(self, ledger: Ledger, worker: str, round: Round, now_s: float) -> bool:
        return round.lease_of(worker) is None and self.holds(ledger, round, now_s)

    def _message(self, ledger: Ledger, lease: AuditLease, audit: Audit) -> TrainLease:
        """What the audited worker got: the same versions, shard and steps."""
        phase, reference = self._spec.phases[audit.lease.phase], self._blocks.reference
        around = ledger.newest_at(audit.lease.granted_s)
        trained = (recorded_version(ledger, block, audit.update.base[block]) for block in phase.blocks)
        return TrainLease(
            lease=lease.id,
            phase=audit.lease.phase,
            shard=audit.lease.shard,
            step_start=audit.lease.step_start,
            steps=audit.update.steps,
            time_left_s=lease.deadline_at_s - lease.granted_s,
            afresh=True,
            trained=tuple(map(reference, trained)),
            below=tuple(reference(around[block]) for block in phase.below),
            ahead=tuple(reference(around[block]) for block in phase.ahead if block in around),
        )

    # What they report

    def report(
        self,
        notice: UpdateNotice,
        opened: AbstractContextManager[Uploaded],
        lease: AuditLease,
        audit: Audit,
        now_s: float,
    ) -> bool:
        """Takes in the result of an audit, whose bytes are `opened` when the rest is right. False if it was reported
        before."""
        require_signature(notice, self._run_id)
        if lease.worker != notice.worker:
            raise RequestRefused("this lease belongs to another worker: ask for one of your own", code="owner")
        if lease.payload is not None:
            return False
        require_tensors(notice.tensors, self._blocks.shapes(audit.lease.phase))
        if notice.steps != audit.update.steps or notice.tokens != notice.steps * self._spec.step_tokens:
            raise RequestRefused(
                f"{notice.steps} steps were reported and the lease was for {audit.update.steps}: report all of them, "
                f"or ask for another lease",
                code="steps",
            )
        with opened as upload:
            encoded = self._read(upload.data, audit)
            self._blobs.keep(upload, notice.payload.sha256)
            distances = self._distances(encoded, notice.payload.sha256, audit)
        self._record(notice, lease, audit.number, distances, now_s)
        return True

    @retry_on_conflict
    def _record(
        self, notice: UpdateNotice, lease: AuditLease, number: int, distances: Mapping[str, float], now_s: float
    ) -> None:
        with self._ledger.transaction() as ledger:
            payload = notice.payload
            ledger.record_audit(lease.id, payload.sha256, payload.num_bytes, notice.loss, distances, notice.signature)
            audit = ledger.audit(number)
            assert audit is not None, "an audit is never deleted"
            voters = self._voters(ledger, audit, now_s)
            left = voters - set(self._participants(ledger, audit).values())
            pending = any(x.payload is None and now_s < x.deadline_at_s for x in audit.asked)
            exhausted = not left and not pending
            if found := finding(audit.update.worker, audit.reports, len(voters), exhausted, self._spec.swarm):
                ledger.close_audit(audit, found, now_s)
            elif len(audit.reports) == 1:
                self._say_dispute(ledger, audit, audit.reports[-1], now_s)

    def _voters(self, ledger: Ledger, audit: Audit, now_s: float) -> set[str]:
        """The participants that could have a result: those with a worker that is there, has delivered and is not
        excluded."""
        present = ledger.present_workers(now_s - PRESENT_S) | {audit.update.worker, *(x.worker for x in audit.reports)}
        return set(ledger.participants(present).values())

    def _participants(self, ledger: Ledger, audit: Audit, *more: str) -> dict[str, str]:
        """Of the audited worker, those that were asked, and others."""
        return ledger.participants({audit.update.worker, *(x.worker for x in audit.asked), *more})

    def _say_dispute(self, ledger: Ledger, audit: Audit, last: AuditReport, now_s: float) -> None:
        distance = last.distances.get(audit.update.worker, math.inf)
        text = (
            f"phase {audit.lease.phase + 1}, round {audit.lease.round}: two workers differ by {distance:.2g} of their "
            f"updates' norm, at most {self._spec.swarm.audit_tolerance:g} is expected; others decide"
        )
        ledger.add_event("disputed", text, now_s, {"workers": [audit.update.worker, last.worker]})

    def _read(self, data: memoryview, audit: Audit) -> EncodedUpdate:
        phase = audit.lease.phase
        try:
            with foreign_bytes(TensorError, "the update"):
                encoded = read_update(data, self._blocks.shapes(phase), expected=self._blocks.codec(phase))
                encoded.squared_norm(*self._blocks.around(encoded, audit.update.base))
                return encoded
        except TensorError as error:
            raise RequestRefused(str(error), code=error.code) from None

    def _distances(self, mine: EncodedUpdate, sha256: str, audit: Audit) -> dict[str, float]:
        """To what the audited worker and the earlier reporters got. Equal bytes are not decoded."""
        others = {audit.update.worker: audit.update.id}
        others |= {x.worker: x.payload for x in audit.asked if x.payload is not None}
        found = {}
        for worker, other in others.items():
            if other == sha256:
                found[worker] = 0.0
                continue
            try:
                found[worker] = self._distance(mine, self._read(self._blobs.get(other), audit), audit)
            except BlobError:
                continue  # its blob is gone: nothing can be said
        return found

    def _distance(self, one: EncodedUpdate, other: EncodedUpdate, audit: Audit) -> float:
        """|Δ − Δ'| in the norm of the longer one, piece by piece."""
        base, earlier = self._blocks.around(one, audit.update.base)
        apart, mine, theirs = 0.0, 0.0, 0.0
        for name in self._blocks.shapes(audit.lease.phase):
            around = base.get(name), earlier.get(name)
            for a, b in zip(one.pieces(name, *around), other.pieces(name, *around), strict=True):
                apart, mine, theirs = apart + energy(a - b), mine + energy(a), theirs + energy(b)
        longer = max(mine, theirs)
        return math.sqrt(apart / longer) if longer else 0.0

    # What rounds wait for

    def holds(self, ledger: Ledger, round: Round, now_s: float) -> bool:
        """Whether the round, which could close, waits for workers that compute audits or have just done so, and have no
        lease in it yet. Not longer than any other round may take."""
        if not self._on or decide(round, now_s, self._spec.swarm).action != "close":
            return False
        if now_s >= min(round.deadline_at_s, round.ceiling_at_s - round.limit_s):
            return False
        auditing = ledger.auditors(now_s, round.opened_s) - {lease.worker for lease in round.leases}
        if not auditing:
            return False
        present = ledger.present_workers(now_s - PRESENT_S)
        in_round = {x.worker for x in round.reported} | {x.worker for x in round.late}
        who = ledger.participants(present | in_round | auditing)
        updates, there, away = (len({who[worker] for worker in workers}) for workers in (in_round, present, auditing))
        return waits_for_auditors(updates, there, away, ledger.has_dispute())

    # What is no longer possible

    def close_old(self, phase: int, newest: Mapping[int, int], now_s: float) -> None:
        """Audits on versions that are about to be deleted end without an outcome."""
        block, keep = self._spec.phases[phase].block, self._spec.swarm.keep_versions
        for audit in self._ledger.open_audits() if self._on else ():
            if audit.update.phase == phase and newest[block] - audit.update.base[block] > keep - 2:
                nobody = AuditVerdict("undecided", (), "nobody computed it again while its versions were kept")
                self._ledger.close_audit(audit, nobody, now_s)
