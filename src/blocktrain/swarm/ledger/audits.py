"""Audits, and who is excluded from the run. A part of the ledger.
Next: ../policy/audits.py, which decides; tables.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import BindParameter, and_, bindparam, func, or_, select, update

from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.database import LedgerPart, changed
from blocktrain.swarm.ledger.drivers.connection import Connection
from blocktrain.swarm.ledger.open_rounds import LOCKED, mark_after
from blocktrain.swarm.ledger.queries import WAITING, insert_event, lease_of, update_of
from blocktrain.swarm.ledger.records import Audit, AuditLease, AuditSummary, LeaseRecord, NewUpdate
from blocktrain.swarm.policy.audits import AuditVerdict
from blocktrain.swarm.policy.standing import Exclusion, KeyStanding

OPEN_AUDIT = t.audits.c.outcome.is_(None)
MOST_OPEN = 100  # audits that are looked at when a worker asks for work
_NEWEST = select(func.max(t.exclusions.c.number)).group_by(t.exclusions.c.worker)
EXCLUDED = select(t.exclusions).where(t.exclusions.c.number.in_(_NEWEST), t.exclusions.c.kind != "lifted")
_EXCLUSION = EXCLUDED.where(t.exclusions.c.worker == bindparam("of_worker"))
_WORKERS: BindParameter[str] = bindparam("workers", expanding=True)
_EXCLUDED_OF = EXCLUDED.where(t.exclusions.c.worker.in_(_WORKERS))
_PASSES = select(t.audits.c.worker, func.count()).where(t.audits.c.outcome == "passed").group_by(t.audits.c.worker)
_PASSES_OF = _PASSES.where(t.audits.c.worker.in_(_WORKERS))
OPEN_AUDITS = select(t.audits).where(OPEN_AUDIT).order_by(t.audits.c.number).limit(MOST_OPEN)
_IN_COMPANY = (
    select(t.updates.c.number)
    .where(t.updates.c.merged_phase == bindparam("of_phase"), t.updates.c.merged_round < bindparam("of_round"))
    .where(t.updates.c.worker != bindparam("of_worker"))
    .limit(1)
)
_AUDITORS = select(t.audit_leases.c.worker).where(
    or_(
        and_(t.audit_leases.c.payload.is_(None), t.audit_leases.c.deadline_at_s > bindparam("now_s")),
        t.audit_leases.c.granted_s >= bindparam("since_s"),
    )
)
_PRESENT = (
    select(t.workers.c.id)
    .join(t.track_records, t.track_records.c.worker == t.workers.c.id)
    .where(t.workers.c.last_seen_s >= bindparam("since_s"), t.track_records.c.delivered > 0)
)
_SUSPECTS = (
    select(t.audits.c.worker, t.audit_leases.c.worker.label("other"))
    .join(
        t.audit_leases,
        and_(t.audit_leases.c.audit == t.audits.c.number, t.audit_leases.c.payload.is_not(None)),
    )
    .where(OPEN_AUDIT)
)
_DISPUTE = _SUSPECTS.limit(1)
_AUDIT_LEASE = select(*t.columns(t.audit_leases)).where(t.audit_leases.c.id == bindparam("of_id"))
_ASKED = (
    select(*t.columns(t.audit_leases))
    .where(t.audit_leases.c.audit == bindparam("of_audit"))
    .order_by(t.audit_leases.c.granted_s, t.audit_leases.c.id)
)


def is_audit(lease_id: str) -> bool:
    """The id of an audit's lease has one part more than that of another."""
    return lease_id.count("-") == 3


