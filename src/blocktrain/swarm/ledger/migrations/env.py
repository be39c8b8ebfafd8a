"""What Alembic runs: the migrations in versions/, one after the other, in the transaction of upgrading.py.
Next: upgrading.py."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
