"""Queries that several parts of the ledger use inside a transaction, in SQL that SQLite and PostgreSQL both know. They
turn rows into records. Next: rounds.py and updates.py, which use them; open_rounds.py, which keeps open rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import BindParameter, Insert, Table, and_, bindparam, case, func, insert, or_, select, true, update

from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.drivers.connection import Connection
from blocktrain.swarm.ledger.records import (
    Evaluation,
    EvaluationLease,
    LeaseRecord,
    PhaseRecord,
    RoundRecord,
    Run,
    Update,
    Version,
)
from blocktrain.swarm.policy.evaluations import MOST_LEASES
from blocktrain.swarm.policy.rounds import LateUpdate, Lease, Round
from blocktrain.swarm.policy.track_record import TrackRecord

# Statements that every request needs are built once: building one costs as much as running it.
PHASES = select(t.phases).order_by(t.phases.c.phase)
_LAST = (
    select(t.versions.c.block, func.max(t.versions.c.version).label("version")).group_by(t.versions.c.block).subquery()
)
NEWEST_VERSIONS = (
    select(t.versions)
    .join(_LAST, and_(_LAST.c.block == t.versions.c.block, _LAST.c.version == t.versions.c.version))
    .order_by(t.versions.c.block)
)

IS_LEFT_OUT = select(t.left_out.c.number).where(t.left_out.c.number == t.updates.c.number).exists()
WAITING = and_(t.updates.c.merged_round.is_(None), t.updates.c.refused.is_(None), ~IS_LEFT_OUT)

ACCEPTED = and_(t.updates.c.lease == t.leases.c.id, t.updates.c.refused.is_(None))
HAS_REPORTED = select(t.updates.c.number).where(ACCEPTED).correlate(t.leases).exists()
STATE = case((HAS_REPORTED, "reported"), else_=t.leases.c.state)

OPEN = t.rounds.c.closed_s.is_(None)
IS_OPEN = and_(t.rounds.c.phase == bindparam("of_phase"), t.rounds.c.number == bindparam("of_number"), OPEN)
STANDING = (
    select(t.run.c.paused, t.phases.c.phase.label("of_phase"), t.phases.c.step, t.phases.c.finished, t.rounds)
    .select_from(t.run)
    .outerjoin(t.phases, true())
    .outerjoin(t.rounds, and_(t.rounds.c.phase == t.phases.c.phase, OPEN))
    .order_by(t.phases.c.phase)
)

EVALUATIONS = (
    select(
        *(column for column in t.evaluations.c if column.name != "number"),
        t.evaluation_leases.c.worker,
        t.evaluation_leases.c.versions,
    )
    .join(t.evaluation_leases, t.evaluation_leases.c.number == t.evaluations.c.lease)
    .order_by(t.evaluations.c.number.desc())
)
_IS_REPORTED = select(t.evaluations.c.number).where(t.evaluations.c.lease == t.evaluation_leases.c.number).exists()
_NEWEST_LEASE = (
    select(*t.columns(t.evaluation_leases), _IS_REPORTED.label("reported"))
    .order_by(t.evaluation_leases.c.number.desc())
    .limit(1)
)
_NEWEST_LEASES = _NEWEST_LEASE.limit(bindparam("at_most"))
_EVALUATION_LEASE = _NEWEST_LEASE.where(t.evaluation_leases.c.number == bindparam("of_number"))
_RUN = select(*t.columns(t.run, "id"))
_NEWEST_EVALUATIONS = EVALUATIONS.limit(bindparam("at_most"))
UPDATE_FACTS = t.columns(t.updates, "mark")
_UPDATE = select(*UPDATE_FACTS).where(t.updates.c.id == bindparam("of_id"))
_LEASE = select(*t.columns(t.leases, "state", "mark"), STATE.label("state")).where(t.leases.c.id == bindparam("of_id"))
_LOCKED_PHASE = select(t.phases).where(t.phases.c.phase == bindparam("of_phase")).with_for_update()

_NUMBERS: BindParameter[int] = bindparam("numbers", expanding=True)
LEASE_FACTS = (  # of a lease, its accepted update and its worker's track record: what `lease_from` reads
    *(t.leases.c[name] for name in ("round", "shard", "worker", "steps", "granted_s", "due_s")),
    t.leases.c.deadline_at_s.label("deadline_at_s"),
    t.updates.c.received_s,
    t.updates.c.merged_round,
    t.updates.c.steps.label("steps_done"),
    func.coalesce(t.track_records.c.owed, 0).label("owed"),
    func.coalesce(t.track_records.c.delivered, 0).label("delivered"),
)
_LEASES_WITH_UPDATES = (
    select(*LEASE_FACTS)
    .select_from(t.leases)
    .outerjoin(t.updates, ACCEPTED)
    .outerjoin(t.track_records, t.track_records.c.worker == t.leases.c.worker)
    .where(t.leases.c.phase == bindparam("of_phase"), t.leases.c.round.in_(_NUMBERS))
    .where(~IS_LEFT_OUT)  # for its round, such a lease never was
    .order_by(t.leases.c.granted_s, t.leases.c.id)
)
_UPDATES_TAKEN_IN = (
    select(t.leases.c.worker, t.leases.c.round, t.leases.c.shard, t.updates.c.merged_round)
    .join(t.updates, ACCEPTED)
    .where(t.updates.c.phase == bindparam("of_phase"))
    .where(or_(t.updates.c.merged_round.is_(None), t.updates.c.merged_round.in_(_NUMBERS)), ~IS_LEFT_OUT)
    .order_by(t.updates.c.number)
)

_TRACK_RECORD = select(*t.columns(t.track_records, "worker")).where(t.track_records.c.worker == bindparam("of_worker"))
_KEEP_RECORD = update(t.track_records).where(t.track_records.c.worker == bindparam("of_worker"))

_OPEN_AUDITS = select(t.audits.c.number, t.audits.c.update).where(t.audits.c.outcome.is_(None)).subquery()
_AUDITED = select(_OPEN_AUDITS.c.update)
_AUDITS_SENT = select(t.audit_leases.c.payload).join(_OPEN_AUDITS, _OPEN_AUDITS.c.number == t.audit_leases.c.audit)

FEW_ROWS = 32  # a statement for so many is kept, and compiled once
ROWS = 1000  # that one statement inserts: no database allows endless parameters


def run_of(connection: Connection) -> Run | None:
    row = connection.execute(_RUN).one_or_none()
    return Run(**row._asdict()) if row else None


def update_of(connection: Connection, id: str) -> Update | None:
    row = connection.execute(_UPDATE, {"of_id": id}).one_or_none()
    return Update(**row._asdict()) if row else None


def lease_of(connection: Connection, id: str) -> LeaseRecord | None:
    row = connection.execute(_LEASE, {"of_id": id}).one_or_none()
    return LeaseRecord(**row._asdict()) if row else None


def newest_versions(connection: Connection) -> dict[int, Version]:
    rows = connection.execute(NEWEST_VERSIONS)
    return {row.block: Version(**row._asdict()) for row in rows}


def phases_of(connection: Connection) -> tuple[PhaseRecord, ...]:
    rows = connection.execute(PHASES)
    return tuple(PhaseRecord(**row._asdict()) for row in rows)


def newest_evaluations(connection: Connection, limit: int = 2 * MOST_LEASES) -> tuple[Evaluation, ...]:
    """In order."""
    rows = connection.execute(_NEWEST_EVALUATIONS, {"at_most": limit}).all()
    return tuple(evaluation_of(row) for row in reversed(rows))


def evaluation_of(row: Any) -> Evaluation:
    fields = row._asdict()
    combine = {path: tuple(weights) for path, weights in fields.pop("combine").items()}
    return Evaluation(combine=combine, **fields)


def evaluation_leases_of(connection: Connection, limit: int) -> tuple[EvaluationLease, ...]:
    """The newest, in order."""
    rows = connection.execute(_NEWEST_LEASES, {"at_most": limit}).all()
    return tuple(_evaluation_lease(row) for row in reversed(rows))


def evaluation_lease_of(connection: Connection, id: int | None = None) -> EvaluationLease | None:
    query, which = (_NEWEST_LEASE, {}) if id is None else (_EVALUATION_LEASE, {"of_number": id})
    row = connection.execute(query, which).one_or_none()
    return None if row is None else _evaluation_lease(row)


def _evaluation_lease(row: Any) -> EvaluationLease:
    fields = row._asdict()
    return EvaluationLease(id=fields.pop("number"), **fields)


def track_record_of(connection: Connection, worker: str) -> TrackRecord:
    row = connection.execute(_TRACK_RECORD, {"of_worker": worker}).one_or_none()
    return TrackRecord(**row._asdict()) if row else TrackRecord()


def change_track_record(
    connection: Connection, worker: str, change: Callable[[TrackRecord], TrackRecord]
) -> TrackRecord:
    """The new one."""
    row = connection.execute(_TRACK_RECORD, {"of_worker": worker}).one_or_none()
    record = change(TrackRecord(**row._asdict()) if row else TrackRecord())
    if row:
        connection.execute(_KEEP_RECORD, {"of_worker": worker, **vars(record)})
    else:
        connection.execute(t.insert_into(t.track_records), {"worker": worker, **vars(record)})
    return record


def lock_phase(connection: Connection, phase: int) -> PhaseRecord | None:
    """Until this transaction is over, no other one ends the phase or adds to it. SQLite has one writer anyway."""
    row = connection.execute(_LOCKED_PHASE, {"of_phase": phase}).one_or_none()
    return PhaseRecord(**row._asdict()) if row else None


def event_row(kind: str, text: str, now_s: float, data: Any = None) -> dict[str, Any]:
    return {"kind": kind, "text": text, "at_s": now_s, "data": {} if data is None else data}


def insert_event(connection: Connection, kind: str, text: str, now_s: float, data: Any = None) -> int:
    """Returns its number."""
    key = connection.execute(t.insert_into(t.events), event_row(kind, text, now_s, data)).inserted_primary_key
    assert key is not None
    return int(key.number)


def insert_all(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """In one statement, unless there are very many."""
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        values = {f"{name}_{at}": value for at, row in enumerate(some) for name, value in row.items()}
        build = _few_rows if len(some) <= FEW_ROWS else _insert_of
        connection.execute(build(table, tuple(some[0]), len(some)), values)


def _insert_of(table: Table, names: Sequence[str], num_rows: int) -> Insert:
    types = [(name, table.c[name].type) for name in names]
    rows = [{name: bindparam(f"{name}_{at}", type_=of_column) for name, of_column in types} for at in range(num_rows)]
    return insert(table).values(rows)


_few_rows = lru_cache(maxsize=256)(_insert_of)


def insert_round(connection: Connection, round: Round, mark: str) -> None:
    columns = ("phase", "number", "step_start", "steps", "opened_s", "limit_s", "deadline_at_s")
    row = {name: getattr(round, name) for name in columns}
    row |= {"base": dict(round.base), "extensions": 0, "reason": "open", "mark": mark}
    connection.execute(t.insert_into(t.rounds), row)


def rounds_of(connection: Connection, rows: Sequence[Any]) -> tuple[RoundRecord, ...]:
    """Rounds of one phase, as ../policy/rounds.py defines them. An update belongs to the round that merged it; an
    update that waits belongs to the open round."""
    if not rows:
        return ()
    phase, numbers = rows[0].phase, [row.number for row in rows]
    open_number = next((row.number for row in rows if row.closed_s is None), None)
    leases: dict[int, list[Lease]] = defaultdict(list)
    asked = {"of_phase": phase, "numbers": numbers}
    for x in connection.execute(_LEASES_WITH_UPDATES, asked):
        reported = x.received_s is not None and (open_number if x.merged_round is None else x.merged_round) == x.round
        leases[x.round].append(lease_from(x, reported))
    late: dict[int, list[LateUpdate]] = defaultdict(list)
    for one in connection.execute(_UPDATES_TAKEN_IN, asked):
        taken_in = open_number if one.merged_round is None else one.merged_round
        if taken_in is not None and one.round < taken_in:
            late[taken_in].append(LateUpdate(one.worker, one.round, one.shard))
    return tuple(_record(row, leases[row.number], late[row.number]) for row in rows)


def lease_from(row: Any, reported: bool) -> Lease:
    """Of a row of `LEASE_FACTS`, as its round has it."""
    facts = (row.shard, row.worker, row.steps, row.granted_s, row.due_s, row.deadline_at_s)
    if reported:
        return Lease(*facts, row.received_s, min(row.steps_done, row.steps))
    return Lease(*facts, None, 0, row.owed, row.delivered)


def _record(row: Any, leases: Sequence[Lease], late: Sequence[LateUpdate]) -> RoundRecord:
    round = Round(
        phase=row.phase,
        number=row.number,
        base=row.base,
        step_start=row.step_start,
        steps=row.steps,
        opened_s=row.opened_s,
        limit_s=row.limit_s,
        deadline_at_s=row.deadline_at_s,
        leases=tuple(leases),
        late=tuple(late),
    )
    return RoundRecord(round, row.extensions, row.closed_s, row.reason)


def audited_blobs(connection: Connection) -> set[str | None]:
    """The results that open audits compare. The versions that they were built on are young enough to be kept anyway."""
    return {*connection.execute(_AUDITED).scalars(), *connection.execute(_AUDITS_SENT).scalars()}
