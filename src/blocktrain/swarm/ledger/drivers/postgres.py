"""What a coordinator asks of PostgreSQL's connections: nothing waits without limit, neither for a lock, nor for a
server that is cut off, nor for one that keeps the connection and never answers.
Next: ../database.py, which opens them."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any, TypeVar

from sqlalchemy import URL, Engine, create_engine, event

ANSWER_LIMIT_S = 60.0  # of one statement: locks are waited for at most half as long

Answer = TypeVar("Answer")


def open_engine(url: URL, schema: str | None, lock_timeout_s: float) -> Engine:
    """ImportError without the driver, SQLAlchemy's errors for a URL that no driver takes."""
    engine = create_engine(url, pool_pre_ping=True, connect_args=_settings(schema, lock_timeout_s))
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
