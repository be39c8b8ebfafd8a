"""The run itself, its access tokens, and the workers that have joined. A part of the ledger.
Next: ledger.py."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from dataclasses import asdict
from typing import cast

from sqlalchemy import and_, bindparam, func, select, update

from blocktrain.errors import ConfigError, LedgerConflict
from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.database import LedgerPart, changed, retry_on_conflict
from blocktrain.swarm.ledger.queries import insert_event, run_of, track_record_of
from blocktrain.swarm.ledger.records import ROLES, AccessToken, Role, Run, WorkerRecord
from blocktrain.swarm.policy.track_record import TrackRecord

ROLES_BY_HASH = select(t.tokens.c.role, t.tokens.c.sha256).where(t.tokens.c.revoked_s.is_(None))
OWN_INVITE = "worker"  # the name of its access token (../coordinator/server.py)
SEE_AGAIN = update(t.workers).where(t.workers.c.id == bindparam("of_id"), t.workers.c.nonce < bindparam("of_nonce"))
NONCE = select(t.workers.c.nonce).where(t.workers.c.id == bindparam("of_id"))
COORDINATOR_KEYS = select(t.coordinator_keys.c.public_key).order_by(
    t.coordinator_keys.c.added_s, t.coordinator_keys.c.public_key
)
TOKEN_OF = select(t.worker_tokens.c.token).where(t.worker_tokens.c.worker == bindparam("of_worker"))
ADDED_TOKENS_OF = (
    select(t.worker_tokens.c.worker, t.tokens.c.number)
    .join(t.tokens, t.tokens.c.number == t.worker_tokens.c.token)
    .where(t.worker_tokens.c.worker.in_(bindparam("workers", expanding=True)))
    .where(t.tokens.c.role == "worker", t.tokens.c.name != OWN_INVITE)
)
TOKEN_NUMBER = select(t.tokens.c.number).where(t.tokens.c.sha256 == bindparam("of_sha256"))
KEYS_OF_TOKEN = select(func.count(t.worker_tokens.c.worker)).where(t.worker_tokens.c.token == bindparam("of_token"))


class RegistryPart(LedgerPart):
    """The run, access tokens and workers."""

    # The run

    @retry_on_conflict
    def create_run(self, new: Run) -> Run:
        """Records the run, or returns the one that is there if it has the same spec and corpus. A run that was founded
        with an older protocol continues: the protocol is spoken with workers, and the ledger does not depend on it."""
        with self._writing() as connection:
            there = run_of(connection)
            if there is None:
                connection.execute(t.insert_into(t.run), {"id": 1, **asdict(new)})
                return new
        for what, old, wanted in (
            ("a run with another spec", there.spec_digest, new.spec_digest),
            ("a run on another corpus", there.corpus_sha256, new.corpus_sha256),
        ):
            if old != wanted:
                raise ConfigError(
                    f"the ledger at {self.database.where} holds {what} ({old}, not {wanted}): "
                    f"continue that run as it was started, or give this one another ledger (in PostgreSQL another "
                    f"schema, ?schema=NAME)"
                )
        if there.protocol > new.protocol:
            raise ConfigError(
                f"the ledger at {self.database.where} holds a run of protocol {there.protocol}, this version of "
                f"blocktrain speaks {new.protocol}: install the version that founded the run, or a later one"
            )
        return there

    def run(self) -> Run | None:
        with self._reading() as connection:
            return run_of(connection)

    def set_paused(self, paused: bool, now_s: float) -> bool:
        """False if it was so already."""
        change = update(t.run).where(t.run.c.paused != paused).values(paused=paused)
        with self._writing() as connection:
            if changed(connection.execute(change)) == 0:
                return False
            kind = "paused" if paused else "resumed"
            insert_event(connection, kind, "by an admin", now_s)
            return True

    @retry_on_conflict
    def add_coordinator_key(self, public_key: str, now_s: float) -> None:
        """A repeat changes nothing."""
        with self._writing() as connection:
            if public_key not in connection.execute(COORDINATOR_KEYS).scalars().all():
                connection.execute(t.insert_into(t.coordinator_keys), {"public_key": public_key, "added_s": now_s})

    def coordinator_keys(self) -> tuple[str, ...]:
        """The public keys that sign receipts, or have signed some."""
        with self._reading() as connection:
            return tuple(connection.execute(COORDINATOR_KEYS).scalars())

    # Access tokens

    def add_access_token(self, name: str, role: Role, access_token: str, now_s: float) -> None:
        """Stores the hash of the access token, never the token."""
        if role not in ROLES:
            raise ConfigError(f'there is no role "{role}": choose one of {", ".join(ROLES)}')
        try:
            with self._writing() as connection:
                values = {"name": name, "role": role, "sha256": _hash(access_token), "created_s": now_s}
                connection.execute(t.insert_into(t.tokens), values)
        except LedgerConflict:
            raise ConfigError(
                f'there is an access token "{name}" already: choose another name, or revoke that one first'
            ) from None

    def access_tokens(self) -> tuple[AccessToken, ...]:
        """All, also revoked ones, in the order they were added."""
        columns = (t.tokens.c.name, t.tokens.c.role, t.tokens.c.created_s, t.tokens.c.revoked_s)
        with self._reading() as connection:
            rows = connection.execute(select(*columns).order_by(t.tokens.c.number))
            return tuple(AccessToken(**row._asdict()) for row in rows)

    def revoke_access_token(self, name: str, now_s: float) -> bool:
        """False if there was no such access token."""
        matches = and_(t.tokens.c.name == name, t.tokens.c.revoked_s.is_(None))
        with self._writing() as connection:
            return changed(connection.execute(update(t.tokens).where(matches).values(revoked_s=now_s))) > 0

    def role_of(self, access_token: str) -> Role | None:
        """Compares with every access token, so that the time does not depend on which one it is. Every request asks."""
        with self._reading(True) as connection:
            rows = connection.execute(ROLES_BY_HASH).all()
        given, role = _hash(access_token), None
        for row in rows:
            if hmac.compare_digest(row.sha256, given):
                role = row.role
        return cast("Role | None", role)

    # Workers

    @retry_on_conflict
    def see_worker(
        self, id: str, name: str, device: str, memory_bytes: int, steps_per_s: float, now_s: float, nonce: int
    ) -> bool:
        """Records what a worker says of itself. False, without a change, unless its nonce is larger than all before."""
        said = {"name": name, "device": device, "memory_bytes": memory_bytes, "steps_per_s": steps_per_s}
        seen = {**said, "nonce": nonce, "last_seen_s": now_s}
        with self._writing() as connection:
            if id in self._seen or connection.execute(NONCE, {"of_id": id}).one_or_none():
                self._seen.add(id)
                return changed(connection.execute(SEE_AGAIN, {"of_id": id, "of_nonce": nonce, **seen})) > 0
            connection.execute(t.insert_into(t.workers), {"id": id, "first_seen_s": now_s, **seen})
            insert_event(connection, "joined", f"{alias_of(id)}, {device}", now_s, {"worker": id})
            return True

    def note_token(self, worker: str, access_token: str, most: int) -> bool:
        """Notes with which access token a key first came. False if so many other keys came with it before."""
        if worker in self._noted:
            return True
        with self._writing() as connection:
            if connection.execute(TOKEN_OF, {"of_worker": worker}).one_or_none():
                self._noted.add(worker)
                return True
            number = connection.execute(TOKEN_NUMBER, {"of_sha256": _hash(access_token)}).scalar()
            if number is None:
                return True  # a coordinator in a test has no tokens
            if connection.execute(KEYS_OF_TOKEN, {"of_token": number}).scalar_one() >= most:
                return False
            connection.execute(t.insert_into(t.worker_tokens), {"worker": worker, "token": number})
            return True

    def participants(self, workers: Collection[str]) -> dict[str, str]:
        """Worker: to whom its key belongs. The keys of an access token that was added for somebody are one participant.
        Those of the run's own invite, which the operator's machines have, are one each."""
        with self._reading() as connection:
            rows = connection.execute(ADDED_TOKENS_OF, {"workers": list(workers)})
            added = {row.worker: f"token {row.number}" for row in rows}
        return {worker: added.get(worker, worker) for worker in workers}

    def last_nonce(self, worker: str) -> int:
        """The number of the worker's last request."""
        with self._reading() as connection:
            return connection.execute(NONCE, {"of_id": worker}).scalar() or 0

    def track_record(self, worker: str) -> TrackRecord:
        with self._reading() as connection:
            return track_record_of(connection, worker)

    def workers(self) -> tuple[WorkerRecord, ...]:
        """With what they contributed, in the order in which they joined."""
        accepted = t.updates.c.refused.is_(None)
        contributed = (
            select(
                t.updates.c.worker,
                func.count().label("updates"),
                func.sum(t.updates.c.tokens).label("tokens"),
                func.sum(t.updates.c.num_bytes).label("update_bytes"),
            )
            .where(accepted)
            .group_by(t.updates.c.worker)
            .subquery()
        )
        measured = t.track_records.c
        query = select(
            *(column for column in t.workers.c if column.name != "nonce"),
            measured.steps_per_s.label("measured_steps_per_s"),
            func.coalesce(measured.owed, 0).label("owed"),
            func.coalesce(contributed.c.updates, 0).label("updates"),
            func.coalesce(contributed.c.tokens, 0).label("tokens"),
            func.coalesce(contributed.c.update_bytes, 0).label("update_bytes"),
        ).outerjoin(contributed, contributed.c.worker == t.workers.c.id)
        query = query.outerjoin(t.track_records, measured.worker == t.workers.c.id)
        with self._reading() as connection:
            rows = connection.execute(query.order_by(t.workers.c.first_seen_s, t.workers.c.id))
            whole = ("tokens", "update_bytes")  # PostgreSQL sums to decimals
            return tuple(WorkerRecord(**{**row._asdict(), **{x: int(getattr(row, x)) for x in whole}}) for row in rows)


def _hash(access_token: str) -> str:
    return hashlib.sha256(access_token.encode()).hexdigest()
