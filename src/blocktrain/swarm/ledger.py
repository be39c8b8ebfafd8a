"""The ledger: the durable facts of a run. Every method is one transaction, and what it has recorded when it returns
survives a kill; threads, processes and machines may share one ledger. It decides nothing: rounds.py does, from what is
read here. Next: coordinator.py, which does both. (ledger_records.py: the facts; ledger_tables.py: their tables;
ledger_database.py: transactions.)"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from sqlalchemy import Connection, CursorResult, Double, and_, func, insert, select, true, update
from sqlalchemy import cast as cast_to
from sqlalchemy import delete as delete_rows

from blocktrain.errors import ConfigError, LedgerConflict
from blocktrain.swarm import ledger_tables as t
from blocktrain.swarm.ledger_database import Database
from blocktrain.swarm.ledger_queries import (
    EVALUATIONS,
    WAITING,
    evaluation_lease_of,
    evaluation_of,
    insert_event,
    insert_round,
    is_open,
    lock_phase,
    newest_evaluation,
    newest_versions,
    phases_of,
    rounds_of,
    run_of,
    update_of,
)
from blocktrain.swarm.ledger_records import (
    ROLES,
    Contribution,
    Evaluation,
    EvaluationLease,
    Event,
    LeaseRecord,
    ModelVersions,
    NewUpdate,
    NewVersion,
    PhaseRecord,
    Role,
    RoundLoss,
    RoundRecord,
    Run,
    Token,
    Update,
    Version,
    Worker,
)
from blocktrain.swarm.rounds import Grant, Round

LOCK_TIMEOUT_S = 30.0
PAGE = 100
KEPT_EVENTS, PRUNE_EVERY = 10_000, 500
MAX_LATE_EVENTS = 20  # of one round
PARAMETERS = 10_000  # that one statement may have on every database

Given = ParamSpec("Given")
Kept = TypeVar("Kept")


def _if_absent(record: Callable[Given, Kept]) -> Callable[Given, Kept]:
    """For what looks whether a row is there before inserting it: where another coordinator inserts it just then, the
    database refuses ours, and looking again finds it."""

    @wraps(record)
    def twice(*args: Given.args, **kwargs: Given.kwargs) -> Kept:
        try:
            return record(*args, **kwargs)
        except LedgerConflict:
            return record(*args, **kwargs)

    return twice


class Ledger:
    """In an SQLite file, made when it is not there, or in a PostgreSQL database by URL."""

    def __init__(self, url_or_path: str | Path, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self.database = Database(url_or_path, t.tables, lock_timeout_s)
        self._reading, self._writing = self.database.reading, self.database.writing

    def close(self) -> None:
        self.database.close()

    # The run

    @_if_absent
    def create_run(self, new: Run) -> Run:
        """The run of this ledger: this one, or the one that is there when it has the same spec and corpus."""
        with self._writing() as connection:
            there = run_of(connection)
            if there is None:
                connection.execute(insert(t.run).values(id=1, **asdict(new)))
                return new
        for what, old, wanted in (
            ("a run with another spec", there.spec_sha256, new.spec_sha256),
            ("a run on another corpus", there.corpus_sha256, new.corpus_sha256),
            ("a run of another protocol version", there.protocol, new.protocol),
        ):
            if old != wanted:
                raise ConfigError(
                    f"the ledger at {self.database.where} holds {what} ({old}, not {wanted}): "
                    f"continue that run as it was started, or give this one another ledger"
                )
        return there

    def run(self) -> Run | None:
        with self._reading() as connection:
            return run_of(connection)

    def set_paused(self, paused: bool, now_s: float) -> bool:
        """False when it was so already."""
        change = update(t.run).where(t.run.c.paused != paused).values(paused=paused)
        with self._writing() as connection:
            if _changed(connection.execute(change)) == 0:
                return False
            kind = "paused" if paused else "resumed"
            insert_event(connection, kind, "by an admin", now_s)
            return True

    # Tokens

    def add_token(self, name: str, role: Role, token: str, now_s: float) -> None:
        """Keeps the token's hash, never the token."""
        if role not in ROLES:
            raise ConfigError(f'there is no role "{role}": choose one of {", ".join(ROLES)}')
        try:
            with self._writing() as connection:
                values = {"name": name, "role": role, "sha256": _hash(token), "created_s": now_s}
                connection.execute(insert(t.tokens).values(**values))
        except LedgerConflict:
            raise ConfigError(
                f'there is a token "{name}" already: choose another name, or revoke that one first'
            ) from None

    def tokens(self) -> tuple[Token, ...]:
        """Revoked ones too, in the order they were added."""
        columns = (t.tokens.c.name, t.tokens.c.role, t.tokens.c.created_s, t.tokens.c.revoked_s)
        with self._reading() as connection:
            rows = connection.execute(select(*columns).order_by(t.tokens.c.number))
            return tuple(Token(**row._asdict()) for row in rows)

    def revoke_token(self, name: str, now_s: float) -> bool:
        """Whether there was such a token to revoke."""
        matches = and_(t.tokens.c.name == name, t.tokens.c.revoked_s.is_(None))
        with self._writing() as connection:
            return _changed(connection.execute(update(t.tokens).where(matches).values(revoked_s=now_s))) > 0

    def role_of(self, token: str) -> Role | None:
        """Looks at every token, in the same time whichever it is."""
        query = select(t.tokens.c.role, t.tokens.c.sha256).where(t.tokens.c.revoked_s.is_(None))
        with self._reading() as connection:
            rows = connection.execute(query).all()
        given, role = _hash(token), None
        for row in rows:
            if hmac.compare_digest(row.sha256, given):
                role = row.role
        return cast("Role | None", role)

    # Workers

    @_if_absent
    def see_worker(
        self, id: str, name: str, device: str, memory_bytes: int, steps_per_s: float, now_s: float, nonce: int
    ) -> bool:
        """What a worker says of itself now; False, and nothing is changed, unless its nonce is larger than ever."""
        said = {"name": name, "device": device, "memory_bytes": memory_bytes, "steps_per_s": steps_per_s}
        seen = {**said, "nonce": nonce, "last_seen_s": now_s}
        newer = and_(t.workers.c.id == id, t.workers.c.nonce < nonce)
        with self._writing() as connection:
            if _changed(connection.execute(update(t.workers).where(newer).values(**seen))):
                return True
            if connection.execute(select(t.workers.c.id).where(t.workers.c.id == id)).one_or_none():
                return False
            connection.execute(insert(t.workers).values(id=id, first_seen_s=now_s, **seen))
            insert_event(connection, "joined", f"{name}, {device}", now_s, {"worker": id})
            return True

    def workers(self) -> tuple[Worker, ...]:
        """With what they contributed; the first to come first."""
        accepted = t.updates.c.refused.is_(None)
        contributed = (
            select(t.updates.c.worker, func.count().label("updates"), func.sum(t.updates.c.tokens).label("tokens"))
            .where(accepted)
            .group_by(t.updates.c.worker)
            .subquery()
        )
        query = select(
            *(column for column in t.workers.c if column.name != "nonce"),
            func.coalesce(contributed.c.updates, 0).label("updates"),
            func.coalesce(contributed.c.tokens, 0).label("tokens"),
        ).outerjoin(contributed, contributed.c.worker == t.workers.c.id)
        with self._reading() as connection:
            rows = connection.execute(query.order_by(t.workers.c.first_seen_s, t.workers.c.id))
            return tuple(Worker(**{**row._asdict(), "tokens": int(row.tokens)}) for row in rows)

    # Versions

    @_if_absent
    def add_genesis(self, blobs: Mapping[int, str], now_s: float) -> None:
        """Version 0 of the blocks. Again changes nothing; with other bytes it is a contradiction."""
        with self._writing() as connection:
            there = {x.block: x.sha256 for x in connection.execute(select(t.versions).where(t.versions.c.version == 0))}
            for block, sha256 in blobs.items():
                if block not in there:
                    row = {"block": block, "version": 0, "sha256": sha256, "created_s": now_s}
                    connection.execute(insert(t.versions).values(**row))
                elif there[block] != sha256:
                    raise LedgerConflict(
                        f"block {block} began as {there[block][:12]}… in this ledger and {sha256[:12]}… was given: "
                        f"use the ledger's, or another ledger"
                    )

    def version(self, block: int, version: int) -> Version | None:
        matches = and_(t.versions.c.block == block, t.versions.c.version == version)
        with self._reading() as connection:
            row = connection.execute(select(t.versions).where(matches)).one_or_none()
            return Version(**row._asdict()) if row else None

    def versions(self, block: int, limit: int = PAGE) -> tuple[Version, ...]:
        """The newest ones, the oldest of them first."""
        query = select(t.versions).where(t.versions.c.block == block).order_by(t.versions.c.version.desc())
        with self._reading() as connection:
            return tuple(Version(**row._asdict()) for row in reversed(connection.execute(query.limit(limit)).all()))

    def consistent_manifest(self) -> ModelVersions:
        with self._reading() as connection:
            return ModelVersions(newest_versions(connection), phases_of(connection), newest_evaluation(connection))

    def live_blobs(self, keep_versions: int) -> set[str]:
        """What may not be pruned: the newest versions of every block and the momentum of the last, the versions being
        evaluated, updates that wait to be merged, the corpus."""
        with self._reading() as connection:
            newest, run = newest_versions(connection), run_of(connection)
            kept = {(block, x.version - back) for block, x in newest.items() for back in range(keep_versions)}
            lease = evaluation_lease_of(connection)
            evaluation = newest_evaluation(connection)
            for held in (lease, evaluation):
                kept |= set(held.versions.items()) if held else set()
            columns = (t.versions.c.block, t.versions.c.version, t.versions.c.sha256, t.versions.c.difference_sha256)
            rows = connection.execute(select(*columns)).all()
            waiting = connection.execute(select(t.updates.c.id).where(WAITING)).scalars().all()
        blobs = {blob for *key, tensors, difference in rows if tuple(key) in kept for blob in (tensors, difference)}
        blobs |= {x.momentum_sha256 for x in newest.values()} | set(waiting) | set(run.corpus.values() if run else ())
        return blobs - {None}

    # Phases and rounds

    @_if_absent
    def open_phase(self, first: Round) -> bool:
        """The phase and its first round; False when it is open, or was, already."""
        with self._writing() as connection:
            if connection.execute(select(t.phases).where(t.phases.c.phase == first.phase)).one_or_none():
                return False
            row = {"phase": first.phase, "step": first.step_start, "finished": False}
            connection.execute(insert(t.phases).values(**row))
            insert_round(connection, first)
            return True

    def phases(self) -> tuple[PhaseRecord, ...]:
        with self._reading() as connection:
            return phases_of(connection)

    def open_rounds(self) -> dict[int, Round]:
        """Phase: its open round, with its leases and the late updates that wait for it."""
        with self._reading() as connection:
            rows = connection.execute(select(t.rounds).where(t.rounds.c.closed_s.is_(None))).all()
            return {row.phase: rounds_of(connection, [row])[0].round for row in rows}

    def rounds(self, phase: int, limit: int = PAGE) -> tuple[RoundRecord, ...]:
        """The newest of the phase, the open one last. A closed round has the updates that were merged in it."""
        query = select(t.rounds).where(t.rounds.c.phase == phase).order_by(t.rounds.c.number.desc()).limit(limit)
        with self._reading() as connection:
            return rounds_of(connection, list(reversed(connection.execute(query).all())))

    def extend_round(self, round: Round, deadline_s: float, reason: str) -> bool:
        """False when another coordinator has extended or closed it since."""
        matches = and_(is_open(round.phase, round.number), t.rounds.c.deadline_s == round.deadline_s)
        values = {"deadline_s": deadline_s, "extensions": t.rounds.c.extensions + 1, "reason": reason}
        with self._writing() as connection:
            if _changed(connection.execute(update(t.rounds).where(matches).values(**values))) == 0:
                return False
            text, data = f"phase {round.phase}, round {round.number}: {reason}", _names(round.phase, round.number)
            insert_event(connection, "extended", text, round.deadline_s, data)
            return True

    def merge(
        self,
        closed: Round,
        new_versions: Sequence[NewVersion],
        update_ids: Collection[str],
        next_round: Round | None,
        now_s: float,
        reason: str,
    ) -> bool:
        """All of a merge or nothing: the round closes, the versions appear, the updates are marked, the next round
        opens or, without one, the phase is finished. False when another coordinator has closed the round already, or
        when the phase would end without an update that has come meanwhile: read what waits and decide again."""
        phase, number = closed.phase, closed.number
        with self._writing() as connection:
            lock_phase(connection, phase)
            if next_round is None and not _covers_all_waiting(connection, phase, set(update_ids)):
                return False
            close = update(t.rounds).where(is_open(phase, number)).values(closed_s=now_s, reason=reason)
            if _changed(connection.execute(close)) == 0:
                return False
            _insert_versions(connection, closed, new_versions, now_s)
            _mark_merged(connection, closed, set(update_ids))
            _expire_leases(connection, phase, number, now_s)
            step = next_round.step_start if next_round else closed.step_start + closed.advance
            position = {"step": step, "finished": next_round is None}
            connection.execute(update(t.phases).where(t.phases.c.phase == phase).values(**position))
            if next_round:
                insert_round(connection, next_round)
            data = {**_names(phase, number), "updates": len(update_ids)}
            insert_event(connection, "merged", f"phase {phase}, round {number}: {reason}", now_s, data)
            return True

    # Leases

    def grant(self, grant: Grant, decided_on: Round, now_s: float) -> LeaseRecord | None:
        """The lease, new or renewed. None when the round is no longer as it was decided on, so that two coordinators
        never give one shard twice: read it and decide again."""
        with self._writing() as connection:
            query = select(t.rounds).where(is_open(grant.phase, grant.number)).with_for_update()
            row = connection.execute(query).one_or_none()
            if row is None or rounds_of(connection, [row])[0].round != decided_on:
                return None
            lease = LeaseRecord(
                id=f"{grant.phase}-{grant.number}-{grant.worker}",
                phase=grant.phase,
                round=grant.number,
                shard=grant.shard,
                worker=grant.worker,
                step_start=grant.step_start,
                steps=grant.steps,
                granted_s=now_s,
                due_s=grant.due_s,
                deadline_s=grant.deadline_s,
                state="open",
            )
            renew = update(t.leases).where(t.leases.c.id == lease.id).values(**asdict(lease))
            if _changed(connection.execute(renew)) == 0:
                connection.execute(insert(t.leases).values(**asdict(lease)))
            this_round = is_open(grant.phase, grant.number)
            connection.execute(update(t.rounds).where(this_round).values(deadline_s=grant.deadline_s))
            return lease

    def lease(self, id: str) -> LeaseRecord | None:
        with self._reading() as connection:
            row = connection.execute(select(t.leases).where(t.leases.c.id == id)).one_or_none()
            return LeaseRecord(**row._asdict()) if row else None

    def release_lease(self, id: str) -> bool:
        """The worker gives it back, and counts no longer; False when it was not open."""
        matches = and_(t.leases.c.id == id, t.leases.c.state == "open")
        with self._writing() as connection:
            return _changed(connection.execute(update(t.leases).where(matches).values(state="released"))) == 1

    # Updates

    @_if_absent
    def record_update(self, new: NewUpdate) -> tuple[Update, bool] | None:
        """The update as it is kept, and whether it was there already. An accepted one reports its lease. None when the
        phase has been finished: nothing would merge it any more."""
        with self._writing() as connection:
            phase = lock_phase(connection, new.phase)
            if there := update_of(connection, new.id):
                return there, True
            if new.refused is None and phase is not None and phase.finished:
                return None
            _require_unreported(connection, new)
            connection.execute(insert(t.updates).values(**asdict(new)))
            if new.refused is None:
                connection.execute(update(t.leases).where(t.leases.c.id == new.lease).values(state="reported"))
            recorded = update_of(connection, new.id)
            assert recorded is not None
            return recorded, False

    def update(self, id: str) -> Update | None:
        with self._reading() as connection:
            return update_of(connection, id)

    def waiting_updates(self, phase: int) -> tuple[Update, ...]:
        """Accepted and not yet merged, in the order of their coming."""
        query = select(t.updates).where(WAITING, t.updates.c.phase == phase).order_by(t.updates.c.number)
        with self._reading() as connection:
            return tuple(Update(**row._asdict()) for row in connection.execute(query))

    def recent_norms(self, phase: int, limit: int = PAGE) -> tuple[float, ...]:
        """Of the updates merged last: what a wild one is measured by."""
        query = select(t.updates.c.norm).where(t.updates.c.merged_phase == phase).order_by(t.updates.c.number.desc())
        with self._reading() as connection:
            return tuple(connection.execute(query.limit(limit)).scalars())

    def contributions(self, after: int = 0, limit: int = PAGE) -> tuple[Contribution, ...]:
        """Who contributed what, in order; `after` is the number of the last update of the page before."""
        more = (t.workers.c.name.label("worker_name"), t.leases.c.round.label("leased_round"), t.leases.c.shard)
        query = (
            select(t.updates, *more)
            .join(t.workers, t.workers.c.id == t.updates.c.worker)
            .join(t.leases, t.leases.c.id == t.updates.c.lease)
            .where(t.updates.c.number > after)
            .order_by(t.updates.c.number)
            .limit(limit)
        )
        with self._reading() as connection:
            return tuple(
                Contribution(Update(**fields), worker_name, round, shard)
                for *values, worker_name, round, shard in connection.execute(query)
                for fields in [dict(zip(t.updates.c.keys(), values, strict=True))]
            )

    def round_losses(self) -> tuple[RoundLoss, ...]:
        """Of every closed round, the loss that its updates reported, weighed by their tokens."""
        tokens, rounds = cast_to(t.updates.c.tokens, Double), t.rounds.c
        of_round = and_(rounds.phase == t.updates.c.merged_phase, rounds.number == t.updates.c.merged_round)
        query = (
            select(
                rounds.phase,
                rounds.number.label("round"),
                rounds.step_start.label("step"),
                rounds.closed_s.label("at_s"),
                (func.sum(t.updates.c.loss * tokens) / func.sum(tokens)).label("loss"),
                func.count().label("updates"),
                func.sum(tokens).label("tokens"),
            )
            .join(t.updates, of_round)
            .group_by(rounds.phase, rounds.number, rounds.step_start, rounds.closed_s)
            .order_by(rounds.phase, rounds.number)
        )
        with self._reading() as connection:
            return tuple(RoundLoss(**row._asdict()) for row in connection.execute(query))

    # Evaluations

    def grant_evaluation(
        self, worker: str, versions: Mapping[int, int], now_s: float, deadline_s: float
    ) -> EvaluationLease:
        values = {"worker": worker, "versions": dict(versions), "granted_s": now_s, "deadline_s": deadline_s}
        with self._writing() as connection:
            key = connection.execute(insert(t.evaluation_leases).values(**values)).inserted_primary_key
            assert key is not None
        return EvaluationLease(
            id=key.number, worker=worker, versions=versions, granted_s=now_s, deadline_s=deadline_s, reported=False
        )

    def evaluation_lease(self, id: int | None = None) -> EvaluationLease | None:
        """That one, or the newest."""
        with self._reading() as connection:
            return evaluation_lease_of(connection, id)

    @_if_absent
    def record_evaluation(
        self, lease: int, split: str, scores: Any, combine: Mapping[str, Sequence[float]], now_s: float
    ) -> bool:
        """False when the lease has reported this split before."""
        weights = {path: list(values) for path, values in combine.items()}
        there = select(t.evaluations.c.number).where(t.evaluations.c.lease == lease, t.evaluations.c.split == split)
        with self._writing() as connection:
            if connection.execute(there).one_or_none():
                return False
            row = {"lease": lease, "split": split, "scores": scores, "combine": weights, "at_s": now_s}
            connection.execute(insert(t.evaluations).values(**row))
            insert_event(connection, "evaluated", f"the {split} split, lease {lease}", now_s, {"lease": lease})
            return True

    def evaluations(self, limit: int = PAGE) -> tuple[Evaluation, ...]:
        """The newest, the oldest of them first."""
        with self._reading() as connection:
            rows = connection.execute(EVALUATIONS.limit(limit)).all()
            return tuple(evaluation_of(row) for row in reversed(rows))

    # Events

    def add_event(self, kind: str, text: str, now_s: float, data: Any = None) -> None:
        """Of refusals there is no end: now and then the oldest go."""
        with self._writing() as connection:
            newest = insert_event(connection, kind, text, now_s, data)
            if newest % PRUNE_EVERY == 0:
                connection.execute(delete_rows(t.events).where(t.events.c.number <= newest - KEPT_EVENTS))

    def events(self, after: int = 0, before: int | None = None, limit: int = PAGE) -> tuple[Event, ...]:
        """The newest between these numbers, the oldest of them first: `before` pages back, `after` gives the news."""
        number = t.events.c.number
        between = and_(number > after, number < before if before is not None else true())
        with self._reading() as connection:
            rows = connection.execute(select(t.events).where(between).order_by(number.desc()).limit(limit)).all()
            return tuple(Event(**row._asdict()) for row in reversed(rows))

    def prune_events(self, keep: int = KEPT_EVENTS) -> int:
        """Forgets all but the newest; gives how many went."""
        number = t.events.c.number
        with self._writing() as connection:
            oldest_gone = connection.execute(select(number).order_by(number.desc()).offset(keep).limit(1)).scalar()
            if oldest_gone is None:
                return 0
            return _changed(connection.execute(delete_rows(t.events).where(number <= oldest_gone)))


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _changed(result: CursorResult[Any]) -> int:
    return result.rowcount


