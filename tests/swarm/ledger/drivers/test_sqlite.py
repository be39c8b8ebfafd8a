"""SQLite by its driver gives what SQLAlchemy gives, for every kind of statement that the ledger uses."""

from __future__ import annotations

from contextlib import closing

import pytest
from ledger_steps import ADA, BOB, merge, report, start
from sqlalchemy import func, insert, select, update

from blocktrain.errors import LedgerConflict
from blocktrain.swarm.ledger import queries
from blocktrain.swarm.ledger import tables as t
from blocktrain.swarm.ledger.ledger import Ledger


@pytest.fixture
def worked(tmp_path):
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        start(ledger)
        merge(ledger, ledger.open_rounds()[0], [report(ledger, ADA), report(ledger, BOB)])
        yield ledger


@pytest.mark.parametrize("table", t.tables.sorted_tables, ids=lambda table: table.name)
def test_every_table_is_read_as_sqlalchemy_reads_it(worked, table):
    with worked.database.reading() as usual, worked.database.quick_reading() as quick:
        assert [x._asdict() for x in quick.execute(select(table))] == [
            dict(zip(table.c.keys(), x, strict=True)) for x in usual.execute(select(table))
        ]


@pytest.mark.parametrize("numbers", [[], [0], [0, 1]])
def test_a_list_of_values_may_have_any_length(worked, numbers):
    asked = {"of_phase": 0, "numbers": numbers}
    with worked.database.reading() as usual, worked.database.quick_reading() as quick:
        found = quick.execute(queries._LEASES_WITH_UPDATES, asked).all()
        assert list(map(tuple, found)) == list(map(tuple, usual.execute(queries._LEASES_WITH_UPDATES, asked)))
        assert len(found) == (2 if numbers else 0)


def test_a_statement_writes_the_columns_that_it_is_given(worked):
    change = update(t.workers).where(t.workers.c.id == ADA)
    with worked.database.quick_writing() as quick:
        assert quick.execute(change, {"name": "first"}).rowcount == 1
        assert quick.execute(change, {"device": "second"}).rowcount == 1
    (ada,) = (x for x in worked.workers() if x.id == ADA)
    assert (ada.name, ada.device) == ("first", "second")


@pytest.mark.parametrize("num_rows", [1, 3, queries.FEW_ROWS + 1])
def test_rows_that_are_inserted_together_are_read_as_they_were_given(worked, num_rows):
    rows = [queries.event_row("late", f"text {n}", float(n), {"round": n}) for n in range(num_rows)]
    for _ in range(2):  # the second time the statement is known
        with worked.database.quick_writing() as quick:
            queries.insert_all(quick, t.events, rows)
    kept = worked.events()[-num_rows:]
    assert [(x.kind, x.text, x.at_s, x.data) for x in kept] == [tuple(row.values()) for row in rows]


def test_a_contradiction_keeps_nothing_of_its_transaction(worked):
    def write_twice() -> None:
        with worked.database.quick_writing() as quick:
            for _ in range(2):
                quick.execute(insert(t.left_out), {"number": 1, "reason": "twice", "at_s": 1.0})

    with pytest.raises(LedgerConflict, match="refused a contradiction"):
        write_twice()
    with worked.database.quick_reading() as quick:
        assert quick.execute(select(func.count()).select_from(t.left_out)).scalar_one() == 0
