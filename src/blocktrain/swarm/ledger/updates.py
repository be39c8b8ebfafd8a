"""The updates of workers, from their arrival to their merge. A part of the ledger. Next: open_rounds.py, which
keeps open rounds in memory; tables.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Double, and_, bindparam, func, or_, select
from sqlalchemy import cast as cast_to

from blocktrain.errors import LedgerConflict
from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.chain import START, ChainHead, link
from blocktrain.swarm.ledger.database import PAGE, LedgerPart, retry_on_conflict
from blocktrain.swarm.ledger.drivers.connection import Connection
from blocktrain.swarm.ledger.open_rounds import mark_after
from blocktrain.swarm.ledger.queries import OPEN, UPDATE_FACTS, WAITING, change_track_record, update_of
from blocktrain.swarm.ledger.records import Contribution, MergeWeight, NewUpdate, RoundLoss, Update, Version
from blocktrain.swarm.policy.rounds import LateUpdate, Round
from blocktrain.swarm.policy.track_record import TrackRecord

_LEASE_FACTS = (t.leases.c.round, t.leases.c.shard, t.leases.c.granted_s, t.phases.c.finished)
_LEASED = select(*_LEASE_FACTS, t.rounds.c.phase, t.rounds.c.mark).where(t.leases.c.id == bindparam("of_lease"))
_LEASED = _LEASED.join(t.phases, t.phases.c.phase == t.leases.c.phase)
_OPEN_OF_PHASE = and_(t.rounds.c.phase == t.phases.c.phase, OPEN)
# The lease, its phase and the phase's open round, both locked, in this order, until the transaction is over
LEASED = _LEASED.join(t.rounds, _OPEN_OF_PHASE).with_for_update(of=(t.phases, t.rounds))
LEASED_BEFORE = _LEASED.outerjoin(t.rounds, _OPEN_OF_PHASE).with_for_update(of=t.phases)  # there is no open round
SAME = select(*UPDATE_FACTS).where(
    or_(
        t.updates.c.id == bindparam("of_id"),
        and_(t.updates.c.lease == bindparam("of_lease"), t.updates.c.refused.is_(None)),
    )
)
WAITING_OF = select(*UPDATE_FACTS).where(WAITING, t.updates.c.phase == bindparam("of_phase"))
WAITING_OF = WAITING_OF.order_by(t.updates.c.number)
HEAD = select(t.chain).order_by(t.chain.c.number.desc()).limit(1)
NEWEST_LINK = select(t.chain.c.sha256).order_by(t.chain.c.number.desc()).limit(1)
RECENT_ROUNDS = 4  # whose norms are compared with those of a new update: norms change with the learning rate
_MERGED_IN = t.updates.c.merged_phase == bindparam("of_phase")
_LAST_MERGED = select(func.max(t.updates.c.merged_round)).where(_MERGED_IN).scalar_subquery()
_MERGED_IN_ROUND = and_(_MERGED_IN, t.updates.c.merged_round == bindparam("of_round"))
MERGED_UPDATES = select(*UPDATE_FACTS).where(_MERGED_IN_ROUND).order_by(t.updates.c.number)
MERGE_WEIGHTS = (
    select(t.updates.c.id, t.merge_weights.c.weight, t.merge_weights.c.scale, t.merge_weights.c.reason)
    .join(t.updates, t.updates.c.number == t.merge_weights.c.number)
    .where(_MERGED_IN_ROUND)
    .order_by(t.updates.c.number)
)
NORMS = (
    select(t.updates.c.norm)
    .where(_MERGED_IN)
    .where(t.updates.c.merged_round > _LAST_MERGED - RECENT_ROUNDS)
    .order_by(t.updates.c.number.desc())
    .limit(bindparam("at_most"))
)


class UpdatesPart(LedgerPart):
    """Updates. None is ever deleted."""

    @retry_on_conflict
    def record_update(self, new: NewUpdate) -> tuple[Update, bool] | None:
        """The update as it is stored, and whether it was there already. An accepted one reports its lease. None if the
        phase is finished: nothing would merge the update any more."""
        with self._writing() as connection:
            lease = _leased(connection, new.lease)
            same = connection.execute(SAME, {"of_id": new.id, "of_lease": new.lease}).all()
            if there := next((row for row in same if row.id == new.id), None):
                return Update(**there._asdict()), True
            if new.refused is None and lease is not None and lease.finished:
                return None
            if new.refused is None and same:
                raise _reported_before(new, same[0].id)
            mark = mark_after(lease.mark) if new.refused is None and lease is not None else None
            key = connection.execute(t.insert_into(t.updates), {**vars(new), "mark": mark}).inserted_primary_key
            if mark is not None:
                took_s = new.received_s - lease.granted_s
                after = change_track_record(connection, new.worker, lambda x: x.with_delivery(new.steps, took_s))
                self._open.change(connection, lease, mark, _reported(lease, new, after))
            assert key is not None
            previous = connection.execute(NEWEST_LINK).scalar() or START
            sha256 = link(previous, key.number, new)
            connection.execute(t.insert_into(t.chain), {"number": key.number, "previous": previous, "sha256": sha256})
            return Update(**vars(new), number=key.number, merged_phase=None, merged_round=None), False

    def chain_head(self) -> ChainHead | None:
        """None while no update was recorded since ledgers have a chain."""
        with self._reading() as connection:
            row = connection.execute(HEAD).one_or_none()
            return ChainHead(row.number, row.sha256) if row else None

    def chain_links(self) -> dict[int, tuple[str, str]]:
        """Update's number: the hash before it and its own."""
        with self._reading() as connection:
            rows = connection.execute(select(t.chain).order_by(t.chain.c.number)).all()
            return {row.number: (row.previous, row.sha256) for row in rows}

    def merged_updates(self, phase: int, round: int) -> tuple[Update, ...]:
        """Those that became a version in this round, in the order of arrival."""
        with self._reading() as connection:
            rows = connection.execute(MERGED_UPDATES, {"of_phase": phase, "of_round": round})
            return tuple(Update(**row._asdict()) for row in rows)

    def versions_by_round(self, phase: int, first: int, limit: int) -> dict[int, list[Version]]:
        """The versions of the merged rounds of a phase, from this round on."""
        made, numbers = t.versions.c, t.versions.c.round
        of_phase = and_(made.phase == phase, numbers >= first, numbers < first + limit)
        found: dict[int, list[Version]] = {}
        with self._reading() as connection:
            for row in connection.execute(select(t.versions).where(of_phase).order_by(numbers, made.block)):
                found.setdefault(row.round, []).append(Version(**row._asdict()))
        return found

    def merge_weights(self, phase: int, round: int) -> tuple[MergeWeight, ...]:
        """What the updates of this round weighed. Empty for a round that an older version merged."""
        with self._reading() as connection:
            rows = connection.execute(MERGE_WEIGHTS, {"of_phase": phase, "of_round": round})
            return tuple(MergeWeight(*row) for row in rows)

    def update(self, id: str) -> Update | None:
        with self._reading() as connection:
            return update_of(connection, id)

    def waiting_updates(self, phase: int) -> tuple[Update, ...]:
        """Accepted and not yet merged, in the order of arrival."""
        with self._reading() as connection:
            return tuple(Update(**row._asdict()) for row in connection.execute(WAITING_OF, {"of_phase": phase}))

    def recent_norms(self, phase: int, limit: int = PAGE) -> tuple[float, ...]:
        """The norms of the updates that were merged in the last rounds, to compare a new one with."""
        with self._reading() as connection:
            return tuple(connection.execute(NORMS, {"of_phase": phase, "at_most": limit}).scalars())

    def contributions(self, after: int = 0, limit: int = PAGE) -> tuple[Contribution, ...]:
        """Who contributed what, in order. `after` is the number of the last update of the previous page."""
        more = (t.workers.c.name.label("worker_name"), t.leases.c.round.label("leased_round"), t.leases.c.shard)
        query = (
            select(*UPDATE_FACTS, *more)
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
                for fields in [dict(zip((x.name for x in UPDATE_FACTS), values, strict=True))]
            )

    def round_losses(self) -> tuple[RoundLoss, ...]:
        """For every closed round, the loss that its updates reported, weighted by their tokens."""
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


def _leased(connection: Connection, id: str) -> Any:
    """Where a merge replaced the open round while its row was waited for, PostgreSQL finds none; then, with the phase
    locked, no other merge can."""
    of_lease = {"of_lease": id}
    lease = connection.execute(LEASED, of_lease).one_or_none() or connection.execute(LEASED, of_lease).one_or_none()
    return lease or connection.execute(LEASED_BEFORE, of_lease).one_or_none()


def _reported(lease: Any, new: NewUpdate, after: TrackRecord) -> Callable[[Round], Round]:
    """How the update changes the open round: as a report of that round, or as a late update."""
    late = LateUpdate(new.worker, lease.round, lease.shard)

    def change(round: Round) -> Round:
        own = lease.round == round.number
        if own:
            return round.with_report(new.worker, new.steps, new.received_s)
        return round.with_late(late, after.owed, after.delivered)

    return change


def _reported_before(new: NewUpdate, other: str) -> LedgerConflict:
    return LedgerConflict(
        f"lease {new.lease} has reported update {other[:12]}… and update {new.id[:12]}… was sent for it too: "
        f"an update needs a lease of its own, ask for a new one"
    )
