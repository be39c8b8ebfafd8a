"""Which version of the tables a database has. A new ledger gets the present tables and their revision; one of another
revision is refused, since reading it would fail later and unclearly. Changes nothing that is there.
A change of tables.py needs one more file in versions/, with `revision`, `down_revision` and `upgrade()`: a
test compares the two. Next: upgrading.py, which brings an older ledger up to date."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, String, Table, insert, inspect, select

from blocktrain.errors import ConfigError

MIGRATIONS = Path(__file__).parent
UNVERSIONED = "v0000"  # made before ledgers had revisions
_marks = MetaData()
_mark = Table("alembic_version", _marks, Column("version_num", String(32), primary_key=True))


def newest_revision() -> str:
    return max(path.stem for path in (MIGRATIONS / "versions").glob("v[0-9]*.py")).partition("_")[0]


def revision_of(connection: Connection) -> str | None:
    """None for a database without a ledger."""
    found = inspect(connection)
    if found.has_table(_mark.name):
        return connection.execute(select(_mark.c.version_num)).scalar()
    return UNVERSIONED if found.has_table("run") else None


def prepare(connection: Connection, tables: MetaData, where: str) -> None:
    """The tables are there afterwards, or this version of blocktrain cannot use the ledger."""
    found, newest = revision_of(connection), newest_revision()
    if found is None:
        tables.create_all(connection)
        _marks.create_all(connection)
        connection.execute(insert(_mark), {"version_num": newest})
    elif found != newest:
        require_not_newer(found, where)
        raise ConfigError(
            f"the ledger at {where} is of an older version of blocktrain (revision {found}, this one uses {newest}): "
            f"start blocktrain coordinator on it once, which makes a backup and upgrades it"
        )


def require_not_newer(found: str, where: str) -> None:
    newest = newest_revision()
    if found > newest:
        raise ConfigError(
            f"the ledger at {where} is of a newer version of blocktrain (revision {found}, this one knows {newest}): "
            f"install that version or a later one, or restore the backup that was made before the upgrade"
        )
