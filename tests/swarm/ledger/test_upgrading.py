"""Ledgers of older versions are upgraded with their facts. The file ledger_0.1.0.sql is a dump of a ledger of that
release, before ledgers had revisions: three updates of two workers, two merged rounds and one open."""

from __future__ import annotations

import shutil
import sqlite3
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, MetaData, inspect, select, text

from blocktrain.errors import ConfigError
from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.database import LOCK_TIMEOUT_S, Database
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.migrations import schema, upgrading
from blocktrain.swarm.ledger.migrations.schema import newest_revision, revision_of
from blocktrain.swarm.ledger.migrations.upgrading import copy_rows, migrate, upgrade_ledger

RELEASE = Path(__file__).parent / "ledger_0.1.0.sql"
Place = str | Path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(RELEASE.read_text())
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def released(request: pytest.FixtureRequest, file: Path) -> Place:
    """A ledger as the last release left it."""
    if request.param == "sqlite":
        return file
    url: str = request.getfixturevalue("postgres")
    with opened(file) as old, opened(url) as new, old.reading() as source, new.migrating() as target:
        target.execute(text(f"CREATE SCHEMA {url.partition('schema=')[2]}"))
        migrate(target, "v0001")
        copy_rows(source, target)
        target.execute(text("DROP TABLE alembic_version"))
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Place]:
    """Places for new ledgers, by name."""
    if request.param == "sqlite":
        return lambda name: tmp_path / f"{name}.db"
    url: str = request.getfixturevalue("postgres")
    return lambda name: f"{url[:-8]}_{name}"


def opened(place: Place) -> Any:
    return closing(Database(place, None, LOCK_TIMEOUT_S))


def facts(place: Place) -> dict[str, list[dict[str, Any]]]:
    """All rows of all tables, as they are. Marks are no facts: they say what changed since somebody looked."""
    with opened(place) as database, database.reading() as connection:
        there = MetaData()
        there.reflect(connection)
        return {
            table.name: sorted((_without_mark(row) for row in connection.execute(select(table)).mappings()), key=str)
            for table in there.sorted_tables
            if table.name not in ("alembic_version", "events")
        }


def _without_mark(row: Any) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "mark"}


def description(connection: Connection) -> dict[str, Any]:
    """The tables, however they came about."""
    found = inspect(connection)
    described: dict[str, Any] = {}
    for name in found.get_table_names():
        checks = sorted(" ".join(x["sqltext"].lower().split()) for x in found.get_check_constraints(name))
        references = (
            (x["constrained_columns"], x["referred_table"], x["referred_columns"]) for x in found.get_foreign_keys(name)
        )
        described[name] = {
            "columns": {x["name"]: (str(x["type"]), x["nullable"]) for x in found.get_columns(name)},
            "key": found.get_pk_constraint(name)["constrained_columns"],
            "references": sorted(references),
            "unique": sorted(x["column_names"] for x in found.get_unique_constraints(name)),
            "checks": checks,
            "indexes": sorted(
                (x["name"], x["column_names"], bool(x["unique"]), _condition(x))
                for x in found.get_indexes(name)
                if not x.get("duplicates_constraint")
            ),
        }
    return described


def _condition(index: Any) -> str:
    options = index.get("dialect_options", {})
    return str(options.get("sqlite_where", options.get("postgresql_where")))


def test_the_migrations_make_the_tables_of_the_code(place):
    """If this fails, tables.py was changed without a file in migrations/versions/."""
    Ledger(place("new")).close()
    with opened(place("new")) as database, database.reading() as connection:
        wanted = description(connection)
        assert revision_of(connection) == newest_revision()
        assert wanted.keys() == {*t.tables.tables, "alembic_version"}
    if not isinstance(place("old"), Path):
        with opened(place("new")) as database, database.migrating() as connection:
            connection.execute(text(f"CREATE SCHEMA {str(place('old')).partition('schema=')[2]}"))
    with opened(place("old")) as database, database.migrating() as connection:
        migrate(connection)
        assert description(connection) == wanted


