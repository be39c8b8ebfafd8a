"""The ledger's database, SQLite in a file or PostgreSQL by URL, and its transactions. It turns SQLAlchemy's exceptions
into ours. It knows no facts. Next: ledger.py, whose parts use it; tables.py, what is stored."""

from __future__ import annotations

import copy
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

from sqlalchemy import URL, Connection, CursorResult, Engine, MetaData, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.schema import CreateSchema

from blocktrain.errors import ConfigError, LedgerConflict, LedgerUnavailable, StorageError
from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.queries import OpenRounds
from blocktrain.swarm.ledger.schema import prepare

WAL_ATTEMPTS, WAL_PAUSE_S = 500, 0.01
LOCK_TIMEOUT_S = 30.0
SCHEMA = re.compile("[a-z_][a-z0-9_]{0,62}")
PAGE = 100

_FOR_WRITING, _UNSYNCED = "blocktrain_for_writing", "blocktrain_unsynced"
_SQLITE_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_EXTENDED = 0xFF  # the bits of an SQLite error code that name the error; the other bits are details

Given = ParamSpec("Given")
Result = TypeVar("Result")


class LedgerPart:
    """What the parts of the ledger share: one database, and transactions over several of their methods."""

    def __init__(self, url_or_path: str | Path, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self.database = Database(url_or_path, t.tables, lock_timeout_s)
        self._reading: Callable[..., AbstractContextManager[Connection]] = self.database.reading
        self._writing: Callable[..., AbstractContextManager[Connection]] = self.database.writing
        self._open = OpenRounds()
        self._noted = set[str]()  # workers that are known to have come with an access token: that never changes

    def close(self) -> None:
        self.database.close()

    @contextmanager
    def transaction(self, synced: bool = True) -> Iterator[Self]:
        """The same ledger, but all that is read and written through it is one transaction: safe when the `with` block
        is left (not `synced`: after a kill, but not after a power cut), and nothing of it is kept after an exception.
        Use no other ledger inside it: this transaction is the one writer."""
        with self._writing(synced) as connection:
            inside = self._within(connection)
            inside._writing = inside._reading
            yield inside

    @contextmanager
    def snapshot(self) -> Iterator[Self]:
        """The same ledger, but all that is read through it is of one moment."""
        with self._reading() as connection:
            yield self._within(connection)

    def _within(self, connection: Connection) -> Self:
        inside = copy.copy(self)
        inside._reading = lambda *_: nullcontext(connection)
        return inside


def retry_on_conflict(record: Callable[Given, Result]) -> Callable[Given, Result]:
    """For a transaction that looks whether a row is there before inserting it. Where another coordinator inserts it
    just then, the database refuses ours: the second try finds the row."""

    @wraps(record)
    def twice(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return record(*args, **kwargs)
        except LedgerConflict:
            return record(*args, **kwargs)

    return twice


def changed(result: CursorResult[Any]) -> int:
    return result.rowcount


class Database:
    """One database. Threads may share this object; processes and machines may share the database."""

    def __init__(self, url_or_path: str | Path, tables: MetaData | None, lock_timeout_s: float) -> None:
        """Without `tables` it is opened as it is, of whatever version."""
        url = _url(url_or_path)
        is_sqlite = url.get_backend_name() == "sqlite"
        url, self._schema = _without_schema(url)
        self.where = str(url.database) if is_sqlite else _shown(url, self._schema)
        self.engine = self._open(url, lock_timeout_s)
        self._writer = self.engine.execution_options(**{_FOR_WRITING: True})
        self._hasty_writer = self._writer.execution_options(**{_UNSYNCED: True})
        # All reads of one transaction see the same moment. SQLite promises it anyway.
        self._reader = self.engine if is_sqlite else self.engine.execution_options(isolation_level="REPEATABLE READ")
        # SQLite has one writer at a time, and polls while it is busy. A lock wakes our own threads sooner.
        self._turn = threading.Lock() if is_sqlite else nullcontext()
        self._thread = threading.local()
        try:
            if tables is not None:
                self._create(tables)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """One transaction: what is read in it is of one moment."""
        with self._border(), self._reader.begin() as connection:
            yield connection

    @contextmanager
    def writing(self, synced: bool = True) -> Iterator[Connection]:
        """One transaction: all of it is kept, and safe, when the block is left; none of it after an exception. Not
        `synced`, an SQLite file has it after a kill, but after a power cut only if something synced was written since:
        nothing is kept without what was written before it. A thread has one at a time."""
        assert not getattr(self._thread, "writes", False), "use the transaction that this thread is in"
        writer = self._writer if synced else self._hasty_writer
        with self._border(), self._turn, writer.begin() as connection:
            self._thread.writes = True
            try:
                yield connection
            finally:
                self._thread.writes = False

    @contextmanager
    def migrating(self) -> Iterator[Connection]:
        """One transaction in which tables may be replaced: SQLite looks at foreign keys only after it."""
        with self._border(), self._turn, self._writer.connect() as connection:
            if connection.dialect.name == "sqlite":
                driver: Any = connection.connection.driver_connection
                driver.execute("PRAGMA foreign_keys = OFF").close()
            with connection.begin():
                yield connection

    def close(self) -> None:
        self.engine.dispose()

    def _open(self, url: URL, lock_timeout_s: float) -> Engine:
        try:
            if url.get_backend_name() != "sqlite":
                return create_engine(url, pool_pre_ping=True, connect_args=_postgres_settings(self._schema))
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
        if self._schema is not None:
            with suppress(LedgerConflict), self.writing() as connection:
                connection.execute(CreateSchema(self._schema, if_not_exists=True))
        with suppress(LedgerConflict, StorageError), self.writing() as connection:
            prepare(connection, tables, self.where)
        with self.writing() as connection:  # finds what another process was creating at the same time
            prepare(connection, tables, self.where)

    @contextmanager
    def _border(self) -> Iterator[None]:
        """Raises SQLAlchemy's exceptions as ours, split by whether a retry can help."""
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
                    f"the ledger at {self.where} does not answer ({_sentence(error)}): check that it runs and that "
                    f"this user may use it, and try again"
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


def _without_schema(url: URL) -> tuple[URL, str | None]:
    """One PostgreSQL database holds several runs, each in a schema of its own: postgresql://host/name?schema=run_a."""
    schema = url.query.get("schema")
    if schema is None:
        return url, None
    if url.get_backend_name() == "sqlite" or not isinstance(schema, str) or not SCHEMA.fullmatch(schema):
        raise ConfigError(
            f'"{schema}" is not the name of a schema in PostgreSQL: give 1 to 63 lower-case letters, digits and _, '
            f"like postgresql://user@host/name?schema=run_a"
        )
    return url.difference_update_query(["schema"]), schema


def _shown(url: URL, schema: str | None) -> str:
    shown = url.render_as_string(hide_password=True)
    return shown if schema is None else f"{shown}{'&' if url.query else '?'}schema={schema}"


def _postgres_settings(schema: str | None) -> dict[str, Any]:
    """A server that is cut off is given up within seconds, and what it holds for a coordinator that is cut off is free
    again within a minute."""
    server = {"idle_in_transaction_session_timeout": "60s", "lock_timeout": f"{LOCK_TIMEOUT_S:g}s"}
    if schema is not None:
        server["search_path"] = schema
    return {
        "options": " ".join(f"-c {name}={value}" for name, value in server.items()),
        "connect_timeout": 10,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 20_000,
    }


def _set_up_sqlite(connection: Any, record: object) -> None:
    """With WAL, reads go on during a write. With FULL, a commit is synced: what is acknowledged is safe."""
    connection.isolation_level = None  # or the driver would begin transactions late, after the first read
    try:
        _use_wal(connection)
        for pragma in ("synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}").close()
    except sqlite3.Error:
        connection.close()
        raise


def _use_wal(connection: Any) -> None:
    """The first process that opens a new file changes it to WAL. For this change alone SQLite does not wait."""
    for attempts_left in reversed(range(WAL_ATTEMPTS)):
        try:
            connection.execute("PRAGMA journal_mode = WAL").close()
            return
        except sqlite3.OperationalError as error:
            if attempts_left == 0 or not _may_pass(error):
                raise
            time.sleep(WAL_PAUSE_S)


def _begin_sqlite(connection: Connection) -> None:
    """A writer takes the lock at once: after a first read it could no longer wait for another writer. Uses the driver's
    own call, since SQLAlchemy's costs as much as the rest of a small transaction."""
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
