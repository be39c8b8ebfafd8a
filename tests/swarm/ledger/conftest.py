"""A ledger in a real SQLite file and in a real PostgreSQL."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from blocktrain.swarm.ledger.ledger import Ledger

sys.path.insert(0, str(Path(__file__).parent))
from ledger_steps import start


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue("postgres") if request.param == "postgresql" else tmp_path / "ledger.db")


@pytest.fixture
def ledger(where: str) -> Iterator[Ledger]:
    with closing(Ledger(where)) as ledger:
        yield ledger


@pytest.fixture
def started(ledger: Ledger) -> Ledger:
    start(ledger)
    return ledger
