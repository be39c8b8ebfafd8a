"""Rollbacks: a phase's blocks go back to what they were, or to what they would be without a worker. Versions only grow:
a rollback is a new version. A part of the ledger.
Next: ../coordinator/trust/orders.py, which computes it; tables.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select, update

from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.audits import AuditsPart
from blocktrain.swarm.ledger.database import changed
from blocktrain.swarm.ledger.open_rounds import first_mark
from blocktrain.swarm.ledger.queries import IS_OPEN, insert_event, insert_round, lock_phase
from blocktrain.swarm.ledger.records import NewVersion, RollbackRecord
from blocktrain.swarm.ledger.rounds import EXPIRE
from blocktrain.swarm.policy.rounds import Round


class RollbacksPart(AuditsPart):
    """Rollbacks. None is ever deleted."""

    def roll_back(
        self,
        closed: Round,
        new_versions: Sequence[NewVersion],
        sources: Mapping[int, int],
        following: Round,
        worker: str | None,
        reason: str,
        now_s: float,
    ) -> bool:
        """All or nothing: the open round closes without a merge, what waits is left out, the versions appear, and the
        next round starts from them. False if the round is not the open one any more."""
        of_round = {"of_phase": closed.phase, "of_number": closed.number}
        with self._writing() as connection:
            lock_phase(connection, closed.phase)
            close = update(t.rounds).where(IS_OPEN).values(closed_s=now_s, reason=reason)
            if not changed(connection.execute(close, of_round)):
                return False
            self.leave_out(connection, t.updates.c.phase == closed.phase, reason, now_s)
            of_closed = {"of_phase": closed.phase, "of_round": closed.number}
            connection.execute(EXPIRE, {**of_closed, "state": "expired"})
            for new in new_versions:
                where_from = {"phase": None, "round": None, "parent": new.version - 1, "created_s": now_s}
                connection.execute(t.insert_into(t.versions), {**vars(new), **where_from})
                row: dict[str, Any] = {"phase": closed.phase, "round": following.number, "block": new.block}
                row |= {"version": new.version, "source": sources[new.block], "worker": worker}
                row |= {"reason": reason, "at_s": now_s}
                connection.execute(t.insert_into(t.rollbacks), row)
            position = {"step": following.step_start, "finished": False}
            connection.execute(update(t.phases).where(t.phases.c.phase == closed.phase).values(**position))
            insert_round(connection, following, first_mark(following.phase, following.number))
            insert_event(connection, "rolled back", f"phase {closed.phase + 1}: {reason}", now_s, {"worker": worker})
            return True

    def rollbacks(self) -> tuple[RollbackRecord, ...]:
        columns = [column for column in t.rollbacks.c if column.name != "number"]
        with self._reading() as connection:
            rows = connection.execute(select(*columns).order_by(t.rollbacks.c.number))
            return tuple(RollbackRecord(**row._asdict()) for row in rows)

    def rounds_with(self, worker: str, phase: int) -> list[int]:
        """The closed rounds of the phase in which an update of this worker counted."""
        query = (
            select(t.updates.c.merged_round)
            .join(t.merge_weights, t.merge_weights.c.number == t.updates.c.number, isouter=True)
            .where(t.updates.c.worker == worker, t.updates.c.merged_phase == phase)
            .where((t.merge_weights.c.weight > 0) | t.merge_weights.c.weight.is_(None))
            .order_by(t.updates.c.merged_round)
        )
        with self._reading() as connection:
            return list(dict.fromkeys(connection.execute(query).scalars()))

    def merged_rounds(self, phase: int, first: int, before: int) -> list[int]:
        """The numbers of the phase's rounds that made versions, from `first` to `before`."""
        query = select(t.versions.c.round).where(t.versions.c.phase == phase, t.versions.c.round.between(first, before))
        with self._reading() as connection:
            return sorted(set(connection.execute(query).scalars()))
