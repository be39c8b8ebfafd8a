"""The first tables. A ledger from before migrations may have some of them already, or all. Frozen: what changes later
is a migration of its own beside this one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0001"
down_revision = None

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _run_and_people()
    _rounds_and_leases()
    _updates()
    _versions_and_reports()


def _run_and_people() -> None:
    op.create_table(
        "coordinator_keys",
        sa.Column("public_key", sa.String(length=64), nullable=False),
        sa.Column("added_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("public_key"),
        if_not_exists=True,
    )
    op.create_table(
        "events",
        sa.Column("number", NUMBER, autoincrement=True, nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(length=64), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        if_not_exists=True,
    )
    op.create_table(
        "run",
        sa.Column("id", sa.Integer(), sa.CheckConstraint("id = 1"), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("spec_sha256", sa.String(length=64), nullable=False),
        sa.Column("corpus_sha256", sa.String(length=64), nullable=False),
        sa.Column("corpus", sa.JSON(), nullable=False),
        sa.Column("protocol", sa.Integer(), nullable=False),
        sa.Column("paused", sa.Boolean(), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        if_not_exists=True,
    )
    op.create_table(
        "tokens",
        sa.Column("number", NUMBER, autoincrement=True, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column(
            "role", sa.String(length=16), sa.CheckConstraint("role IN ('admin', 'worker', 'viewer')"), nullable=False
        ),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("revoked_s", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("sha256"),
        if_not_exists=True,
    )
    op.create_index(
        "one_token_a_name",
        "tokens",
        ["name"],
        unique=True,
        sqlite_where=sa.text("revoked_s IS NULL"),
        postgresql_where=sa.text("revoked_s IS NULL"),
        if_not_exists=True,
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("steps_per_s", sa.Double(), nullable=False),
        sa.Column("nonce", sa.BigInteger(), nullable=False),
        sa.Column("first_seen_s", sa.Double(), nullable=False),
        sa.Column("last_seen_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        if_not_exists=True,
    )


def _rounds_and_leases() -> None:
    op.create_table(
        "phases",
        sa.Column("phase", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("finished", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("phase"),
        if_not_exists=True,
    )
    op.create_table(
        "rounds",
        sa.Column("phase", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("base", sa.JSON(), nullable=False),
        sa.Column("step_start", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("opened_s", sa.Double(), nullable=False),
        sa.Column("limit_s", sa.Double(), nullable=False),
        sa.Column("deadline_s", sa.Double(), nullable=False),
        sa.Column("extensions", sa.Integer(), nullable=False),
        sa.Column("closed_s", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("mark", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(
            ["phase"],
            ["phases.phase"],
        ),
        sa.PrimaryKeyConstraint("phase", "number"),
        if_not_exists=True,
    )
    op.create_index(
        "one_open_round_a_phase",
        "rounds",
        ["phase"],
        unique=True,
        sqlite_where=sa.text("closed_s IS NULL"),
        postgresql_where=sa.text("closed_s IS NULL"),
        if_not_exists=True,
    )
    op.create_table(
        "leases",
        sa.Column("id", sa.String(length=200), nullable=False),
        sa.Column("phase", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("shard", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=128), nullable=False),
        sa.Column("step_start", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("granted_s", sa.Double(), nullable=False),
        sa.Column("due_s", sa.Double(), nullable=False),
        sa.Column("deadline_s", sa.Double(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.CheckConstraint("state IN ('open', 'reported', 'expired', 'released')"),
        sa.ForeignKeyConstraint(
            ["phase", "round"],
            ["rounds.phase", "rounds.number"],
        ),
        sa.ForeignKeyConstraint(
            ["worker"],
            ["workers.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("phase", "round", "worker"),
        if_not_exists=True,
    )


def _updates() -> None:
    op.create_table(
        "updates",
        sa.Column("number", NUMBER, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("lease", sa.String(length=200), nullable=False),
        sa.Column("worker", sa.String(length=128), nullable=False),
        sa.Column("phase", sa.Integer(), nullable=False),
        sa.Column("base", sa.JSON(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("codec", sa.String(length=32), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("norm", sa.Double(), nullable=False),
        sa.Column("lag", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=False),
        sa.Column("received_s", sa.Double(), nullable=False),
        sa.Column("refused", sa.Text(), nullable=True),
        sa.Column("signature", sa.String(length=256), nullable=False),
        sa.Column("merged_phase", sa.Integer(), nullable=True),
        sa.Column("merged_round", sa.Integer(), nullable=True),
        sa.CheckConstraint("refused IS NULL OR merged_round IS NULL"),
        sa.ForeignKeyConstraint(
            ["lease"],
            ["leases.id"],
        ),
        sa.ForeignKeyConstraint(
            ["merged_phase", "merged_round"],
            ["rounds.phase", "rounds.number"],
        ),
        sa.ForeignKeyConstraint(
            ["phase"],
            ["phases.phase"],
        ),
        sa.ForeignKeyConstraint(
            ["worker"],
            ["workers.id"],
        ),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("id"),
        if_not_exists=True,
    )
    op.create_index(
        "one_update_a_lease",
        "updates",
        ["lease"],
        unique=True,
        sqlite_where=sa.text("refused IS NULL"),
        postgresql_where=sa.text("refused IS NULL"),
        if_not_exists=True,
    )
    op.create_index("updates_by_phase", "updates", ["phase", "merged_round"], unique=False, if_not_exists=True)
    op.create_index("updates_by_worker", "updates", ["worker"], unique=False, if_not_exists=True)
    op.create_table(
        "chain",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("previous", sa.String(length=64), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["number"],
            ["updates.number"],
        ),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("previous"),
        if_not_exists=True,
    )


def _versions_and_reports() -> None:
    op.create_table(
        "track_records",
        sa.Column("worker", sa.String(length=128), nullable=False),
        sa.Column("delivered", sa.BigInteger(), nullable=False),
        sa.Column("owed", sa.BigInteger(), nullable=False),
        sa.Column("steps_per_s", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["worker"],
            ["workers.id"],
        ),
        sa.PrimaryKeyConstraint("worker"),
        if_not_exists=True,
    )
    op.create_table(
        "versions",
        sa.Column("block", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("momentum_sha256", sa.String(length=64), nullable=True),
        sa.Column("difference_sha256", sa.String(length=64), nullable=True),
        sa.Column("phase", sa.Integer(), nullable=True),
        sa.Column("round", sa.Integer(), nullable=True),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.CheckConstraint("(version = 0 AND parent IS NULL) OR (version > 0 AND parent = version - 1)"),
        sa.ForeignKeyConstraint(
            ["block", "parent"],
            ["versions.block", "versions.version"],
        ),
        sa.ForeignKeyConstraint(
            ["phase", "round"],
            ["rounds.phase", "rounds.number"],
        ),
        sa.PrimaryKeyConstraint("block", "version"),
        if_not_exists=True,
    )
    op.create_table(
        "evaluation_leases",
        sa.Column("number", NUMBER, autoincrement=True, nullable=False),
        sa.Column("worker", sa.String(length=128), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("granted_s", sa.Double(), nullable=False),
        sa.Column("deadline_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["worker"],
            ["workers.id"],
        ),
        sa.PrimaryKeyConstraint("number"),
        if_not_exists=True,
    )
    op.create_table(
        "evaluations",
        sa.Column("number", NUMBER, autoincrement=True, nullable=False),
        sa.Column("lease", sa.BigInteger(), nullable=False),
        sa.Column("split", sa.String(length=32), nullable=False),
        sa.Column("scores", sa.JSON(), nullable=False),
        sa.Column("combine", sa.JSON(), nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["lease"],
            ["evaluation_leases.number"],
        ),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("lease", "split"),
        if_not_exists=True,
    )
