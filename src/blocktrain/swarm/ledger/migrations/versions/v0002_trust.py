"""Trust: who is excluded, what was rolled back, which updates were computed again, and what each weighed in its merge.
Frozen: what changes later is a migration of its own beside this one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0002"
down_revision = "v0001"

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _people_and_versions()
    _updates()


def _people_and_versions() -> None:
    op.create_table(
        "exclusions",
        sa.Column("number", NUMBER, autoincrement=True, nullable=False),
        sa.Column("worker", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.CheckConstraint("kind IN ('quarantined', 'banned', 'lifted')"),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["worker"],
            ["workers.id"],
        ),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_index("exclusions_by_worker", "exclusions", ["worker"], unique=False)
    op.create_table(
        "worker_tokens",
        sa.Column("worker", sa.String(length=128), nullable=False),
        sa.Column("token", NUMBER, nullable=False),
        sa.ForeignKeyConstraint(
            ["token"],
            ["tokens.number"],
        ),
        sa.ForeignKeyConstraint(
            ["worker"],
            ["workers.id"],
        ),
        sa.PrimaryKeyConstraint("worker"),
    )
    op.create_index("worker_tokens_by_token", "worker_tokens", ["token"], unique=False)
    op.create_table(
        "rollbacks",
        sa.Column("number", NUMBER, autoincrement=True, nullable=False),
        sa.Column("phase", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("block", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("source", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=128), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["block", "version"],
            ["versions.block", "versions.version"],
        ),
        sa.ForeignKeyConstraint(
            ["worker"],
            ["workers.id"],
        ),
        sa.PrimaryKeyConstraint("number"),
    )


def _updates() -> None:
    op.create_table(
        "audits",
        sa.Column("number", NUMBER, autoincrement=True, nullable=False),
        sa.Column("update", sa.String(length=64), nullable=False),
        sa.Column("worker", sa.String(length=128), nullable=False),
        sa.Column("opened_s", sa.Double(), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("closed_s", sa.Double(), nullable=True),
        sa.CheckConstraint("outcome IN ('passed', 'failed', 'undecided')"),
        sa.ForeignKeyConstraint(
            ["update"],
            ["updates.id"],
        ),
        sa.ForeignKeyConstraint(
            ["worker"],
            ["workers.id"],
        ),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("update"),
    )
    op.create_index("audits_by_worker", "audits", ["worker"], unique=False)
    op.create_table(
        "left_out",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at_s", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["number"],
            ["updates.number"],
        ),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_table(
        "merge_weights",
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("scale", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["number"],
            ["updates.number"],
        ),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_table(
        "audit_leases",
        sa.Column("id", sa.String(length=200), nullable=False),
        sa.Column("audit", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.String(length=128), nullable=False),
        sa.Column("granted_s", sa.Double(), nullable=False),
        sa.Column("deadline_s", sa.Double(), nullable=False),
        sa.Column("payload", sa.String(length=64), nullable=True),
        sa.Column("num_bytes", sa.BigInteger(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("distances", sa.JSON(), nullable=True),
        sa.Column("signature", sa.String(length=256), nullable=True),
        sa.ForeignKeyConstraint(
            ["audit"],
            ["audits.number"],
        ),
        sa.ForeignKeyConstraint(
            ["worker"],
            ["workers.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("audit", "worker"),
    )
