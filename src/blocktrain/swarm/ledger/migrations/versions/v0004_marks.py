"""Marks: what changed in an open round since it was last read.
Frozen: what changes later is a migration of its own beside this one."""

from __future__ import annotations

import secrets

import sqlalchemy as sa
from alembic import op

revision = "v0004"
down_revision = "v0003"

MARK = sa.String(length=32).with_variant(sa.String(length=32, collation="C"), "postgresql")


def upgrade() -> None:
    for name in ("leases", "updates"):
        op.add_column(name, sa.Column("mark", MARK, nullable=True))
        op.create_index(f"{name}_by_mark", name, ["mark"], unique=False)
    rounds = sa.table("rounds", *map(sa.column, ("phase", "number", "closed_s", "mark")))
    connection = op.get_bind()
    for phase, number in connection.execute(
        sa.select(rounds.c.phase, rounds.c.number).where(rounds.c.closed_s.is_(None))
    ).all():  # marks had no order before
        this = sa.and_(rounds.c.phase == phase, rounds.c.number == number)
        connection.execute(
            sa.update(rounds).where(this).values(mark=f"{phase:04x}{number:08x}{0:08x}{secrets.token_hex(6)}")
        )
