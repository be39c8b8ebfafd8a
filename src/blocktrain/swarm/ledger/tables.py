"""The ledger's tables. Every table except `events` only grows. A table's comment says what may change in its rows.
Next: records.py, what is read from them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Insert,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    insert,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator


class Versions(TypeDecorator[dict[int, int]]):
    """{block: version}; JSON knows only strings as keys."""

    impl = JSON
    cache_ok = True

    def process_bind_param(self, value: Mapping[int, int] | None, dialect: Dialect) -> Any:
        return None if value is None else {str(block): version for block, version in value.items()}

    def process_result_value(self, value: Any, dialect: Dialect) -> dict[int, int] | None:
        return None if value is None else {int(block): version for block, version in value.items()}


def _number() -> Column[int]:
    """Counts the rows in the order of arrival. SQLite counts only in INTEGER."""
    return Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)


def _only(name: str, *columns: Any, where: Any) -> Index:
    """At most one row with these values among those where the condition holds."""
    return Index(name, *columns, unique=True, sqlite_where=where, postgresql_where=where)


def _sha256(name: str, nullable: bool = False, key: str | None = None) -> Column[str]:
    return Column(name, String(64), nullable=nullable, key=key or name)


def _seconds(name: str, nullable: bool = False, key: str | None = None) -> Column[float]:
    return Column(name, Double, nullable=nullable, key=key or name)


def _count(name: str, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


def columns(table: Table, *left_out: str) -> list[Any]:
    """All columns except these, under their names in the code. Existing ledgers keep the names of their columns: where
    the two differ, the column has a `key`."""
    return [column.label(column.key) for column in table.c if column.key not in left_out]


@cache
def insert_into(table: Table) -> Insert:
    """One object per table: a statement that is used again is compiled once."""
    return insert(table)


tables = MetaData()

run = Table(  # one row; `paused` changes
    "run",
    tables,
    Column("id", Integer, CheckConstraint("id = 1"), primary_key=True),
    Column("spec", Text, nullable=False),
    _sha256("spec_sha256", key="spec_digest"),
    _sha256("corpus_sha256"),
    Column("corpus", JSON, nullable=False),
    Column("protocol", Integer, nullable=False),
    Column("paused", Boolean, nullable=False),
    _seconds("created_s"),
)

coordinator_keys = Table(  # the public keys that have signed receipts
    "coordinator_keys",
    tables,
    Column("public_key", String(64), primary_key=True),
    _seconds("added_s"),
)

tokens = Table(  # `revoked_s` is set once
    "tokens",
    tables,
    _number(),
    Column("name", Text, nullable=False),
    Column("role", String(16), CheckConstraint("role IN ('admin', 'worker', 'viewer')"), nullable=False),
    Column("sha256", String(64), nullable=False, unique=True),
    _seconds("created_s"),
    _seconds("revoked_s", nullable=True),
)
_only("one_token_a_name", tokens.c.name, where=tokens.c.revoked_s.is_(None))

workers = Table(  # a row is what the worker last said of itself
    "workers",
    tables,
    Column("id", String(128), primary_key=True),
    Column("name", Text, nullable=False),
    Column("device", Text, nullable=False),
    _count("memory_bytes"),
    Column("steps_per_s", Double, nullable=False),
    _count("nonce"),  # of its last request: an older one is a replay
    _seconds("first_seen_s"),
    _seconds("last_seen_s"),
)

track_records = Table(  # a row is what the worker has delivered so far (policy/track_record.py)
    "track_records",
    tables,
    Column("worker", String(128), ForeignKey("workers.id"), primary_key=True),
    _count("delivered"),
    _count("owed"),
    Column("steps_per_s", Double),
)

versions = Table(
    "versions",
    tables,
    Column("block", Integer, primary_key=True, autoincrement=False),
    Column("version", Integer, primary_key=True, autoincrement=False),
    _sha256("sha256"),
    _sha256("momentum_sha256", nullable=True),
    _sha256("difference_sha256", nullable=True),
    Column("phase", Integer),
    Column("round", Integer),
    Column("parent", Integer),
    _seconds("created_s"),
    CheckConstraint("(version = 0 AND parent IS NULL) OR (version > 0 AND parent = version - 1)"),
    ForeignKeyConstraint(["phase", "round"], ["rounds.phase", "rounds.number"]),
    ForeignKeyConstraint(["block", "parent"], ["versions.block", "versions.version"]),
)

phases = Table(  # `step` grows, `finished` is set once
    "phases",
    tables,
    Column("phase", Integer, primary_key=True, autoincrement=False),
    _count("step"),
    Column("finished", Boolean, nullable=False),
)

rounds = Table(  # an open one may be extended; closing is once
    "rounds",
    tables,
    Column("phase", Integer, ForeignKey("phases.phase"), primary_key=True, autoincrement=False),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("base", Versions, nullable=False),
    _count("step_start"),
    _count("steps"),
    _seconds("opened_s"),
    _seconds("limit_s"),
    _seconds("deadline_s", key="deadline_at_s"),
    Column("extensions", Integer, nullable=False),
    _seconds("closed_s", nullable=True),
    Column("reason", Text, nullable=False),
    Column("mark", String(32), nullable=False),  # another whenever its leases or its updates change (open_rounds.py)
)
_only("one_open_round_a_phase", rounds.c.phase, where=rounds.c.closed_s.is_(None))

MARK = String(32).with_variant(String(32, collation="C"), "postgresql")  # compared byte by byte

leases = Table(  # may be renewed, and change their state; one with an accepted update has reported, whatever it says
    "leases",
    tables,
    Column("id", String(200), primary_key=True),
    Column("phase", Integer, nullable=False),
    Column("round", Integer, nullable=False),
    Column("shard", Integer, nullable=False),
    Column("worker", String(128), ForeignKey("workers.id"), nullable=False),
    _count("step_start"),
    _count("steps"),
    _seconds("granted_s"),
    _seconds("due_s"),
    _seconds("deadline_s", key="deadline_at_s"),
    Column("state", String(16), nullable=False),
    Column("mark", MARK),  # of the round, when it was given or renewed
    ForeignKeyConstraint(["phase", "round"], ["rounds.phase", "rounds.number"]),
    UniqueConstraint("phase", "round", "worker"),
    CheckConstraint("state IN ('open', 'reported', 'expired', 'released')"),  # no lease is released any more
)
Index("leases_by_mark", leases.c.mark)

updates = Table(  # `merged_phase` and `merged_round` are set once, `mark` again when it is left out
    "updates",
    tables,
    _number(),
    Column("id", String(64), nullable=False, unique=True),
    Column("lease", String(200), ForeignKey("leases.id"), nullable=False),
    Column("worker", String(128), ForeignKey("workers.id"), nullable=False),
    Column("phase", Integer, ForeignKey("phases.phase"), nullable=False),
    Column("base", Versions, nullable=False),
    _count("tokens"),
    _count("steps"),
    Column("codec", String(32), nullable=False),
    _count("num_bytes"),
    Column("norm", Double, nullable=False),
    Column("lag", Integer, nullable=False),
    Column("weight", Double, nullable=False),
    Column("loss", Double, nullable=False),
    _seconds("received_s"),
    Column("refused", Text),
    Column("signature", String(256), nullable=False),
    Column("merged_phase", Integer),
    Column("merged_round", Integer),
    Column("mark", MARK),  # of the open round, since this update is part of it
    ForeignKeyConstraint(["merged_phase", "merged_round"], ["rounds.phase", "rounds.number"]),
    CheckConstraint("refused IS NULL OR merged_round IS NULL"),
)
_only("one_update_a_lease", updates.c.lease, where=updates.c.refused.is_(None))
Index("updates_by_phase", updates.c.phase, updates.c.merged_round)
Index("updates_by_worker", updates.c.worker)
Index("updates_by_mark", updates.c.mark)

merge_weights = Table(  # what each merged update weighed; a weight of 0 says that it was left out, and why
    "merge_weights",
    tables,
    Column("number", BigInteger, ForeignKey("updates.number"), primary_key=True, autoincrement=False),
    Column("weight", Double, nullable=False),
    Column("scale", Double, nullable=False),
    Column("reason", Text, nullable=False),
)

left_out = Table(  # accepted updates that will not be merged, and why
    "left_out",
    tables,
    Column("number", BigInteger, ForeignKey("updates.number"), primary_key=True, autoincrement=False),
    Column("reason", Text, nullable=False),
    _seconds("at_s"),
)

audits = Table(  # updates that other workers compute again; `outcome` and `closed_s` are set once
    "audits",
    tables,
    _number(),
    Column("update", String(64), ForeignKey("updates.id"), nullable=False, unique=True),
    Column("worker", String(128), ForeignKey("workers.id"), nullable=False),
    _seconds("opened_s"),
    Column("outcome", String(16)),
    _seconds("closed_s", nullable=True),
    CheckConstraint("outcome IN ('passed', 'failed', 'undecided')"),
)
Index("audits_by_worker", audits.c.worker)

audit_leases = Table(  # what a worker reports is set once
    "audit_leases",
    tables,
    Column("id", String(200), primary_key=True),
    Column("audit", BigInteger, ForeignKey("audits.number"), nullable=False),
    Column("worker", String(128), ForeignKey("workers.id"), nullable=False),
    _seconds("granted_s"),
    _seconds("deadline_s", key="deadline_at_s"),
    _sha256("payload", nullable=True),
    _count("num_bytes", nullable=True),
    Column("loss", Double),
    Column("distances", JSON),
    Column("signature", String(256)),
    UniqueConstraint("audit", "worker"),
)

vettings = Table(  # updates of a round that workers score before it is merged; `verdict` and `closed_s` are set once
    "vettings",
    tables,
    _number(),
    Column("phase", Integer, nullable=False),
    Column("round", Integer, nullable=False),
    Column("updates", JSON, nullable=False),  # their ids, in the order of the scores
    Column("chosen", JSON, nullable=False),  # the workers that were drawn
    _count("draw"),
    _seconds("opened_s"),
    _seconds("deadline_s", key="deadline_at_s"),
    Column("verdict", JSON),
    _seconds("closed_s", nullable=True),
    ForeignKeyConstraint(["phase", "round"], ["rounds.phase", "rounds.number"]),
)
Index("vettings_by_round", vettings.c.phase, vettings.c.round)

vet_seats = Table(  # what a worker reports is set once; `contradicted` when the vetting closes
    "vet_seats",
    tables,
    Column("id", String(200), primary_key=True),
    Column("vetting", BigInteger, ForeignKey("vettings.number"), nullable=False),
    Column("worker", String(128), ForeignKey("workers.id"), nullable=False),
    _seconds("granted_s"),
    Column("losses", JSON),
    Column("signature", String(256)),
    Column("contradicted", Boolean, nullable=False),
    UniqueConstraint("vetting", "worker"),
)

exclusions = Table(  # the newest row of a worker counts
    "exclusions",
    tables,
    _number(),
    Column("worker", String(128), ForeignKey("workers.id"), nullable=False),
    Column("kind", String(16), CheckConstraint("kind IN ('quarantined', 'banned', 'lifted')"), nullable=False),
    Column("reason", Text, nullable=False),
    _seconds("at_s"),
)
Index("exclusions_by_worker", exclusions.c.worker)

rollbacks = Table(  # versions that an admin made; with a worker: `source` merged again without it
    "rollbacks",
    tables,
    _number(),
    Column("phase", Integer, nullable=False),
    Column("round", Integer, nullable=False),  # the first one after it
    Column("block", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("source", Integer, nullable=False),
    Column("worker", String(128), ForeignKey("workers.id")),
    Column("reason", Text, nullable=False),
    _seconds("at_s"),
    ForeignKeyConstraint(["block", "version"], ["versions.block", "versions.version"]),
)

worker_tokens = Table(  # the access token with which a worker's key first came
    "worker_tokens",
    tables,
    Column("worker", String(128), ForeignKey("workers.id"), primary_key=True),
    Column("token", BigInteger().with_variant(Integer, "sqlite"), ForeignKey("tokens.number"), nullable=False),
)
Index("worker_tokens_by_token", worker_tokens.c.token)

chain = Table(  # of the acknowledged updates (chain.py)
    "chain",
    tables,
    Column("number", BigInteger, ForeignKey("updates.number"), primary_key=True, autoincrement=False),
    Column("previous", String(64), nullable=False, unique=True),  # two coordinators never continue it at once
    _sha256("sha256"),
)

evaluation_leases = Table(
    "evaluation_leases",
    tables,
    _number(),
    Column("worker", String(128), ForeignKey("workers.id"), nullable=False),
    Column("versions", Versions, nullable=False),
    _seconds("granted_s"),
    _seconds("deadline_s", key="deadline_at_s"),
)

evaluations = Table(
    "evaluations",
    tables,
    _number(),
    Column("lease", BigInteger, ForeignKey("evaluation_leases.number"), nullable=False),
    Column("split", String(32), nullable=False),
    Column("scores", JSON, nullable=False),
    Column("combine", JSON, nullable=False),
    _seconds("at_s"),
    UniqueConstraint("lease", "split"),
)

events = Table(  # the oldest are pruned
    "events",
    tables,
    _number(),
    _seconds("at_s"),
    Column("kind", String(64), nullable=False),
    Column("text", Text, nullable=False),
    Column("data", JSON, nullable=False),
)
