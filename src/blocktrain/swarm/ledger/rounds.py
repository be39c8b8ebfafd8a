"""How far the training is: phases, rounds and leases, and the merge that changes all of them at once. A part of the
ledger. Next: versions.py, the versions that merges make; open_rounds.py, which keeps open rounds in memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import and_, bindparam, func, select, update

from blocktrain.errors import LedgerConflict
from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.database import PAGE, LedgerPart, changed, retry_on_conflict
from blocktrain.swarm.ledger.drivers.connection import Connection
from blocktrain.swarm.ledger.open_rounds import first_mark, mark_after
from blocktrain.swarm.ledger.queries import (
    HAS_REPORTED,
    IS_OPEN,
    STANDING,
    WAITING,
    change_track_record,
    event_row,
    insert_all,
    insert_event,
    insert_round,
    lease_of,
    lock_phase,
    phases_of,
    rounds_of,
)
from blocktrain.swarm.ledger.records import (
    LeaseRecord,
    MergeWeight,
    NewVersion,
    PhaseRecord,
    RoundRecord,
    Standing,
)
from blocktrain.swarm.policy.rounds import MIN_SAMPLES, WINDOW, Grant, Round
from blocktrain.swarm.policy.track_record import TrackRecord

MAX_LATE_EVENTS = 20  # of one round
PACE_ROUNDS = 4  # whose workers set the pace
PARAMETERS = 10_000  # that one statement may have on every database

RENEW = update(t.leases).where(t.leases.c.id == bindparam("of_id"))
GRANTABLE = (  # locked; with the lease that is there already, if any
    select(t.rounds, t.leases.c.id.label("lease"))
    .outerjoin(t.leases, t.leases.c.id == bindparam("of_lease"))
    .where(IS_OPEN)
    .with_for_update(of=t.rounds)
)
_FIRST_ROUND = (  # since the last rollback: what was built before it is too old
    select(func.coalesce(func.max(t.rollbacks.c.round), 0))
    .where(t.rollbacks.c.phase == bindparam("of_phase"))
    .scalar_subquery()
)
BASES = (
    select(t.rounds.c.number, t.rounds.c.base, t.phases.c.finished)
    .join(t.phases, t.phases.c.phase == t.rounds.c.phase)
    .where(t.rounds.c.phase == bindparam("of_phase"), t.rounds.c.number >= _FIRST_ROUND)
    .order_by(t.rounds.c.number.desc())
    .limit(bindparam("at_most"))
)
_NEWEST_ROUND = select(func.max(t.rounds.c.number)).where(t.rounds.c.phase == bindparam("of_phase")).scalar_subquery()
TIMES = (  # a round's as `Round.took_s` has it: of the leases that reported in it
    select(func.max(t.updates.c.received_s) - func.min(t.leases.c.granted_s))
    .join(t.leases, t.leases.c.id == t.updates.c.lease)
    .where(t.updates.c.phase == bindparam("of_phase"), t.updates.c.merged_round >= _NEWEST_ROUND - WINDOW)
    .where(t.updates.c.merged_round == t.leases.c.round)
    .group_by(t.leases.c.round)
    .order_by(t.leases.c.round.desc())
    .limit(WINDOW)
)
CHANGE_OPEN = update(t.rounds).where(IS_OPEN)
MOMENTS = tuple(
    select(func.max(column))
    for column in (
        t.run.c.created_s,
        t.rounds.c.opened_s,
        t.leases.c.granted_s,
        t.updates.c.received_s,
        t.events.c.at_s,
        t.workers.c.last_seen_s,
        t.evaluation_leases.c.granted_s,
    )
)
MOVE = update(t.phases).where(t.phases.c.phase == bindparam("of_phase"))
MERGED = update(t.updates).where(
    WAITING, t.updates.c.phase == bindparam("of_phase"), t.updates.c.id.in_(bindparam("ids", expanding=True))
)
MERGED_IN = select(t.updates.c.number, t.updates.c.id, t.updates.c.worker).where(
    t.updates.c.merged_phase == bindparam("of_phase"), t.updates.c.merged_round == bindparam("of_round")
)
WAITING_IDS = select(t.updates.c.id).where(WAITING, t.updates.c.phase == bindparam("of_phase"))
MISSED = and_(
    t.leases.c.phase == bindparam("of_phase"),
    t.leases.c.round == bindparam("of_round"),
    t.leases.c.state == "open",
    ~HAS_REPORTED,
)
LATE = select(t.leases.c.worker).where(MISSED).order_by(t.leases.c.id)
EXPIRE = update(t.leases).where(MISSED)
SPEEDS = (  # of the workers whose updates were merged in the phase's last rounds
    select(t.track_records.c.steps_per_s)
    .join(t.updates, t.updates.c.worker == t.track_records.c.worker)
    .where(t.updates.c.merged_phase == bindparam("of_phase"), t.updates.c.merged_round >= _NEWEST_ROUND - PACE_ROUNDS)
    .where(t.track_records.c.steps_per_s.is_not(None))
    .group_by(t.track_records.c.worker, t.track_records.c.steps_per_s)
    .order_by(t.track_records.c.steps_per_s)
)


class RoundsPart(LedgerPart):
    """Phases, rounds and leases."""

    # Phases and rounds

    @retry_on_conflict
    def open_phase(self, first: Round) -> bool:
        """Records the phase and its first round. False if it was opened before."""
        with self._writing() as connection:
            if lock_phase(connection, first.phase):
                return False
            row = {"phase": first.phase, "step": first.step_start, "finished": False}
            connection.execute(t.insert_into(t.phases), row)
            insert_round(connection, first, first_mark(first.phase, first.number))
            return True

    def phases(self) -> tuple[PhaseRecord, ...]:
        with self._reading() as connection:
            return phases_of(connection)

    def open_rounds(self) -> dict[int, Round]:
        """The open round of each phase, with its leases and the late updates that wait for it."""
        with self._reading() as connection:
            return self._open.all(connection)

    def standing(self) -> Standing:
        """What work there is at this moment."""
        with self._reading() as connection:
            rows = connection.execute(STANDING).all()
            phases = (
                PhaseRecord(phase=row.of_phase, step=row.step, finished=row.finished)
                for row in rows
                if row.of_phase is not None
            )
            rounds = {row.phase: self._open.of(connection, row) for row in rows if row.phase is not None}
            return Standing(any(row.paused for row in rows), tuple(phases), rounds)

    def bases(self, phase: int, limit: int = PAGE) -> tuple[dict[int, dict[int, int]], bool]:
        """The versions that the newest rounds of the phase were based on, and whether the phase is finished."""
        with self._reading() as connection:
            rows = connection.execute(BASES, {"of_phase": phase, "at_most": limit}).all()
            return {row.number: row.base for row in rows}, any(row.finished for row in rows)

    def rounds(self, phase: int, limit: int = PAGE) -> tuple[RoundRecord, ...]:
        """The newest of the phase, the open one last. A closed round has the updates that were merged in it."""
        query = select(t.rounds).where(t.rounds.c.phase == phase).order_by(t.rounds.c.number.desc()).limit(limit)
        with self._reading() as connection:
            return rounds_of(connection, list(reversed(connection.execute(query).all())))

    def past_round_times_s(self, phase: int) -> list[float]:
        """What the time limit of the next round is learned from. While a phase has too few rounds of its own, those of
        the phase before are used too: or every phase would begin with the longest limit."""
        with self._reading() as connection:
            own = _round_times_s(connection, phase)
            if len(own) >= MIN_SAMPLES or phase == 0:
                return own
            return [*_round_times_s(connection, phase - 1), *own]

    def measured_speeds(self, phase: int) -> list[float]:
        """Steps per second of the workers that delivered lately, from the slowest; while the phase has none, of those
        that delivered in the phase before."""
        with self._reading() as connection:
            own = connection.execute(SPEEDS, {"of_phase": phase}).scalars().all()
            before = connection.execute(SPEEDS, {"of_phase": phase - 1}).scalars().all() if phase and not own else []
            return [*own, *before]

    def latest_moment_s(self) -> float:
        """The latest time in the ledger that something happened; 0 in an empty one."""
        with self._reading() as connection:
            latest = (connection.execute(moment).scalar() for moment in MOMENTS)
            return max((moment_s for moment_s in latest if moment_s is not None), default=0.0)

    def extend_round(self, round: Round, deadline_at_s: float, reason: str) -> bool:
        """False if another coordinator has extended or closed it since."""
        of_round = {"of_phase": round.phase, "of_number": round.number}
        values = {
            "deadline_at_s": deadline_at_s,
            "extensions": t.rounds.c.extensions + 1,
            "reason": reason,
        }
        with self._writing() as connection:
            extend = CHANGE_OPEN.where(t.rounds.c.deadline_at_s == round.deadline_at_s).values(**values)
            if changed(connection.execute(extend, of_round)) == 0:
                return False
            text, data = f"phase {round.phase + 1}, round {round.number}: {reason}", _names(round.phase, round.number)
            insert_event(connection, "extended", text, round.deadline_at_s, data)
            return True

    def merge(
        self,
        closed: Round,
        new_versions: Sequence[NewVersion],
        weights: Collection[MergeWeight],
        next_round: Round | None,
        now_s: float,
        reason: str,
    ) -> bool:
        """All of a merge or nothing: the round closes, the versions appear, the updates are marked, and the next round
        opens. Without a next round the phase is finished. False if another coordinator has closed the round already, or
        if the phase would end without an update that has arrived meanwhile: read what waits and decide again."""
        phase, number = closed.phase, closed.number
        update_ids = {weight.update for weight in weights}
        with self._writing() as connection:
            lock_phase(connection, phase)
            if next_round is None and not _covers_all_waiting(connection, phase, update_ids):
                return False
            of_round = {"of_phase": phase, "of_number": number}
            if changed(connection.execute(CHANGE_OPEN, {**of_round, "closed_s": now_s, "reason": reason})) == 0:
                return False
            _insert_versions(connection, closed, new_versions, now_s)
            _mark_merged(connection, closed, update_ids)
            _record_weights(connection, closed, weights, now_s)
            _expire_leases(connection, phase, number, now_s)
            step = next_round.step_start if next_round else closed.step_start + closed.advance
            position = {"step": step, "finished": next_round is None}
            connection.execute(MOVE, {"of_phase": phase, **position})
            if next_round:
                insert_round(connection, next_round, first_mark(phase, next_round.number))
            data = {**_names(phase, number), "updates": len(update_ids)}
            insert_event(connection, "merged", f"phase {phase + 1}, round {number}: {reason}", now_s, data)
            return True

    # Leases

    def grant(self, grant: Grant, decided_on: Round, now_s: float) -> LeaseRecord | None:
        """The lease, new or renewed. None if the round has changed since the decision: read it and decide again. Two
        coordinators therefore never grant one shard twice."""
        id = f"{grant.phase}-{grant.number}-{grant.worker}"
        wanted = {"of_phase": grant.phase, "of_number": grant.number, "of_lease": id}
        granted_s = now_s if grant.granted_s is None else grant.granted_s
        unchanged = grant.granted_s is not None and grant.deadline_at_s <= decided_on.deadline_at_s
        with self._writing() as connection:
            row = connection.execute(GRANTABLE, wanted).one_or_none()
            if row is None or self._open.of(connection, row) != decided_on:
                return None
            lease = LeaseRecord(
                id=id,
                phase=grant.phase,
                round=grant.number,
                shard=grant.shard,
                worker=grant.worker,
                step_start=grant.step_start,
                steps=grant.steps,
                granted_s=granted_s,
                due_s=grant.due_s,
                deadline_at_s=grant.deadline_at_s,
                state="open",
            )
            if unchanged and row.lease is not None:  # it was asked for again
                return lease
            mark = mark_after(row.mark)
            if row.lease is None:
                connection.execute(t.insert_into(t.leases), {**vars(lease), "mark": mark})
            else:
                connection.execute(RENEW, {"of_id": id, **vars(lease), "mark": mark})
                if grant.granted_s is None:  # the lease that it had missed its deadline
                    change_track_record(connection, grant.worker, TrackRecord.with_miss)
            after = decided_on.with_grant(grant, now_s)
            self._open.change(connection, row, mark, lambda _: after, deadline_at_s=after.deadline_at_s)
            return lease

    def lease(self, id: str) -> LeaseRecord | None:
        with self._reading() as connection:
            return lease_of(connection, id)


def _round_times_s(connection: Connection, phase: int) -> list[float]:
    newest_first = connection.execute(TIMES, {"of_phase": phase}).scalars().all()
    return [took_s for took_s in reversed(newest_first) if took_s > 0]


def _insert_versions(connection: Connection, closed: Round, new_versions: Sequence[NewVersion], now_s: float) -> None:
    rows = []
    for new in new_versions:
        parent = closed.base.get(new.block)
        if new.version - 1 != parent:
            raise LedgerConflict(
                f"version {new.version} of block {new.block} was made in round {closed.number} of phase "
                f"{closed.phase + 1}, which is based on {dict(closed.base)}: versions follow each other, decide again"
            )
        where_from = {"phase": closed.phase, "round": closed.number, "parent": parent, "created_s": now_s}
        rows.append({**vars(new), **where_from})
    insert_all(connection, t.versions, rows)


def _mark_merged(connection: Connection, closed: Round, ids: set[str]) -> None:
    marked = 0
    for start in range(0, len(ids), PARAMETERS):
        which = {"of_phase": closed.phase, "ids": sorted(ids)[start : start + PARAMETERS]}
        merged_in = {"merged_phase": closed.phase, "merged_round": closed.number}
        marked += changed(connection.execute(MERGED, {**which, **merged_in}))
    if marked != len(ids):
        raise LedgerConflict(
            f"{len(ids) - marked} of {len(ids)} updates do not wait to be merged in phase {closed.phase + 1}: "
            f"read those that do and decide again"
        )


def _record_weights(connection: Connection, closed: Round, weights: Collection[MergeWeight], now_s: float) -> None:
    """What each update weighed. One that was left out is an event."""
    by_id = {weight.update: weight for weight in weights}
    rows = connection.execute(MERGED_IN, {"of_phase": closed.phase, "of_round": closed.number}).all()
    values = [(row, by_id[row.id]) for row in rows]
    facts = [{"number": row.number, "weight": x.weight, "scale": x.scale, "reason": x.reason} for row, x in values]
    insert_all(connection, t.merge_weights, facts)
    events = []
    for row, weight in [pair for pair in values if not pair[1].weight][:MAX_LATE_EVENTS]:
        data = {**_names(closed.phase, closed.number), "worker": row.worker, "update": row.id}
        text = f"{alias_of(row.worker)} in phase {closed.phase + 1}, round {closed.number}: {weight.reason}"
        events.append(event_row("left out", text, now_s, data))
    insert_all(connection, t.events, events)


def _names(phase: int, round: int) -> dict[str, int]:
    return {"phase": phase, "round": round}


def _expire_leases(connection: Connection, phase: int, round: int, now_s: float) -> None:
    """Leases that have not reported when their round closes. Each is an event."""
    of_round = {"of_phase": phase, "of_round": round}
    missed = connection.execute(LATE, of_round).scalars().all()
    for worker in missed:
        change_track_record(connection, worker, TrackRecord.with_miss)
    events = []
    for worker in missed[:MAX_LATE_EVENTS]:
        data = {**_names(phase, round), "worker": worker}
        text = f"{alias_of(worker)} in phase {phase + 1}, round {round}: it closed without"
        events.append(event_row("late", text, now_s, data))
    insert_all(connection, t.events, events)
    if missed:
        connection.execute(EXPIRE, {**of_round, "state": "expired"})


def _covers_all_waiting(connection: Connection, phase: int, ids: set[str]) -> bool:
    """Whether these are all acknowledged updates of the phase that wait."""
    return ids.issuperset(connection.execute(WAITING_IDS, {"of_phase": phase}).scalars())
