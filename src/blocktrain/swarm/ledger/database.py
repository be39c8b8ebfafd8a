"""The ledger's database, SQLite in a file or PostgreSQL by URL, and its transactions. It turns SQLAlchemy's exceptions
into ours. It knows no facts. Next: ledger.py, whose parts use it; tables.py, what is stored."""

from __future__ import annotations

import copy
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar, cast

from sqlalchemy import URL, Engine, MetaData, create_engine, event, make_url
from sqlalchemy import Connection as SqlConnection
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.schema import CreateSchema

from blocktrain.errors import BlockTrainError, ConfigError, LedgerConflict, LedgerUnavailable, StorageError
from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.drivers.connection import Connection, Rows
from blocktrain.swarm.ledger.drivers.postgres import open_engine
from blocktrain.swarm.ledger.drivers.sqlite import SqliteFile, is_busy, set_up
from blocktrain.swarm.ledger.migrations.schema import prepare
from blocktrain.swarm.ledger.open_rounds import OpenRounds

LOCK_TIMEOUT_S = 30.0
SCHEMA = re.compile("[a-z_][a-z0-9_]{0,62}")
PAGE = 100

_FOR_WRITING = "blocktrain_for_writing"

Given = ParamSpec("Given")
Result = TypeVar("Result")


class LedgerPart:
    """What the parts of the ledger share: one database, and transactions over several of their methods."""

    def __init__(self, url_or_path: str | Path, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self._use(Database(url_or_path, t.tables, lock_timeout_s))

    def _use(self, database: Database) -> None:
        self.database = database
        self._reading: Callable[..., AbstractContextManager[Connection]] = self.database.quick_reading
        self._writing: Callable[..., AbstractContextManager[Connection]] = self.database.quick_writing
        self._open = OpenRounds()
        self._noted = set[str]()  # workers that are known to have come with an access token: that never changes
        self._seen = set[str]()  # workers that are known to have a row: that never changes

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


def changed(result: Rows) -> int:
    return result.rowcount


class Database:
    """One database. Threads may share this object; processes and machines may share the database."""

    def __init__(self, url_or_path: str | Path, tables: MetaData | None, lock_timeout_s: float) -> None:
        """Without `tables` it is opened as it is, of whatever version."""
        url = _url(url_or_path)
        self.is_sqlite = is_sqlite = url.get_backend_name() == "sqlite"
        self._url, self._schema = _without_schema(url)
        self._lock_timeout_s = lock_timeout_s
        self.where = str(url.database) if is_sqlite else _shown(self._url, self._schema)
        self.file = SqliteFile(str(url.database), lock_timeout_s, self._as_ours)
        try:
            if tables is not None:
                self._create(tables)
        except BaseException:
            self.close()
            raise

    # What the ledger's parts use

    def quick_reading(self, single: bool = False) -> AbstractContextManager[Connection]:
        """One transaction: what is read in it is of one moment. A `single` statement is one by itself: for it,
        PostgreSQL is asked once, and not to begin and to end a transaction too."""
        return self.file.transaction(for_writing=False) if self.is_sqlite else cast("Any", self.reading(single))

    def quick_writing(self, synced: bool = True) -> AbstractContextManager[Connection]:
        """One transaction: all of it is kept, and safe, when the block is left; none of it after an exception. Not
        `synced`, an SQLite file has it after a kill, but after a power cut only if something synced was written since:
        nothing is kept without what was written before it. A thread has one at a time."""
        return self.file.transaction(True, synced) if self.is_sqlite else cast("Any", self.writing())

    def watch(
        self,
        statement: Callable[[str], None] = lambda sql: None,
        commit: Callable[[bool, bool], None] = lambda for_writing, synced: None,
    ) -> None:
        """For tests and measurements: `statement` is called after each one, `commit` before a transaction is kept, with
        whether it may have written and whether it is synced."""
        if self.is_sqlite:
            self.file.heard_statements.append(statement)
            self.file.heard_commits.append(commit)
        else:
            event.listen(self.engine, "after_cursor_execute", lambda *facts: statement(facts[2]))
            event.listen(
                self.engine, "commit", lambda x: commit(x.get_execution_options().get(_FOR_WRITING, False), True)
            )

    # With all that SQLAlchemy can

    @cached_property
    def engine(self) -> Engine:
        return self._open(self._url, self._lock_timeout_s)

    @contextmanager
    def reading(self, single: bool = False) -> Iterator[SqlConnection]:
        # All reads of one transaction see the same moment. SQLite promises it anyway.
        level = {} if self.is_sqlite else {"isolation_level": "AUTOCOMMIT" if single else "REPEATABLE READ"}
        with self._border(), self.engine.execution_options(**level).begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[SqlConnection]:
        with self._border(), self.file.turn(), self._writer.begin() as connection:
            yield connection

    @property
    def _writer(self) -> Engine:
        return self.engine.execution_options(**{_FOR_WRITING: True})

    @contextmanager
    def migrating(self) -> Iterator[SqlConnection]:
        """One transaction in which tables may be replaced: SQLite looks at foreign keys only after it."""
        with self._border(), self.file.turn(), self._writer.connect() as connection:
            if self.is_sqlite:
                driver: Any = connection.connection.driver_connection
                driver.execute("PRAGMA foreign_keys = OFF").close()
            with connection.begin():
                yield connection

    def close(self) -> None:
        self.file.close()
        if "engine" in vars(self):
            self.engine.dispose()

    def _open(self, url: URL, lock_timeout_s: float) -> Engine:
        try:
            if url.get_backend_name() != "sqlite":
                return open_engine(url, self._schema, lock_timeout_s)
            engine = create_engine(url, connect_args={"timeout": lock_timeout_s})
        except (SQLAlchemyError, ImportError) as error:
            raise ConfigError(
                f"{self.where} cannot hold a ledger ({error}): give a file's path, or a URL like "
                f"postgresql://user@host/name with its driver installed (pip install 'blocktrain[postgres]')"
            ) from None
        event.listen(engine, "connect", lambda connection, _: set_up(connection))
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
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error) as error:
            raise self._as_ours(error) from error

    def _as_ours(self, error: Exception) -> BlockTrainError:
        """An exception of SQLAlchemy or SQLite as ours, split by whether a retry can help."""
        if isinstance(error, IntegrityError | DataError | sqlite3.IntegrityError | sqlite3.DataError):
            return LedgerConflict(
                f"the ledger at {self.where} refused a contradiction ({_sentence(error)}): "
                f"fetch the present state and decide again"
            )
        if _may_pass(error):
            return LedgerUnavailable(
                f"the ledger at {self.where} does not answer ({_sentence(error)}): check that it runs and that "
                f"this user may use it, and try again"
            )
        return StorageError(
            f"the ledger at {self.where} cannot be used ({_sentence(error)}): make it readable and writable, give "
            f"its disk space, or restore it"
        )


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


def _begin_sqlite(connection: SqlConnection) -> None:
    """As `sqlite.begin` does it."""
    for_writing = connection.get_execution_options().get(_FOR_WRITING)
    connection.connection.cursor().execute("BEGIN IMMEDIATE" if for_writing else "BEGIN")


def _may_pass(error: Exception) -> bool:
    origin = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(origin, sqlite3.Error):
        return is_busy(origin)
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(error, OperationalError | PoolTimeout)


def _sentence(error: Exception) -> str:
    origin = getattr(error, "orig", None) or error
    return str(origin).partition("\n")[0].rstrip(".")
