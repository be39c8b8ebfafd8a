"""Evaluations and events of a run. A part of the ledger. Next: ledger.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam, select
from sqlalchemy import delete as delete_rows

from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.database import PAGE, LedgerPart, changed, retry_on_conflict
from blocktrain.swarm.ledger.queries import (
    evaluation_lease_of,
    evaluation_leases_of,
    insert_event,
    newest_evaluations,
)
from blocktrain.swarm.ledger.records import Evaluation, EvaluationLease, Event

KEPT_EVENTS, PRUNE_EVERY = 10_000, 500
LAST_NUMBER = 2**63 - 1
EVENTS = (
    select(t.events)
    .where(t.events.c.number > bindparam("after"), t.events.c.number < bindparam("before"))
    .order_by(t.events.c.number.desc())
    .limit(bindparam("at_most"))
)
EVALUATION = select(t.evaluations.c.number).where(
    t.evaluations.c.lease == bindparam("of_lease"), t.evaluations.c.split == bindparam("of_split")
)
_OLDEST_GONE = select(t.events.c.number).order_by(t.events.c.number.desc()).offset(bindparam("keep")).limit(1)
EVALUATED = select(t.events).where(t.events.c.kind == "evaluated")


class ReportsPart(LedgerPart):
    """Evaluations and events."""

    # Evaluations

    def grant_evaluation(
        self, worker: str, versions: Mapping[int, int], now_s: float, deadline_at_s: float
    ) -> EvaluationLease:
        values = {"worker": worker, "versions": dict(versions), "granted_s": now_s, "deadline_at_s": deadline_at_s}
        with self._writing() as connection:
            key = connection.execute(t.insert_into(t.evaluation_leases), values).inserted_primary_key
            assert key is not None
        return EvaluationLease(
            id=key.number,
            worker=worker,
            versions=versions,
            granted_s=now_s,
            deadline_at_s=deadline_at_s,
            reported=False,
        )

    def evaluation_lease(self, id: int | None = None) -> EvaluationLease | None:
        """The lease with this id, or else the newest."""
        with self._reading() as connection:
            return evaluation_lease_of(connection, id)

    def evaluation_leases(self, limit: int = PAGE) -> tuple[EvaluationLease, ...]:
        """The newest `limit`, in order."""
        with self._reading() as connection:
            return evaluation_leases_of(connection, limit)

    @retry_on_conflict
    def record_evaluation(
        self,
        lease: int,
        split: str,
        scores: Any,
        combine: Mapping[str, Sequence[float]],
        now_s: float,
        samples: Sequence[Mapping[str, str]] = (),
        loss: float | None = None,
    ) -> bool:
        """False if the lease has reported this split before. Samples and loss are part of the event."""
        weights = {path: list(values) for path, values in combine.items()}
        with self._writing() as connection:
            if connection.execute(EVALUATION, {"of_lease": lease, "of_split": split}).one_or_none():
                return False
            row = {"lease": lease, "split": split, "scores": scores, "combine": weights, "at_s": now_s}
            connection.execute(t.insert_into(t.evaluations), row)
            data = {"lease": lease, "samples": list(samples), "nats_per_byte": loss}
            measured = "" if loss is None else f"{loss:.4f} nats/byte on "
            insert_event(connection, "evaluated", f"{measured}the {split} split", now_s, data)
            return True

    def evaluations(self, limit: int = PAGE) -> tuple[Evaluation, ...]:
        """The newest `limit`, in order."""
        with self._reading() as connection:
            return newest_evaluations(connection, limit)

    def sampled(self, limit: int) -> tuple[Event, ...]:
        """The events of the first evaluation and of the newest ones, in order: their data holds samples of what the
        model wrote."""
        number = t.events.c.number
        with self._reading() as connection:
            first = connection.execute(EVALUATED.order_by(number).limit(1)).all()
            newest = connection.execute(EVALUATED.order_by(number.desc()).limit(limit)).all()
            rows = {row.number: row for row in (*first, *reversed(newest))}
            return tuple(Event(**row._asdict()) for row in rows.values())

    # Events

    def add_event(self, kind: str, text: str, now_s: float, data: Any = None) -> None:
        """Refusals are unbounded, so now and then the oldest events are deleted."""
        with self._writing() as connection:
            newest = insert_event(connection, kind, text, now_s, data)
            if newest % PRUNE_EVERY == 0:
                connection.execute(delete_rows(t.events).where(t.events.c.number <= newest - KEPT_EVENTS))

    def events(self, after: int = 0, before: int | None = None, limit: int = PAGE) -> tuple[Event, ...]:
        """The newest `limit` between these numbers, in order: `before` pages back, `after` gives the news."""
        page = {"after": after, "before": LAST_NUMBER if before is None else before, "at_most": limit}
        with self._reading() as connection:
            rows = connection.execute(EVENTS, page).all()
            return tuple(Event(**row._asdict()) for row in reversed(rows))

    def prune_events(self, keep: int = KEPT_EVENTS) -> int:
        """Deletes all but the newest. Returns how many were deleted."""
        number = t.events.c.number
        with self._writing() as connection:
            oldest_gone = connection.execute(_OLDEST_GONE, {"keep": keep}).scalar()
            if oldest_gone is None:
                return 0
            return changed(connection.execute(delete_rows(t.events).where(number <= oldest_gone)))
