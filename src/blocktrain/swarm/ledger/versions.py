"""The versions of blocks: which there are, and which blobs may not be deleted. A merge adds them (rounds.py). A part of
the ledger. Next: rounds.py; tables.py."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import bindparam, or_, select

from blocktrain.errors import LedgerConflict
from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.database import PAGE, LedgerPart, retry_on_conflict
from blocktrain.swarm.ledger.queries import (
    WAITING,
    audited_blobs,
    evaluation_lease_of,
    newest_evaluations,
    newest_versions,
    phases_of,
    run_of,
)
from blocktrain.swarm.ledger.records import ModelVersions, Version

VERSION = select(t.versions).where(
    t.versions.c.block == bindparam("of_block"), t.versions.c.version == bindparam("of_version")
)
FIRST_VERSIONS = select(t.versions).where(t.versions.c.version == 0)
BLOBS = select(t.versions.c.block, t.versions.c.version, t.versions.c.sha256, t.versions.c.difference_sha256)
WAITING_BASES = select(t.updates.c.id, t.updates.c.base).where(WAITING)
BASE = select(t.rounds.c.base).where(
    t.rounds.c.phase == bindparam("of_phase"), t.rounds.c.number == bindparam("of_number")
)
NEWEST_AT = select(t.versions).where(t.versions.c.created_s <= bindparam("at_s")).order_by(t.versions.c.version)


class VersionsPart(LedgerPart):
    @retry_on_conflict
    def add_initial_blocks(self, blobs: Mapping[int, str], now_s: float) -> None:
        """Records version 0 of these blocks. A repeat changes nothing; other bytes are a conflict."""
        with self._writing() as connection:
            there = {x.block: x.sha256 for x in connection.execute(FIRST_VERSIONS)}
            for block, sha256 in blobs.items():
                if block not in there:
                    row = {"block": block, "version": 0, "sha256": sha256, "created_s": now_s}
                    connection.execute(t.insert_into(t.versions), row)
                elif there[block] != sha256:
                    raise LedgerConflict(
                        f"block {block} began as {there[block][:12]}… in this ledger and {sha256[:12]}… was given: "
                        f"use the ledger's, or another ledger"
                    )

    def version(self, block: int, version: int) -> Version | None:
        with self._reading() as connection:
            row = connection.execute(VERSION, {"of_block": block, "of_version": version}).one_or_none()
            return Version(**row._asdict()) if row else None

    def versions(self, block: int, limit: int = PAGE) -> tuple[Version, ...]:
        """The newest `limit`, in order."""
        query = select(t.versions).where(t.versions.c.block == block).order_by(t.versions.c.version.desc())
        with self._reading() as connection:
            return tuple(Version(**row._asdict()) for row in reversed(connection.execute(query.limit(limit)).all()))

    def all_versions(self) -> tuple[Version, ...]:
        """In the order in which they were made."""
        order = (t.versions.c.version, t.versions.c.block)
        with self._reading() as connection:
            return tuple(Version(**row._asdict()) for row in connection.execute(select(t.versions).order_by(*order)))

    def versions_with(self, sha256: str) -> tuple[Version, ...]:
        """Those that this blob is a part of."""
        parts = (t.versions.c.sha256, t.versions.c.momentum_sha256, t.versions.c.difference_sha256)
        query = select(t.versions).where(or_(*(part == sha256 for part in parts)))
        with self._reading() as connection:
            return tuple(Version(**row._asdict()) for row in connection.execute(query))

    def base_of(self, phase: int, round: int) -> dict[int, int]:
        """Block: the version that the leases of this round started from."""
        with self._reading() as connection:
            return dict(connection.execute(BASE, {"of_phase": phase, "of_number": round}).scalar() or {})

    def newest(self) -> dict[int, Version]:
        """The newest version of each block."""
        with self._reading() as connection:
            return newest_versions(connection)

    def newest_at(self, at_s: float) -> dict[int, Version]:
        """The newest version of each block at that moment."""
        with self._reading() as connection:
            return {row.block: Version(**row._asdict()) for row in connection.execute(NEWEST_AT, {"at_s": at_s})}

    def consistent_manifest(self) -> ModelVersions:
        with self._reading() as connection:
            return ModelVersions(newest_versions(connection), phases_of(connection), newest_evaluations(connection))

    def live_blobs(self, keep_versions: int) -> set[str]:
        """What may not be pruned: the newest versions of every block and the momentum of the last, the versions being
        evaluated, updates that wait to be merged, the versions they were built on and those before, the results of open
        audits, the corpus."""
        with self._reading() as connection:
            newest, run = newest_versions(connection), run_of(connection)
            kept = {(block, x.version - back) for block, x in newest.items() for back in range(keep_versions)}
            lease = evaluation_lease_of(connection)
            for held in (lease, *newest_evaluations(connection, limit=1)):
                kept |= set(held.versions.items()) if held else set()
            rows = connection.execute(BLOBS).all()
            waiting = connection.execute(WAITING_BASES).all()
            audited = audited_blobs(connection)
            kept |= {(block, version - n) for row in waiting for block, version in row.base.items() for n in (0, 1)}
        blobs = {blob for *key, tensors, difference in rows if tuple(key) in kept for blob in (tensors, difference)}
        blobs |= (
            {x.momentum_sha256 for x in newest.values()}
            | {row.id for row in waiting}
            | audited
            | set(run.corpus.values() if run else ())
        )
        return blobs - {None}
