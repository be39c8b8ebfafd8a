"""SQLite without SQLAlchemy in between: its statements, compiled once, are run by the driver itself. A small statement
then costs microseconds instead of tens of them. It understands what the ledger uses of SQLAlchemy and no more.
Next: ../database.py, whose transactions use it; ../queries.py, the statements."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import BindParameter, Select
from sqlalchemy.dialects.sqlite import pysqlite
from sqlalchemy.sql.elements import ClauseElement
from sqlalchemy.types import TypeEngine

MOST_IDLE = 8  # connections that are kept open while nobody uses them
WAL_ATTEMPTS, WAL_PAUSE_S = 500, 0.01
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_EXTENDED = 0xFF  # the bits of an SQLite error code that name the error; the other bits are details
_DIALECT = pysqlite.dialect(paramstyle="named")

Process = Callable[[Any], Any]


class SqliteConnection(sqlite3.Connection):
    """The driver's connection, and whether its commits are synced now."""

    is_synced = True


class SqliteFile:
    """The connections to one file, and its transactions. Who takes a connection has it alone until it is given back.
    `as_ours` makes one of our exceptions of the driver's. `heard_statements` get every statement that was run,
    `heard_commits` whether the transaction that is about to be kept may have written, and whether it is synced."""

    def __init__(self, path: str, lock_timeout_s: float, as_ours: Callable[[Exception], Exception]) -> None:
        self._path, self._lock_timeout_s, self.as_ours = path, lock_timeout_s, as_ours
        self._idle, self._is_closed = deque[SqliteConnection](), False
        # SQLite has one writer at a time, and polls while it is busy. A lock wakes our own threads sooner.
        self._turn, self._thread = threading.Lock(), threading.local()
        self.heard_statements: list[Callable[[str], None]] = []
        self.heard_commits: list[Callable[[bool, bool], None]] = []

    def transaction(self, for_writing: bool, synced: bool = True) -> QuickTransaction:
        return QuickTransaction(self, for_writing, synced)

    def take(self) -> SqliteConnection:
        try:
            return self._idle.pop()
        except IndexError:
            return self._connect()

    def _connect(self) -> SqliteConnection:
        connection = sqlite3.connect(
            self._path, timeout=self._lock_timeout_s, check_same_thread=False, factory=SqliteConnection
        )
        set_up(connection)
        return connection

    def give_back(self, connection: SqliteConnection) -> None:
        if connection.in_transaction:  # it was not kept
            try:
                connection.rollback()
            except sqlite3.Error:
                connection.close()
                return
        if self._is_closed or len(self._idle) >= MOST_IDLE:
            connection.close()
        else:
            self._idle.append(connection)

    def close(self) -> None:
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def begin(self, connection: SqliteConnection, for_writing: bool, synced: bool) -> None:
        """A writer takes the lock at once: after a first read it could no longer wait for another writer."""
        if not for_writing:
            connection.execute("BEGIN")
            return
        if connection.is_synced != synced:
            connection.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            connection.is_synced = synced
        connection.execute("BEGIN IMMEDIATE")

    # Whose turn it is to write

    @property
    def is_writing(self) -> bool:
        """Whether this thread is in a transaction for writing."""
        return getattr(self._thread, "writes", False)

    def take_turn(self) -> None:
        assert not self.is_writing, "use the transaction that this thread is in"
        self._turn.acquire()
        self._thread.writes = True

    def end_turn(self) -> None:
        self._thread.writes = False
        self._turn.release()

    @contextmanager
    def turn(self) -> Iterator[None]:
        self.take_turn()
        try:
            yield
        finally:
            self.end_turn()


class QuickTransaction:
    """One transaction in an SQLite file, as a `with` block. Every request makes several: no generators."""

    def __init__(self, file: SqliteFile, for_writing: bool, synced: bool = True) -> None:
        self._file, self._for_writing, self._synced = file, for_writing, synced
        self._driver: SqliteConnection | None = None

    def __enter__(self) -> QuickConnection:
        file = self._file
        if self._for_writing:
            file.take_turn()
        try:
            self._driver = file.take()
            file.begin(self._driver, self._for_writing, self._synced)
        except BaseException as error:
            self._end()
            if isinstance(error, sqlite3.Error):
                raise file.as_ours(error) from error
            raise
        return QuickConnection(self._driver, file.heard_statements)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                for hear in self._file.heard_commits:
                    hear(self._for_writing, self._synced)
                assert self._driver is not None
                self._driver.commit()
            elif isinstance(error, sqlite3.Error):
                raise self._file.as_ours(error) from error
        except sqlite3.Error as refused:
            raise self._file.as_ours(refused) from refused
        finally:
            self._end()

    def _end(self) -> None:
        if self._driver is not None:
            self._file.give_back(self._driver)
        if self._for_writing:
            self._file.end_turn()


def set_up(connection: sqlite3.Connection) -> None:
    """With WAL, reads go on during a write. With FULL, a commit is synced: what is acknowledged is safe."""
    connection.isolation_level = None  # or the driver would begin transactions late, after the first read
    try:
        _use_wal(connection)
        for pragma in ("synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}").close()
    except sqlite3.Error:
        connection.close()
        raise