def _insert_versions(connection: Connection, closed: Round, new_versions: Sequence[NewVersion], now_s: float) -> None:
    for new in new_versions:
        parent = closed.base.get(new.block)
        if new.version - 1 != parent:
            raise LedgerConflict(
                f"version {new.version} of block {new.block} was made in round {closed.number} of phase "
                f"{closed.phase}, which is based on {dict(closed.base)}: versions follow each other, decide again"
            )
        where_from = {"phase": closed.phase, "round": closed.number, "parent": parent, "created_s": now_s}
        connection.execute(insert(t.versions).values(**asdict(new), **where_from))


def _mark_merged(connection: Connection, closed: Round, ids: set[str]) -> None:
    marked = 0
    for start in range(0, len(ids), PARAMETERS):
        some = sorted(ids)[start : start + PARAMETERS]
        mark = update(t.updates).where(WAITING, t.updates.c.phase == closed.phase, t.updates.c.id.in_(some))
        merged_in = {"merged_phase": closed.phase, "merged_round": closed.number}
        marked += _changed(connection.execute(mark.values(**merged_in)))
    if marked != len(ids):
        raise LedgerConflict(
            f"{len(ids) - marked} of {len(ids)} updates do not wait to be merged in phase {closed.phase}: "
            f"read those that do and decide again"
        )


