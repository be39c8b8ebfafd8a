"""What a coordinator asks of PostgreSQL's connections: nothing waits without limit, neither for a lock, nor for a
server that is cut off, nor for one that keeps the connection and never answers.
Next: ../database.py, which opens them."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.exc import InvalidatePoolError

ANSWER_LIMIT_S = 60.0  # of one statement: locks are waited for at most half as long
FRESH_S = 1.0  # since its last use, a connection is taken for good; after that the server is asked first

Answer = TypeVar("Answer")


def open_engine(url: URL, schema: str | None, lock_timeout_s: float) -> Engine:
    """ImportError without the driver, SQLAlchemy's errors for a URL that no driver takes."""
    engine = create_engine(url, connect_args=_settings(schema, lock_timeout_s))
    event.listen(engine, "checkin", lambda connection, record: record.info.update(used_s=time.monotonic()))
    event.listen(engine, "checkout", lambda connection, record, _: _require_good(engine, connection, record.info))
    if engine.dialect.driver == "psycopg":
        kind = _bounded_connection()
        event.listen(engine, "do_connect", lambda dialect, record, words, named: kind.connect(*words, **named))
    return engine


def _settings(schema: str | None, lock_timeout_s: float) -> dict[str, Any]:
    """A server that is cut off is given up within seconds, and what it holds for a coordinator that is cut off is free
    again within a minute."""
    server = {"idle_in_transaction_session_timeout": "60s", "lock_timeout": f"{lock_timeout_s:g}s"}
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


def _require_good(engine: Engine, connection: Any, info: dict[str, float]) -> None:
    """Asking costs a round trip, which is as long as most statements take: a busy coordinator does not ask. If the
    server is gone, all connections are given up, and a new one is opened."""
    if time.monotonic() < info.get("used_s", time.monotonic()) + FRESH_S:
        return
    try:
        engine.dialect.do_ping(connection)
    except engine.dialect.loaded_dbapi.Error as error:
        raise InvalidatePoolError(str(error)) from error


def _bounded_connection() -> Any:
    """A connection that is broken by a server which takes a statement and does not answer within the limit. TCP does
    not notice: the server's machine, or a proxy before it, still confirms what it gets."""
    import psycopg

    class BoundedConnection(psycopg.Connection[Any]):
        def wait(self, gen: Any, *more: Any, **named: Any) -> Any:
            return super().wait(self._bounded(gen), *more, **named)

        def _bounded(self, steps: Generator[Any, Any, Answer]) -> Generator[Any, Any, Answer]:
            give_up_s = time.monotonic() + ANSWER_LIMIT_S
            try:
                wanted = next(steps)
                while True:
                    ready = yield wanted  # nothing, several times a second, while there is nothing to read
                    if not ready and time.monotonic() > give_up_s:
                        self.pgconn.finish()
                        raise psycopg.OperationalError(f"no answer in {ANSWER_LIMIT_S:g} s")
                    wanted = steps.send(ready)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    return BoundedConnection
