"""Open rounds as this process last saw them, brought up to date by what changed since. An update costs as much in a
round of thousands of leases as in a small one, with one coordinator and with several.
Next: rounds.py and updates.py, which change rounds; queries.py, which reads whole ones."""

from __future__ import annotations

import secrets
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from sqlalchemy import String, and_, bindparam, select, union, update

from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.drivers.connection import Connection
from blocktrain.swarm.ledger.queries import ACCEPTED, IS_LEFT_OUT, LEASE_FACTS, OPEN, lease_from, rounds_of
from blocktrain.swarm.policy.rounds import LateUpdate, Lease, Round

KEPT = 8  # states of a phase's open round: while threads write, others still read an older one
TRIED = 3  # of them, before all is read: the newest may be of a transaction that was not kept

OPEN_ROUNDS = select(t.rounds).where(OPEN)
LOCKED = select(t.rounds.c.phase, t.rounds.c.mark).where(t.rounds.c.phase == bindparam("of_phase"), OPEN)
LOCKED = LOCKED.with_for_update()
SET_MARK = update(t.rounds).where(t.rounds.c.phase == bindparam("of_phase"), OPEN)

_LEASES_SINCE = and_(t.leases.c.mark >= bindparam("since"), t.leases.c.mark < bindparam("end"))
_UPDATES_SINCE = and_(t.updates.c.mark >= bindparam("since"), t.updates.c.mark < bindparam("end"))
_CHANGED = union(
    select(t.leases.c.id).where(_LEASES_SINCE),
    select(t.updates.c.lease).where(_UPDATES_SINCE),
    # An update of an older lease changes the track record that its worker's lease in the open round shows.
    select(bindparam("before_worker", type_=String).concat(t.updates.c.worker)).where(_UPDATES_SINCE),
).subquery()
CHANGES = (
    select(
        *LEASE_FACTS,
        t.leases.c.mark.label("lease_mark"),
        t.updates.c.mark.label("update_mark"),
        IS_LEFT_OUT.label("left_out"),
    )
    .select_from(_CHANGED)
    .join(t.leases, t.leases.c.id == _CHANGED.c.id)
    .outerjoin(t.updates, ACCEPTED)
    .outerjoin(t.track_records, t.track_records.c.worker == t.leases.c.worker)
    .order_by(t.updates.c.number)
)

Change = Callable[[Round], Round]
Kept = tuple[tuple[str, Round], ...]  # marks, and the round as it was then


def first_mark(phase: int, number: int) -> str:
    """Of a round when it opens."""
    return f"{_of_round(phase, number)}{0:08x}{secrets.token_hex(6)}"


def mark_after(mark: str) -> str:
    """Larger than this mark of the round and like no other: also two transactions of which only one is kept make
    different ones."""
    return f"{mark[:12]}{int(mark[12:20], 16) + 1:08x}{secrets.token_hex(6)}"


def _of_round(phase: int, number: int) -> str:
    """What all marks of the round begin with, and none of another."""
    return f"{phase:04x}{number:08x}"


class OpenRounds:
    """A round gets a new `mark` whenever its leases or its updates change, and the lease or update that changed gets
    the same one. Whoever changes a round has its row locked, so marks grow in the order in which changes are kept. The
    changes since a known mark are therefore the rows with larger ones, if the known mark itself is on a row: one of a
    transaction that was not kept, or that a database lost, is on none. What is kept here is right whichever process
    writes. Each phase has one open round at most."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}  # phase: the state that was used last is the first

    def all(self, connection: Connection) -> dict[int, Round]:
        return {row.phase: self.of(connection, row) for row in connection.execute(OPEN_ROUNDS).all()}

    def of(self, connection: Connection, row: Any) -> Round:
        kept = self._kept.get(row.phase, ())
        round = _at(row.mark, kept)
        if round is None:
            round = _caught_up(connection, row, kept) or rounds_of(connection, [row])[0].round
        if round.deadline_at_s != row.deadline_at_s:  # extending a round changes no mark
            round = replace(round, deadline_at_s=row.deadline_at_s)
        self._keep(row.phase, row.mark, round)
        return round

    def change(self, connection: Connection, row: Any, mark: str, change: Change | None = None, **values: Any) -> None:
        """Writes the mark that follows that of `row`, which is locked, and these values to the open round. `change`
        makes the round as it was the new one; without it, the change is read when the round is asked for."""
        connection.execute(SET_MARK, {"of_phase": row.phase, "mark": mark, **values})
        round = _at(row.mark, self._kept.get(row.phase, ()))
        if change is not None and round is not None:
            self._keep(row.phase, mark, _in_order(change(round)))

    def _keep(self, phase: int, mark: str, round: Round) -> None:
        kept = self._kept.get(phase, ())
        if not kept or kept[0] != (mark, round):
            self._kept[phase] = ((mark, round), *(x for x in kept if x[0] != mark))[:KEPT]


def _at(mark: str, kept: Kept) -> Round | None:
    return next((round for known, round in kept if known == mark), None)


def _caught_up(connection: Connection, row: Any, kept: Kept) -> Round | None:
    """The newest of the kept states that the database has had, with all changes since; None if none can be used."""
    older = sorted((x for x in kept if x[1].number == row.number and x[0] < row.mark), key=itemgetter(0), reverse=True)
    more = {"end": _of_round(row.phase, row.number + 1), "before_worker": f"{row.phase}-{row.number}-"}
    for mark, round in older[:TRIED]:
        changes = connection.execute(CHANGES, {"since": mark, **more}).all()
        if any(mark in (x.lease_mark, x.update_mark) for x in changes):
            return _with_changes(round, changes)
    return None


def _with_changes(round: Round, changes: Sequence[Any]) -> Round:
    """Changes that the round has already change nothing."""
    leases, late = list(round.leases), dict.fromkeys(round.late)
    for x in changes:
        if x.round == round.number:
            if own := round.lease_of(x.worker):
                del leases[bisect_left(leases, _order(own), key=_order)]
            if not x.left_out:
                insort(leases, lease_from(x, x.received_s is not None), key=_order)
        elif x.received_s is not None:
            update = LateUpdate(x.worker, x.round, x.shard)
            if x.merged_round is not None or x.left_out:
                late.pop(update, None)
            else:
                late[update] = None
    return replace(round, leases=tuple(leases), late=tuple(late))


def _order(lease: Lease) -> tuple[float, str]:
    """As the database has them."""
    return lease.granted_s, lease.worker


def _in_order(round: Round) -> Round:
    """A lease that was given or renewed is the last one; the others are in order."""
    if len(round.leases) < 2 or _order(round.leases[-2]) < _order(round.leases[-1]):
        return round
    *others, last = round.leases
    insort(others, last, key=_order)
    return replace(round, leases=tuple(others))