def _use_wal(connection: sqlite3.Connection) -> None:
    """The first process that opens a new file changes it to WAL. For this change alone SQLite does not wait."""
    for attempts_left in reversed(range(WAL_ATTEMPTS)):
        try:
            connection.execute("PRAGMA journal_mode = WAL").close()
            return
        except sqlite3.OperationalError as error:
            if attempts_left == 0 or not is_busy(error):
                raise
            time.sleep(WAL_PAUSE_S)


def is_busy(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & _EXTENDED in _BUSY


class QuickConnection:
    """`heard` gets every statement that was run."""

    def __init__(self, driver: sqlite3.Connection, heard: Sequence[Callable[[str], None]] = ()) -> None:
        self._driver, self._heard = driver, heard

    def execute(self, statement: Any, parameters: Mapping[str, Any] | None = None, /) -> QuickRows:
        prepared = _prepared(statement, parameters)
        sql, values = prepared.with_values(parameters or {})
        cursor = self._driver.execute(sql, values)
        rows = cursor.fetchall() if cursor.description else []
        for hear in self._heard:
            hear(sql)
        return QuickRows(prepared.records(rows), cursor.rowcount, cursor.lastrowid)


class QuickRows:
    def __init__(self, rows: list[Any], rowcount: int, last: int | None) -> None:
        self._rows, self.rowcount, self._last = rows, rowcount, last

    @property
    def inserted_primary_key(self) -> Any:
        return _row_type(("number",))(self._last)

    def all(self) -> list[Any]:
        return self._rows

    def one(self) -> Any:
        (row,) = self._rows
        return row

    def one_or_none(self) -> Any:
        return self.one() if self._rows else None

    def first(self) -> Any:
        return self._rows[0] if self._rows else None

    def scalar(self) -> Any:
        return self._rows[0][0] if self._rows else None

    def scalar_one(self) -> Any:
        return self.one()[0]

    def scalars(self) -> QuickRows:
        return QuickRows([row[0] for row in self._rows], self.rowcount, self._last)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)


@dataclass(frozen=True)
class Prepared:
    """A statement as the driver takes it."""

    sql: str
    constants: Mapping[str, Any]
    to_driver: Sequence[tuple[str, Process]]
    lists: Sequence[str]  # parameters that are a list of values
    from_driver: Sequence[tuple[int, Process]]
    row_type: Callable[[Iterable[Any]], Any]

    def with_values(self, parameters: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        sql, values = self.sql, {**self.constants, **parameters}
        for name, process in self.to_driver:
            values[name] = process(values[name])
        for name in self.lists:
            each = {f"{name}_{number}": value for number, value in enumerate(values.pop(name))}
            values |= each
            sql = sql.replace(f"__[POSTCOMPILE_{name}]", ", ".join(f":{one}" for one in each))
        return sql, values

    def records(self, rows: list[Any]) -> list[Any]:
        if not self.from_driver:
            return list(map(self.row_type, rows))
        return [self.row_type(self._converted(row)) for row in rows]

    def _converted(self, row: Sequence[Any]) -> list[Any]:
        values = list(row)
        for at, process in self.from_driver:
            values[at] = process(values[at])
        return values


_KNOWN: WeakKeyDictionary[Any, dict[tuple[str, ...], Prepared]] = WeakKeyDictionary()


def _prepared(statement: Any, parameters: Mapping[str, Any] | None) -> Prepared:
    """A statement that lives on, for example as a constant, is compiled once per set of columns that it writes."""
    known = _KNOWN.get(statement)
    if known is None:
        known = _KNOWN[statement] = {}
    names = () if isinstance(statement, Select) or parameters is None else tuple(parameters)
    found = known.get(names)
    if found is None:
        found = known[names] = _compile(statement, names)
    return found


def _compile(statement: ClauseElement, names: Sequence[str]) -> Prepared:
    compiled = statement.compile(dialect=_DIALECT, column_keys=list(names) or None)
    binds: dict[str, BindParameter[Any]] = {name: compiled.binds[name] for name in compiled.params}  # type: ignore[attr-defined]
    columns = list(statement.selected_columns) if isinstance(statement, Select) else []
    keys = tuple(column.key or f"_{at}" for at, column in enumerate(columns))
    back = [(at, _impl(column.type).result_processor(_DIALECT, None)) for at, column in enumerate(columns)]
    to_driver = [(name, _impl(bind.type).bind_processor(_DIALECT)) for name, bind in binds.items()]
    return Prepared(
        sql=str(compiled),
        constants={name: value for name, value in compiled.params.items() if name not in names},
        to_driver=[(name, process) for name, process in to_driver if process],
        lists=[name for name, bind in binds.items() if bind.expanding],
        from_driver=[(at, process) for at, process in back if process],
        row_type=_row_type(keys)._make if keys else tuple,
    )


def _impl(type_: TypeEngine[Any]) -> TypeEngine[Any]:
    return type_.dialect_impl(_DIALECT)


@lru_cache(maxsize=1024)
def _row_type(names: tuple[str, ...]) -> Any:
    return namedtuple("Row", names, rename=True)
