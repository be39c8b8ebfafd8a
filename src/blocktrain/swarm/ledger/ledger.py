"""The ledger: the durable facts of a run. Every method is one transaction; `transaction()` makes one of several. What a
method has recorded when it returns survives a kill. Threads, processes and machines may share one ledger. It decides
nothing. Next: rounds.py, versions.py, updates.py, registry.py, reports.py, audits.py, rollbacks.py and vettings.py, its
parts; records.py, what they return."""

from __future__ import annotations

from blocktrain.swarm.ledger.registry import RegistryPart
from blocktrain.swarm.ledger.reports import ReportsPart
from blocktrain.swarm.ledger.rollbacks import RollbacksPart
from blocktrain.swarm.ledger.rounds import RoundsPart
from blocktrain.swarm.ledger.updates import UpdatesPart
from blocktrain.swarm.ledger.versions import VersionsPart
from blocktrain.swarm.ledger.vettings import VettingsPart


class Ledger(RegistryPart, RoundsPart, VersionsPart, UpdatesPart, ReportsPart, RollbacksPart, VettingsPart):
    """In an SQLite file, made when it is not there, or in a PostgreSQL database by URL."""
