"""Vetting: which updates were scored on held-out text before their merge, by whom, and what was found.
Frozen: what changes later is a migration of its own beside this one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0003"
down_revision = "v0002"

NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "vettings",
        sa.Column("number", NUMBER, autoincrement=True, nullable=False),
        sa.Column("phase", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("updates", sa.JSON(), nullable=False),
        sa.Column("chosen", sa.JSON(), nullable=False),
        sa.Column("draw", sa.BigInteger(), nullable=False),
        sa.Column("opened_s", sa.Double(), nullable=False),
        sa.Column("deadline_s", sa.Double(), nullable=False),
        sa.Column("verdict", sa.JSON(), nullable=True),
        sa.Column("closed_s", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["phase", "round"],
            ["rounds.phase", "rounds.number"],
        ),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_index("vettings_by_round", "vettings", ["phase", "round"], unique=False)
    op.create_table(
        "vet_seats",
        sa.Column("id", sa.String(length=200), nullable=False),
        sa.Column("vetting", sa.BigInteger(), nullable=False),
        sa.Column("worker", sa.String(length=128), nullable=False),
        sa.Column("granted_s", sa.Double(), nullable=False),
        sa.Column("losses", sa.JSON(), nullable=True),
        sa.Column("signature", sa.String(length=256), nullable=True),
        sa.Column("contradicted", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["vetting"],
            ["vettings.number"],
        ),
        sa.ForeignKeyConstraint(
            ["worker"],
            ["workers.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("vetting", "worker"),
    )
