"""What workers contributed: updates, from their coming to their merge. A part of ledger.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from sqlalchemy import Connection, Double, and_, func, insert, select, update
from sqlalchemy import cast as cast_to

from blocktrain.errors import LedgerConflict
from blocktrain.swarm import ledger_tables as t
from blocktrain.swarm.ledger_book import PAGE, Book, if_absent
from blocktrain.swarm.ledger_queries import WAITING, lock_phase, update_of
from blocktrain.swarm.ledger_records import Contribution, NewUpdate, RoundLoss, Update
from blocktrain.swarm.rounds import LateUpdate, Round


class UpdatesBook(Book):
    """Updates; nothing is ever taken out."""

    @if_absent
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
                self._open.change(connection, new.phase, _reported(connection, new))
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


def _reported(connection: Connection, new: NewUpdate) -> Callable[[Round], Round]:
    """What the update makes of the open round: its own round's report, or one more that is late."""
    lease = connection.execute(select(t.leases.c.round, t.leases.c.shard).where(t.leases.c.id == new.lease)).one()
    late = LateUpdate(new.worker, lease.round, lease.shard)

    def change(round: Round) -> Round:
        own = lease.round == round.number
        return round.with_report(new.worker, new.steps, new.received_s) if own else round.with_late(late)

    return change


def _require_unreported(connection: Connection, new: NewUpdate) -> None:
    matches = and_(t.updates.c.lease == new.lease, t.updates.c.refused.is_(None))
    other = connection.execute(select(t.updates.c.id).where(matches)).scalar()
    if other and new.refused is None:
        raise LedgerConflict(
            f"lease {new.lease} has reported update {other[:12]}… and update {new.id[:12]}… came for it too: "
            f"an update needs a lease of its own, ask for a new one"
        )
