"""Vettings: which updates of a round are scored before it is merged, by whom, and what was found. A part of the ledger.
Next: ../policy/vetting.py, which decides; tables.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import and_, bindparam, select, update

from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.database import LedgerPart, changed, retry_on_conflict
from blocktrain.swarm.ledger.drivers.connection import Connection
from blocktrain.swarm.ledger.queries import IS_OPEN, insert_event, lock_phase
from blocktrain.swarm.ledger.records import VetSeat, VettingRecord
from blocktrain.swarm.policy.rounds import Round
from blocktrain.swarm.policy.vetting import VettingVerdict

OF_ROUND = (
    select(*t.columns(t.vettings))
    .where(t.vettings.c.phase == bindparam("of_phase"), t.vettings.c.round == bindparam("of_round"))
    .order_by(t.vettings.c.number)
)
SEATS = (
    select(t.vet_seats)
    .where(t.vet_seats.c.vetting == bindparam("of_vetting"))
    .order_by(t.vet_seats.c.granted_s, t.vet_seats.c.id)
)
CONTRADICTED = select(t.vet_seats.c.worker).where(t.vet_seats.c.contradicted)


class VettingsPart(LedgerPart):
    """Vettings. None is ever deleted."""

    @retry_on_conflict
    def open_vettings(
        self,
        round: Round,
        groups: Sequence[Sequence[str]],
        chosen: Sequence[Sequence[str]],
        draw: int,
        now_s: float,
        deadline_at_s: float,
    ) -> bool:
        """All groups of a round's updates at once. False if the round is closed or has been opened for it before."""
        of_round = {"of_phase": round.phase, "of_number": round.number}
        with self._writing() as connection:
            lock_phase(connection, round.phase)
            if connection.execute(select(t.rounds.c.number).where(IS_OPEN), of_round).one_or_none() is None:
                return False
            if self._of_round(connection, round.phase, round.number):
                return False
            for updates, workers in zip(groups, chosen, strict=True):
                row: dict[str, Any] = {"phase": round.phase, "round": round.number, "draw": draw, "opened_s": now_s}
                row |= {"updates": list(updates), "chosen": list(workers), "deadline_at_s": deadline_at_s}
                connection.execute(t.insert_into(t.vettings), row)
            return True

    def vettings(self, phase: int, round: int) -> tuple[VettingRecord, ...]:
        with self._reading() as connection:
            return self._of_round(connection, phase, round)

    def all_vettings(self) -> tuple[VettingRecord, ...]:
        with self._reading() as connection:
            rows = connection.execute(select(*t.columns(t.vettings)).order_by(t.vettings.c.number)).all()
            return tuple(_vetting(connection, row) for row in rows)

    def grant_vetting(self, vetting: VettingRecord, worker: str, now_s: float) -> VetSeat:
        """Its seat. A worker that asks again, because it was restarted, gets the same one."""
        row = {"id": f"vet-{vetting.number}-{worker}", "vetting": vetting.number, "worker": worker, "granted_s": now_s}
        unset: dict[str, Any] = {"losses": None, "signature": None, "contradicted": False}
        seat = VetSeat(**row, **unset)  # type: ignore[arg-type]
        with self._writing() as connection:
            there = select(t.vet_seats.c.id).where(t.vet_seats.c.id == seat.id)
            if connection.execute(there).one_or_none() is None:
                connection.execute(t.insert_into(t.vet_seats), {**row, "contradicted": False})
        return seat

    def vet_seat(self, id: str) -> tuple[VetSeat, VettingRecord] | None:
        with self._reading() as connection:
            seat = connection.execute(select(t.vet_seats).where(t.vet_seats.c.id == id)).one_or_none()
            if seat is None:
                return None
            of_number = select(*t.columns(t.vettings)).where(t.vettings.c.number == seat.vetting)
            return VetSeat(**seat._asdict()), _vetting(connection, connection.execute(of_number).one())

    def record_vetting(self, seat: str, losses: Mapping[str, Any], signature: str) -> None:
        """What a worker measured. A second report changes nothing."""
        unreported = and_(t.vet_seats.c.id == seat, t.vet_seats.c.signature.is_(None))
        with self._writing() as connection:
            values = {"losses": dict(losses), "signature": signature}
            connection.execute(update(t.vet_seats).where(unreported).values(**values))

    def close_vetting(self, vetting: VettingRecord, found: VettingVerdict, now_s: float) -> bool:
        """Records the verdict. False if it was closed before."""
        harmful = {vetting.updates[at]: why for at, why in found.harmful.items()}
        verdict = {"outcome": found.outcome, "reason": found.reason, "harmful": harmful}
        still_open = and_(t.vettings.c.number == vetting.number, t.vettings.c.closed_s.is_(None))
        with self._writing() as connection:
            close = update(t.vettings).where(still_open).values(verdict=verdict, closed_s=now_s)
            if not changed(connection.execute(close)):
                return False
            for worker in found.contradicted:
                seat = and_(t.vet_seats.c.vetting == vetting.number, t.vet_seats.c.worker == worker)
                connection.execute(update(t.vet_seats).where(seat).values(contradicted=True))
            where = f"phase {vetting.phase + 1}, round {vetting.round}"
            text = f"{where}: {len(harmful)} of {len(vetting.updates)} updates hurt, {found.reason}"
            data: dict[str, Any] = {"phase": vetting.phase, "round": vetting.round, "outcome": found.outcome}
            data["contradicted"] = list(found.contradicted)
            insert_event(connection, "vetted", text, now_s, data)
            return True

    def contradicted_scorers(self) -> set[str]:
        """Workers whose scores most others once contradicted: they are asked no more."""
        with self._reading() as connection:
            return set(connection.execute(CONTRADICTED).scalars())

    def _of_round(self, connection: Connection, phase: int, round: int) -> tuple[VettingRecord, ...]:
        rows = connection.execute(OF_ROUND, {"of_phase": phase, "of_round": round}).all()
        return tuple(_vetting(connection, row) for row in rows)


def _vetting(connection: Connection, row: Any) -> VettingRecord:
    fields = row._asdict()
    asked = tuple(VetSeat(**x._asdict()) for x in connection.execute(SEATS, {"of_vetting": row.number}))
    fields |= {"updates": tuple(fields["updates"]), "chosen": tuple(fields["chosen"]), "seats": asked}
    return VettingRecord(**fields)
