"""A database as the ledger uses it: SQLite in a file, or PostgreSQL by URL; reading and writing transactions; its
complaints as ours. Knows none of the facts. Next: ledger_tables.py, what is kept; ledger.py, which keeps it."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, MetaData, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from blocktrain.errors import ConfigError, LedgerConflict, LedgerUnavailable, StorageError

WAL_ATTEMPTS, WAL_PAUSE_S = 500, 0.01

_FOR_WRITING, _UNSYNCED = "blocktrain_for_writing", "blocktrain_unsynced"
_SQLITE_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_EXTENDED = 0xFF  # of an SQLite error code, the bits that say which error; the rest say where


class _Transactions(threading.local):
    """Those that a thread is in."""

    reads: Connection | None = None
    writes: Connection | None = None


class Database:
    """One database. Threads may share it; so may processes and machines, with a `Database` each."""

    def __init__(self, url_or_path: str | Path, tables: MetaData, lock_timeout_s: float) -> None:
        url = _url(url_or_path)
        is_sqlite = url.get_backend_name() == "sqlite"
        self.where = str(url.database) if is_sqlite else url.render_as_string(hide_password=True)
        self.engine = self._open(url, lock_timeout_s)
        self._writer = self.engine.execution_options(**{_FOR_WRITING: True})
        self._hasty_writer = self._writer.execution_options(**{_UNSYNCED: True})
        # What is read in one transaction must fit together; SQLite's transactions promise it anyway.
        self._reader = self.engine if is_sqlite else self.engine.execution_options(isolation_level="REPEATABLE READ")
        # SQLite has one writer at a time, and who finds it busy sleeps: a lock wakes our own threads sooner.
        self._turn = threading.Lock() if is_sqlite else nullcontext()
        self._own = _Transactions()
        try:
            self._create(tables)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One transaction; what the same thread reads inside is of the same moment."""
        if (around := self._own.writes or self._own.reads) is not None:
            yield around
            return
        with self._border(), self._reader.begin() as connection:
            self._own.reads = connection
            try:
                yield connection
            finally:
                self._own.reads = None

    @contextmanager
    def writing(self, synced: bool = True) -> Iterator[Connection]:
        """One transaction: all of it is kept, and safe, when the block is left; none of it after an exception. What the
        same thread reads and writes inside is a part of it. Not `synced`, an SQLite file has it after a kill, but after
        a power cut only if something synced was written since: nothing is kept without what was written before it."""
        if (around := self._own.writes) is not None:
            yield around
            return
        writer = self._writer if synced else self._hasty_writer
        with self._border(), self._turn, writer.begin() as connection:
            self._own.writes = connection
            try:
                yield connection
            finally:
                self._own.writes = None

    def close(self) -> None:
        self.engine.dispose()

    def _open(self, url: URL, lock_timeout_s: float) -> Engine:
        try:
            if url.get_backend_name() != "sqlite":
                return create_engine(url, pool_pre_ping=True)
            engine = create_engine(url, connect_args={"timeout": lock_timeout_s})
        except (SQLAlchemyError, ImportError) as error:
            raise ConfigError(
                f"{self.where} cannot hold a ledger ({error}): give a file's path, or a URL like "
                f"postgresql://user@host/name with its driver installed (pip install 'blocktrain[postgres]')"
            ) from None
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine

    def _create(self, tables: MetaData) -> None:
        with suppress(LedgerConflict, StorageError), self.writing() as connection:
            tables.create_all(connection)
        with self.writing() as connection:  # finds what another process was creating at the same time
            tables.create_all(connection)

    @contextmanager
    def _border(self) -> Iterator[None]:
        """SQLAlchemy's exceptions as ours, split by whether trying again can help."""
        try:
            yield
        except (IntegrityError, DataError) as error:
            raise LedgerConflict(
                f"the ledger at {self.where} refused a contradiction ({_sentence(error)}): "
                f"fetch the present state and decide again"
            ) from error
        except (SQLAlchemyError, sqlite3.Error) as error:
            if _may_pass(error):
                raise LedgerUnavailable(
                    f"the ledger at {self.where} does not answer ({_sentence(error)}): try again"
                ) from error
            raise StorageError(
                f"the ledger at {self.where} cannot be used ({_sentence(error)}): make it readable and writable, give "
                f"its disk space, or restore it"
            ) from error


def _url(url_or_path: str | Path) -> URL:
    text = str(url_or_path)
    if isinstance(url_or_path, Path) or "://" not in text:
        return URL.create("sqlite", database=text)
    try:
        return make_url(text)
    except ArgumentError as error:
        raise ConfigError(
            f"{text} is not a database's URL ({error}): give a file's path, or one like postgresql://user@host/name"
        ) from None


def _set_up_sqlite(connection: Any, record: object) -> None:
    """WAL lets readers read while one writes; FULL syncs a commit, so that what is acknowledged is safe."""
    connection.isolation_level = None  # else the driver begins transactions late, and reads between
    try:
        _use_wal(connection)
        for pragma in ("synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}").close()
    except sqlite3.Error:
        connection.close()
        raise


def _use_wal(connection: Any) -> None:
    """The first to open a new file changes it to WAL; for this alone SQLite does not wait while others open it too."""
    for attempts_left in reversed(range(WAL_ATTEMPTS)):
        try:
            connection.execute("PRAGMA journal_mode = WAL").close()
            return
        except sqlite3.OperationalError as error:
            if attempts_left == 0 or not _may_pass(error):
                raise
            time.sleep(WAL_PAUSE_S)


def _begin_sqlite(connection: Connection) -> None:
    """A writer takes its turn at once: one that has read before it writes could not wait for another. All by the
    driver's own call: SQLAlchemy's costs as much as the rest of a small transaction."""
    options, cursor = connection.get_execution_options(), connection.connection.cursor()
    if not options.get(_FOR_WRITING):
        cursor.execute("BEGIN")
        return
    cursor.execute(f"PRAGMA synchronous = {'NORMAL' if options.get(_UNSYNCED) else 'FULL'}")
    cursor.execute("BEGIN IMMEDIATE")


def _may_pass(error: Exception) -> bool:
    origin = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(origin, sqlite3.Error):
        return getattr(origin, "sqlite_errorcode", 0) & _EXTENDED in _SQLITE_BUSY
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(error, OperationalError | PoolTimeout)


def _sentence(error: Exception) -> str:
    origin = getattr(error, "orig", None) or error
    return str(origin).partition("\n")[0].rstrip(".")
