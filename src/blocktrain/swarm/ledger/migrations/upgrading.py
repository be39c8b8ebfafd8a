"""Brings a ledger of an older version up to date: a backup, then the missing migrations, in one transaction. Nothing of
it is kept if it fails or is killed, and two coordinators that start at once do it once.
Next: schema.py, which says what is missing; versions/, the steps."""

from __future__ import annotations

import os
import sqlite3
import time
import uuid
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, MetaData, Table, create_engine, insert, select, text

from blocktrain.errors import StorageError
from blocktrain.io.files import storage_errors, sync_file, sync_folder
from blocktrain.swarm.ledger.database import LOCK_TIMEOUT_S, Database
from blocktrain.swarm.ledger.migrations.schema import (
    MIGRATIONS,
    UNVERSIONED,
    newest_revision,
    require_not_newer,
    revision_of,
)

ROWS = 1000  # copied at once
LOCK = 7206543210  # any number: coordinators that upgrade one PostgreSQL ledger wait for each other


@dataclass(frozen=True)
class Upgrade:
    """What was done."""

    before: str
    after: str
    backup: Path | None

    def __str__(self) -> str:
        backup = f"; the backup is {self.backup}" if self.backup else ""
        return f"the ledger was upgraded from revision {self.before} to {self.after}{backup}"


def upgrade_ledger(url_or_path: str | Path, backups: Path | None) -> Upgrade | None:
    """None if there is nothing to do. Without a folder for backups none is made: for copies."""
    if isinstance(url_or_path, Path) and not url_or_path.exists():
        return None
    with closing(Database(url_or_path, None, LOCK_TIMEOUT_S)) as database:
        with database.reading() as connection:
            found = revision_of(connection)
        if found is None or found == newest_revision():
            return None
        require_not_newer(found, database.where)
        with database.migrating() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(text(f"SELECT pg_advisory_xact_lock({LOCK})"))
            found = revision_of(connection)
            if found is None or found == newest_revision():
                return None  # another coordinator has just done it
            backup = _backup(connection, found, backups) if backups else None
            migrate(connection)
            if connection.dialect.name == "sqlite" and connection.exec_driver_sql("PRAGMA foreign_key_check").first():
                raise StorageError(f"the ledger at {database.where} contradicts itself: run blocktrain verify")
    return Upgrade(found, newest_revision(), backup)


def migrate(connection: Connection, revision: str = "head") -> None:
    """The missing migrations, up to this one."""
    from alembic import command  # slow to import, and rarely needed
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _backup(connection: Connection, revision: str, folder: Path) -> Path:
    """A whole ledger in an SQLite file, as it is now, that only its owner may read. The old version opens it."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path, staged = folder / f"ledger-backup-{revision}-{stamp}.db", folder / f".backup-{uuid.uuid4().hex}"
    with storage_errors(path):
        try:
            os.close(os.open(staged, os.O_CREAT | os.O_EXCL, 0o600))
            if connection.dialect.name == "sqlite":
                _copy_file(connection.engine, staged)
            else:
                _copy_rows(connection, revision, staged)
            sync_file(staged)
            staged.rename(path)
            sync_folder(folder)
        finally:
            staged.unlink(missing_ok=True)
    return path


def _copy_file(source: Engine, target: Path) -> None:
    """What is committed, read beside the transaction that has begun."""
    with closing(sqlite3.connect(str(source.url.database))) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)
        new.execute("PRAGMA journal_mode = DELETE")  # one file, without a log beside it


def _copy_rows(source: Connection, revision: str, target: Path) -> None:
    engine = create_engine(f"sqlite:///{target}")
    with closing(_Disposed(engine)), engine.begin() as connection:
        migrate(connection, "v0001" if revision == UNVERSIONED else revision)
        copy_rows(source, connection)


def copy_rows(source: Connection, target: Connection) -> None:
    """All rows of all tables that both have, in an order that foreign keys allow."""
    old, new = MetaData(), MetaData()
    old.reflect(source)
    new.reflect(target)
    for table in new.sorted_tables:
        if table.name in old.tables and table.name != "alembic_version":
            _copy_table(source, old.tables[table.name], target, table)


def _copy_table(source: Connection, old: Table, target: Connection, new: Table) -> None:
    rows = source.execute(select(*(old.c[column.name] for column in new.c if column.name in old.c)))
    for some in rows.mappings().partitions(ROWS):
        target.execute(insert(new), [dict(row) for row in some])


class _Disposed:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def close(self) -> None:
        with suppress(Exception):
            self._engine.dispose()
