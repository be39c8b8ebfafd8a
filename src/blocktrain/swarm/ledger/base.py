"""What the parts of the ledger share: one database, and how a transaction is tried. Knows none of the facts.
Next: ledger.py, which puts the parts together; ledger_database.py, the transactions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import CursorResult

from blocktrain.errors import LedgerConflict
from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.database import Database
from blocktrain.swarm.ledger.round_cache import OpenRounds

LOCK_TIMEOUT_S = 30.0
PAGE = 100

Given = ParamSpec("Given")
Kept = TypeVar("Kept")


class Book:
    """In an SQLite file, made when it is not there, or in a PostgreSQL database by URL."""

    def __init__(self, url_or_path: str | Path, lock_timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self.database = Database(url_or_path, t.tables, lock_timeout_s)
        self._reading, self._writing = self.database.reading, self.database.writing
        self._open = OpenRounds()

    def close(self) -> None:
        self.database.close()

    def together(self, act: Callable[[], Kept], synced: bool = True) -> Kept:
        """What `act` reads and writes here, as one transaction: safe when this returns (not `synced`, after a kill but
        not a power cut), nothing of it after an exception. Where another coordinator was first, it is tried again with
        what that one wrote."""
        return if_absent(self._in_one_transaction)(act, synced)

    def at_one_moment(self, look: Callable[[], Kept]) -> Kept:
        """What `look` reads here, all of one moment."""
        with self._reading():
            return look()

    def _in_one_transaction(self, act: Callable[[], Kept], synced: bool) -> Kept:
        with self._writing(synced):
            return act()


def if_absent(record: Callable[Given, Kept]) -> Callable[Given, Kept]:
    """For what looks whether a row is there before inserting it: where another coordinator inserts it just then, the
    database refuses ours, and looking again finds it."""

    @wraps(record)
    def twice(*args: Given.args, **kwargs: Given.kwargs) -> Kept:
        try:
            return record(*args, **kwargs)
        except LedgerConflict:
            return record(*args, **kwargs)

    return twice


def changed(result: CursorResult[Any]) -> int:
    return result.rowcount
