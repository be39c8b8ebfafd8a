"""The ledger: the durable facts of a run. Every method is one transaction, and what it has recorded when it returns
survives a kill; threads, processes and machines may share one ledger. It decides nothing: rounds.py does, from what is
read here. Next: coordinator.py, which does both. (Its parts by concern: ledger_people.py, ledger_rounds.py,
ledger_updates.py, ledger_reports.py. ledger_records.py: the facts; ledger_tables.py: their tables; ledger_queries.py:
what is asked inside a transaction; ledger_book.py and ledger_database.py: transactions.)"""

from __future__ import annotations

from blocktrain.swarm.ledger.registry import PeopleBook
from blocktrain.swarm.ledger.reports import ReportsBook
from blocktrain.swarm.ledger.rounds import RoundsBook
from blocktrain.swarm.ledger.updates import UpdatesBook


class Ledger(PeopleBook, RoundsBook, UpdatesBook, ReportsBook):
    """In an SQLite file, made when it is not there, or in a PostgreSQL database by URL."""
