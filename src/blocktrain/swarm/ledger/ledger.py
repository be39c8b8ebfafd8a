"""The ledger: the durable facts of a run. Every method is one transaction; `transaction()` makes one of several. What a
method has recorded when it returns survives a kill. Threads, processes and machines may share one ledger. It decides
nothing. Next: rounds.py, updates.py, registry.py, reports.py, audits.py and
rollbacks.py, its parts; records.py, what they return."""

from __future__ import annotations

from blocktrain.swarm.ledger.registry import RegistryPart
from blocktrain.swarm.ledger.reports import ReportsPart
from blocktrain.swarm.ledger.rollbacks import RollbacksPart
from blocktrain.swarm.ledger.rounds import RoundsPart
from blocktrain.swarm.ledger.updates import UpdatesPart


class Ledger(RegistryPart, RoundsPart, UpdatesPart, ReportsPart, RollbacksPart):
    """In an SQLite file, made when it is not there, or in a PostgreSQL database by URL."""
