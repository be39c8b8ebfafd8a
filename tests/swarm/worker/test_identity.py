"""A worker's key is moved: exported from one home, imported into another."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from blocktrain.errors import ConfigError
from blocktrain.swarm.worker.identity import export_key, import_key, own_key


@pytest.fixture
def home(tmp_path: Path) -> Path:
    with own_key(tmp_path / "home"):
        return tmp_path / "home"


def test_a_worker_is_the_same_on_the_machine_where_its_key_was_imported(home, tmp_path):
    exported = export_key(home, 1, tmp_path / "worker.key")
    assert stat.S_IMODE((tmp_path / "worker.key").stat().st_mode) == 0o600
    assert import_key(tmp_path / "worker.key", tmp_path / "other", 1) == exported
    with own_key(tmp_path / "other") as (key, _):
        assert key.public_key().public_bytes_raw().hex() == exported
    assert import_key(tmp_path / "worker.key", tmp_path / "other", 1) == exported  # a repeat changes nothing


def test_a_key_that_is_there_is_never_replaced(home, tmp_path):
    export_key(home, 1, tmp_path / "worker.key")
    with own_key(tmp_path / "other"):
        pass
    with pytest.raises(ConfigError, match="key of another worker"):
        import_key(tmp_path / "worker.key", tmp_path / "other", 1)
    with pytest.raises(ConfigError, match="exists already"):
        export_key(home, 1, tmp_path / "worker.key")


def test_what_is_no_key_is_refused_with_the_remedy(home, tmp_path):
    (tmp_path / "text").write_text("no key")
    with pytest.raises(ConfigError, match="name a file that blocktrain keys export has written"):
        import_key(tmp_path / "text", tmp_path / "other", 1)
    with pytest.raises(ConfigError, match="is not there: name a file"):
        import_key(tmp_path / "missing", tmp_path / "other", 1)
    with pytest.raises(ConfigError, match="no worker has used this --home"):
        export_key(home, 7, tmp_path / "worker.key")
