"""Open rounds as the ledger last saw them: one that nobody has changed since is not put together again from all its
leases. A round's `mark` is another whenever it, its leases or its updates change, and no two are ever the same, so that
what is known here is right whoever writes, and whether or not a transaction is kept. A part of ledger.py."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, and_, bindparam, select, update

from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.queries import rounds_of
from blocktrain.swarm.policy.rounds import Round

OPEN_ROUNDS = select(t.rounds).where(t.rounds.c.closed_s.is_(None))
MARK = update(t.rounds).where(and_(t.rounds.c.phase == bindparam("of_phase"), t.rounds.c.closed_s.is_(None)))
MARK_KNOWN = MARK.where(t.rounds.c.mark == bindparam("known"))

Change = Callable[[Round], Round]


def new_mark() -> str:
    return secrets.token_hex(8)


class OpenRounds:
    """For the threads of one process; each phase has one open round at most."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, Round]] = {}  # phase: a mark and the round as it was then

    def all(self, connection: Connection) -> dict[int, Round]:
        return {row.phase: self.of(connection, row) for row in connection.execute(OPEN_ROUNDS).all()}

    def of(self, connection: Connection, row: Any) -> Round:
        mark, round = self._known.get(row.phase, ("", None))
        if round is None or mark != row.mark:
            round = rounds_of(connection, [row])[0].round
            self._known[row.phase] = row.mark, round
        return round

    def change(self, connection: Connection, phase: int, change: Change | None = None, **values: Any) -> None:
        """The open round of the phase has changed: its row by these values, the whole as `change` says, or in a way
        that is best read again."""
        known, round = self._known.get(phase, ("", None))
        values = {"of_phase": phase, "mark": new_mark(), **values}
        if change is None or round is None or not connection.execute(MARK_KNOWN, {"known": known, **values}).rowcount:
            connection.execute(MARK, values)
            return
        self._known[phase] = values["mark"], _in_order(change(round))


def _in_order(round: Round) -> Round:
    """Its leases as the database gives them."""
    return replace(round, leases=tuple(sorted(round.leases, key=lambda lease: (lease.granted_s, lease.worker))))
