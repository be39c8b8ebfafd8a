"""What a ledger keeps of a run when a coordinator starts on it again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from blocktrain.data.corpus import Corpus
from blocktrain.errors import ConfigError
from blocktrain.spec import REMOVED_SETTINGS, Denoise, preset
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.wire.messages import PROTOCOL_VERSION

TEXT = np.frombuffer(b"some text ", dtype=np.uint8)
CORPUS = Corpus(train=TEXT, valid=TEXT, test=TEXT, sha256="0" * 64)


@pytest.fixture
def ledger_in(tmp_path: Path) -> Iterator[Callable[[str], Ledger]]:
    """Opens the ledger of a file. Each is closed after the test."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(closing(Ledger(tmp_path / name)))


def test_a_run_that_an_older_version_founded_goes_on(tmp_path, ledger_in):
    spec = preset("tiny").with_(objective=Denoise())
    found = found_run(spec, CORPUS, ledger_in("new.db"), Blobs(tmp_path / "blobs"), now_s=0.0)
    settings = json.loads(found.spec)
    settings["objective"] |= REMOVED_SETTINGS
    text = json.dumps(settings)
    ledger = ledger_in("old.db")
    old = ledger.create_run(replace(found, spec=text, spec_digest=hashlib.sha256(text.encode()).hexdigest()))
    assert found_run(spec, CORPUS, ledger, Blobs(tmp_path / "blobs"), now_s=1.0) == old


def test_a_run_that_was_founded_with_an_older_protocol_goes_on(tmp_path, ledger_in):
    spec, ledger, blobs = preset("tiny"), ledger_in("ledger.db"), Blobs(tmp_path / "blobs")
    founded = found_run(spec, CORPUS, ledger, blobs, now_s=0.0)
    with ledger.database.writing() as connection:
        connection.exec_driver_sql("UPDATE run SET protocol = 2")
    assert PROTOCOL_VERSION == 5
    assert found_run(spec, CORPUS, ledger, blobs, now_s=1.0) == replace(founded, protocol=2)


def test_two_runs_of_one_spec_are_two_runs_for_signatures(tmp_path, ledger_in):
    runs = [
        found_run(preset("tiny"), CORPUS, ledger_in(f"{now_s}.db"), Blobs(tmp_path / "blobs"), now_s)
        for now_s in (1.0, 2.0)
    ]
    again = found_run(preset("tiny"), CORPUS, ledger_in("1.0.db"), Blobs(tmp_path / "blobs"), 3.0)
    assert runs[0].id != runs[1].id
    assert again.id == runs[0].id


def test_a_database_of_another_run_is_refused_and_another_schema_holds_one_more(postgres, tmp_path):
    blobs, other = Blobs(tmp_path / "blobs"), preset("tiny").with_(seed=7)
    with closing(Ledger(postgres)) as ledger:
        founded = found_run(preset("tiny"), CORPUS, ledger, blobs, now_s=0.0)
        with pytest.raises(ConfigError, match=r"holds a run with seed = 0 .* another schema .*\?schema=NAME"):
            found_run(other, CORPUS, ledger, blobs, now_s=1.0)
        with closing(Ledger(f"{postgres}_b")) as second:
            assert found_run(other, CORPUS, second, blobs, now_s=1.0).id != founded.id
        assert ledger.run() == founded