class AuditsPart(LedgerPart):
    """Audits and exclusions. None is ever deleted."""

    # Audits

    def open_audit(self, audited: NewUpdate, now_s: float) -> None:
        with self._writing() as connection:
            row = {"update": audited.id, "worker": audited.worker, "opened_s": now_s}
            connection.execute(t.insert_into(t.audits), row)

    def open_audits(self) -> tuple[Audit, ...]:
        """The oldest, in order."""
        with self._reading() as connection:
            return tuple(_audit(connection, row) for row in connection.execute(OPEN_AUDITS).all())

    def audit(self, number: int) -> Audit | None:
        with self._reading() as connection:
            row = connection.execute(select(t.audits).where(t.audits.c.number == number)).one_or_none()
            return _audit(connection, row) if row else None

    def audits(self) -> tuple[Audit, ...]:
        with self._reading() as connection:
            rows = connection.execute(select(t.audits).order_by(t.audits.c.number)).all()
            return tuple(_audit(connection, row) for row in rows)

    def audit_counts(self) -> dict[str, int]:
        """By outcome; "open" are those without one."""
        query = select(t.audits.c.outcome, func.count()).group_by(t.audits.c.outcome)
        with self._reading() as connection:
            return {outcome or "open": number for outcome, number in connection.execute(query)}

    def newest_audits(self, limit: int) -> tuple[AuditSummary, ...]:
        """Those that are closed, newest first. An open one is nobody's business: who is asked should not know it."""
        of_audit = (t.audits.c.worker, t.audits.c.closed_s, t.audits.c.outcome)
        query = select(*of_audit, t.leases.c.phase, t.leases.c.round).where(t.audits.c.outcome.is_not(None))
        query = query.join(t.updates, t.updates.c.id == t.audits.c.update)
        query = query.join(t.leases, t.leases.c.id == t.updates.c.lease)
        with self._reading() as connection:
            rows = connection.execute(query.order_by(t.audits.c.closed_s.desc(), t.audits.c.number.desc()).limit(limit))
            return tuple(AuditSummary(**row._asdict()) for row in rows)

    def grant_audit(self, audit: Audit, worker: str, now_s: float, deadline_at_s: float) -> AuditLease:
        """For a worker it is a lease like any other, unless it looks closely at the id."""
        id = f"{audit.lease.phase}-{audit.lease.round}-{worker}-{audit.number}"
        row = {"id": id, "audit": audit.number, "worker": worker, "granted_s": now_s, "deadline_at_s": deadline_at_s}
        unset = dict.fromkeys(("payload", "num_bytes", "loss", "distances", "signature"))
        with self._writing() as connection:
            connection.execute(t.insert_into(t.audit_leases), {**row, **unset})
        return AuditLease(**row, **unset)  # type: ignore[arg-type]

    def audit_lease(self, id: str) -> tuple[AuditLease, Audit] | None:
        with self._reading() as connection:
            row = connection.execute(_AUDIT_LEASE, {"of_id": id}).one_or_none()
            if row is None:
                return None
            audit = connection.execute(select(t.audits).where(t.audits.c.number == row.audit)).one()
            return AuditLease(**row._asdict()), _audit(connection, audit)

    def record_audit(
        self, lease: str, payload: str, num_bytes: int, loss: float, distances: Mapping[str, float], signature: str
    ) -> None:
        """What a worker got for an audited lease. A second report changes nothing."""
        facts = {"payload": payload, "num_bytes": num_bytes, "loss": loss, "distances": dict(distances)}
        unreported = and_(t.audit_leases.c.id == lease, t.audit_leases.c.payload.is_(None))
        with self._writing() as connection:
            connection.execute(update(t.audit_leases).where(unreported).values(**facts, signature=signature))

    def auditors(self, now_s: float, since_s: float) -> set[str]:
        """The workers that compute an audit and may still report it, or were given one since then."""
        with self._reading() as connection:
            return set(connection.execute(_AUDITORS, {"now_s": now_s, "since_s": since_s}).scalars())

    def is_in_company(self, lease: LeaseRecord) -> bool:
        """Whether the lease starts afresh: it is of its phase's first round, or an earlier round has an update of
        another worker. Earlier rounds never change, so that the answer stays the same."""
        if lease.round == 0:
            return True
        before = {"of_phase": lease.phase, "of_round": lease.round, "of_worker": lease.worker}
        with self._reading() as connection:
            return connection.execute(_IN_COMPANY, before).first() is not None

    def close_audit(self, audit: Audit, found: AuditVerdict, now_s: float) -> bool:
        """Records the outcome, and excludes who lied. False if it was closed before."""
        close = update(t.audits).where(t.audits.c.number == audit.number, OPEN_AUDIT)
        where = f"phase {audit.lease.phase + 1}, round {audit.lease.round}"
        with self._writing() as connection:
            if not changed(connection.execute(close.values(outcome=found.outcome, closed_s=now_s))):
                return False
            text = f"{alias_of(audit.update.worker)} in {where}: {found.outcome}, {found.reason}"
            data = {"worker": audit.update.worker, "update": audit.update.id, "outcome": found.outcome}
            insert_event(connection, "audited", text, now_s, data)
            for liar in found.liars:
                reason = f"its result for {where}, shard {audit.lease.shard} is not what most other workers computed"
                self._exclude(connection, liar, "quarantined", reason, now_s)
            return True

    def has_dispute(self) -> bool:
        """Whether an audit is open in which two workers contradict each other."""
        with self._reading() as connection:
            return connection.execute(_DISPUTE).first() is not None

    # Standing

    def exclude(self, worker: str, kind: Exclusion, reason: str, now_s: float) -> None:
        with self._writing() as connection:
            self._exclude(connection, worker, kind, reason, now_s)

    def lift_exclusion(self, worker: str, now_s: float) -> bool:
        """False if the worker was not excluded."""
        with self._writing() as connection:
            if not connection.execute(_EXCLUSION, {"of_worker": worker}).one_or_none():
                return False
            row = {"worker": worker, "kind": "lifted", "reason": "by an admin", "at_s": now_s}
            connection.execute(t.insert_into(t.exclusions), row)
            insert_event(connection, "lifted", f"{alias_of(worker)} may work again", now_s, {"worker": worker})
            return True

    def present_workers(self, since_s: float) -> set[str]:
        """Those that asked for something since then, have delivered an update, and are not excluded."""
        with self._reading() as connection:
            out = {row.worker for row in connection.execute(EXCLUDED)}
            return set(connection.execute(_PRESENT, {"since_s": since_s}).scalars()) - out

    def exclusion(self, worker: str) -> KeyStanding:
        """Whether the worker is excluded, and why; nothing else of its standing."""
        with self._reading() as connection:
            row = connection.execute(_EXCLUSION, {"of_worker": worker}).one_or_none()
            return KeyStanding(excluded=row.kind, reason=row.reason) if row else KeyStanding()

    def key_standing(self, worker: str) -> KeyStanding:
        return self.key_standings([worker])[worker]

    def key_standings(self, workers: Collection[str] | None = None) -> dict[str, KeyStanding]:
        """Of these workers, or of all that are known for something."""
        passed, excluded = (_PASSES, EXCLUDED) if workers is None else (_PASSES_OF, _EXCLUDED_OF)
        which = {} if workers is None else {"workers": list(workers)}
        with self._reading() as connection:
            passes = {row[0]: row[1] for row in connection.execute(passed, which)}
            out = {row.worker: row for row in connection.execute(excluded, which)}
            suspects = _suspects(connection)
        known = {*passes, *out, *suspects} if workers is None else workers
        return {
            worker: KeyStanding(
                passes=passes.get(worker, 0),
                suspected=worker in suspects,
                excluded=out[worker].kind if worker in out else None,
                reason=out[worker].reason if worker in out else "",
            )
            for worker in known
        }

    def leave_out(self, connection: Connection, chosen: Any, reason: str, now_s: float) -> int:
        """Waiting updates that fit the condition will not be merged. Their leases are free again."""
        phases = connection.execute(select(t.updates.c.phase).where(WAITING, chosen).distinct()).scalars().all()
        # No merge ends between what is read here and what is written.
        rounds = [connection.execute(LOCKED, {"of_phase": phase}).one_or_none() for phase in sorted(phases)]
        numbers = connection.execute(select(t.updates.c.number).where(WAITING, chosen)).scalars().all()
        for number in numbers:
            connection.execute(t.insert_into(t.left_out), {"number": number, "reason": reason, "at_s": now_s})
        for round in filter(None, rounds):
            mark, of_phase = mark_after(round.mark), t.updates.c.phase == round.phase
            connection.execute(update(t.updates).where(of_phase, t.updates.c.number.in_(numbers)).values(mark=mark))
            self._open.change(connection, round, mark)
        return len(numbers)

    def left_out(self) -> dict[str, str]:
        """Update: why it will not be merged."""
        query = select(t.updates.c.id, t.left_out.c.reason).join(t.left_out, t.left_out.c.number == t.updates.c.number)
        with self._reading() as connection:
            return {row.id: row.reason for row in connection.execute(query)}

    def _exclude(self, connection: Connection, worker: str, kind: Exclusion, reason: str, now_s: float) -> None:
        row = {"worker": worker, "kind": kind, "reason": reason, "at_s": now_s}
        connection.execute(t.insert_into(t.exclusions), row)
        num_updates = self.leave_out(connection, t.updates.c.worker == worker, f"{kind}: {reason}", now_s)
        left = f"; {num_updates} waiting updates are left out" if num_updates else ""
        data = {"worker": worker, "reason": reason}
        insert_event(connection, kind, f"{alias_of(worker)}: {reason}{left}", now_s, data)


def _audit(connection: Connection, row: Any) -> Audit:
    audited = update_of(connection, row.update)
    assert audited is not None, "the database refuses an audit without an update"
    lease = lease_of(connection, audited.lease)
    assert lease is not None, "the ledger has the lease of an update"
    leases = tuple(AuditLease(**x._asdict()) for x in connection.execute(_ASKED, {"of_audit": row.number}))
    return Audit(
        number=row.number,
        update=audited,
        lease=lease,
        asked=leases,
        outcome=row.outcome,
    )


def _suspects(connection: Connection) -> set[str]:
    """The workers of open audits that have reports: the first one that agrees closes an audit, so these differ."""
    rows = connection.execute(_SUSPECTS).all()
    return {x for row in rows for x in (row.worker, row.other)}