def _names(phase: int, round: int) -> dict[str, int]:
    return {"phase": phase, "round": round}


def _expire_leases(connection: Connection, phase: int, round: int, now_s: float) -> None:
    """Those that a closing round did without; each is an event."""
    missed = and_(t.leases.c.phase == phase, t.leases.c.round == round, t.leases.c.state == "open")
    late = select(t.leases.c.worker, t.workers.c.name).join(t.workers, t.workers.c.id == t.leases.c.worker)
    for worker, name in connection.execute(late.where(missed).order_by(t.leases.c.id).limit(MAX_LATE_EVENTS)).all():
        data = {**_names(phase, round), "worker": worker}
        insert_event(connection, "late", f"{name} in phase {phase}, round {round}: it closed without", now_s, data)
    connection.execute(update(t.leases).where(missed).values(state="expired"))


def _covers_all_waiting(connection: Connection, phase: int, ids: set[str]) -> bool:
    """Whether no acknowledged update of the phase would be left behind."""
    waiting = connection.execute(select(t.updates.c.id).where(WAITING, t.updates.c.phase == phase)).scalars()
    return ids.issuperset(waiting)


def _require_unreported(connection: Connection, new: NewUpdate) -> None:
    matches = and_(t.updates.c.lease == new.lease, t.updates.c.refused.is_(None))
    other = connection.execute(select(t.updates.c.id).where(matches)).scalar()
    if other and new.refused is None:
        raise LedgerConflict(
            f"lease {new.lease} has reported update {other[:12]}… and update {new.id[:12]}… came for it too: "
            f"an update needs a lease of its own, ask for a new one"
        )