def test_a_ledger_of_the_last_release_is_upgraded_with_the_same_facts(released, tmp_path):
    before = facts(released)
    upgrade = upgrade_ledger(released, backups=tmp_path)
    assert upgrade is not None
    assert (upgrade.before, upgrade.after) == ("v0000", newest_revision())
    after = facts(released)
    assert len(before["updates"]) == 3
    for table, rows in before.items():
        kept = [{name: row[name] for name in rows[0]} for row in after[table]] if rows else after[table]
        assert sorted(kept, key=str) == rows
    with closing(Ledger(released)) as ledger:
        assert [len(ledger.versions(block)) for block in (0, 1)] == [3, 3]
        assert ledger.chain_head() is not None
    assert upgrade_ledger(released, backups=tmp_path) is None


def test_the_backup_is_a_whole_ledger_that_only_its_owner_reads(released, tmp_path):
    before = facts(released)
    upgrade = upgrade_ledger(released, backups=tmp_path)
    assert upgrade is not None
    assert upgrade.backup is not None
    assert upgrade.backup.name.startswith("ledger-backup-v0000-")
    assert stat.S_IMODE(upgrade.backup.stat().st_mode) == 0o600
    assert facts(upgrade.backup) == before
    assert [path.name for path in tmp_path.glob(".backup-*")] == []


def test_nothing_is_changed_by_an_upgrade_that_fails(released, tmp_path, monkeypatch):
    def broken(connection: Connection) -> None:
        migrate(connection)
        raise OSError("planned")

    before = facts(released)
    monkeypatch.setattr(upgrading, "migrate", broken)
    with pytest.raises(OSError, match="planned"):
        upgrade_ledger(released, backups=None)
    monkeypatch.undo()
    with opened(released) as database, database.reading() as connection:
        assert revision_of(connection) == "v0000"
    assert facts(released) == before
    assert upgrade_ledger(released, backups=None) is not None


LATER = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "v9998", "{before}"


def upgrade() -> None:
    op.create_table("badges", sa.Column("worker", sa.String(128), sa.ForeignKey("workers.id"), primary_key=True))
    with op.batch_alter_table("workers") as workers:  # SQLite copies the table; others refer to it meanwhile
        workers.add_column(sa.Column("standing", sa.Text(), nullable=False, server_default="new"))
        workers.create_check_constraint("known_standing", "standing IN ('new', 'good')")
"""


def test_a_later_migration_may_change_tables_that_others_refer_to(released, tmp_path, monkeypatch):
    before = facts(released)["workers"]
    shutil.copytree(schema.MIGRATIONS, tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    later = LATER.format(before=newest_revision())
    (tmp_path / "migrations" / "versions" / "v9998_badges.py").write_text(later)
    for module in (schema, upgrading):
        monkeypatch.setattr(module, "MIGRATIONS", tmp_path / "migrations")
    upgrade = upgrade_ledger(released, backups=tmp_path)
    assert (upgrade.before, upgrade.after) == ("v0000", "v9998")
    after = facts(released)
    assert [{name: row[name] for name in before[0]} for row in after["workers"]] == before
    assert ({row["standing"] for row in after["workers"]}, after["badges"]) == ({"new"}, [])
    assert len(after["leases"]) == 3


def test_coordinators_that_start_at_once_upgrade_once(released):
    with ThreadPoolExecutor(2) as threads:
        upgrades = list(threads.map(lambda _: upgrade_ledger(released, backups=None), range(2)))
    assert sorted(upgrade is not None for upgrade in upgrades) == [False, True]


def test_an_older_ledger_is_refused_by_what_makes_no_backup(released):
    with pytest.raises(ConfigError, match="start blocktrain coordinator on it once"):
        Ledger(released)


def test_a_newer_ledger_is_refused_with_the_remedy(place, tmp_path):
    with closing(Ledger(place("new"))) as ledger, ledger.database.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = 'v9999'"))
    for opening in (lambda: Ledger(place("new")), lambda: upgrade_ledger(place("new"), tmp_path)):
        with pytest.raises(ConfigError, match=r"newer version.*v9999.*install that version or a later one"):
            opening()
