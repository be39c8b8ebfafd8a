"""A ledger from before revisions is upgraded, and its run continues. The file older_ledger.sql is a dump of one,
taken before columns had other names in the code."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from blocktrain.data.corpus import load_corpus
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.migrations.upgrading import upgrade_ledger
from blocktrain.swarm.policy.rounds import Grant

ADA, BOB, EVE = (name * 64 for name in "abe")


@pytest.fixture
def older(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        database.executescript((Path(__file__).parent / "older_ledger.sql").read_text())
    assert upgrade_ledger(tmp_path / "ledger.db", tmp_path) is not None
    return tmp_path / "ledger.db"


def test_its_facts_are_read(older):
    with closing(Ledger(older)) as ledger:
        run, lease = ledger.run(), ledger.lease(f"0-0-{BOB}")
        assert run is not None
        assert (run.spec_digest, run.corpus_sha256, run.corpus) == ("5" * 64, "c" * 64, {"train": "d" * 64})
        assert lease is not None
        assert (lease.deadline_at_s, lease.state) == (161.0, "open")
        assert ledger.role_of("a-token-of-old") == "worker"
        round = ledger.open_rounds()[0]
        assert (round.deadline_at_s, [x.worker for x in round.reported]) == (161.0, [ADA])
        evaluation = ledger.evaluation_lease()
        assert evaluation is not None
        assert evaluation.deadline_at_s == 60.0


def test_it_is_written_to(older):
    with closing(Ledger(older)) as ledger:
        round = ledger.open_rounds()[0]
        grant = Grant(EVE, 0, 0, round.base, 2, 0, 10, 105.0, 222.0, "")
        assert ledger.grant(grant, round, now_s=102.0) is not None
        assert ledger.open_rounds()[0] == round.with_grant(grant, 102.0)
        assert ledger.extend_round(ledger.open_rounds()[0], 300.0, "too few")
    with closing(Ledger(older)) as again:
        assert again.open_rounds()[0].deadline_at_s == 300.0


def test_a_run_that_was_recorded_with_the_hash_of_its_text_goes_on(tiny_run, tmp_path):
    corpus, blobs = load_corpus(tiny_run.corpus, tiny_run.model.context), Blobs(tmp_path / "blobs")
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        founded = found_run(tiny_run, corpus, ledger, blobs, now_s=1.0)
        assert founded.spec_digest == tiny_run.digest()
        text_hash = hashlib.sha256(founded.spec.encode()).hexdigest()
        with ledger.database.writing() as connection:
            connection.exec_driver_sql(f"UPDATE run SET spec_sha256 = '{text_hash}'")
        assert found_run(tiny_run, corpus, ledger, blobs, now_s=2.0).spec_digest == text_hash
