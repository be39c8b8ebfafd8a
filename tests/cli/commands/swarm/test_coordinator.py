"""blocktrain coordinator: what it refuses, and its certificate. tests/e2e/test_swarm_process.py runs it."""

from __future__ import annotations

import socket
import stat
from dataclasses import replace

import pytest

from blocktrain.cli.commands.swarm.coordinator import alone_in
from blocktrain.cli.shared.certificates import tls_files
from blocktrain.errors import ConfigError
from blocktrain.swarm.coordinator.server import opened
from blocktrain.swarm.initial_blocks import make_in_torch_process, make_initial_blocks
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.train.start import StartBlocks, open_start
from blocktrain.wire.invite import parse_invite
from blocktrain.wire.messages import PROTOCOL_VERSION
from blocktrain.wire.safetensors import decode

SETTINGS = ["--set", "train.steps=4", "--set", "swarm.round_steps=2"]


def start(run, text, folder, *options):
    return run("coordinator", "--preset", "tiny", "--corpus", text, "--dir", folder, *SETTINGS, *options)


@pytest.mark.parametrize(
    "changed, difference",
    [
        (["--seed", 7], "holds a run with seed = 0 and this run has seed = 7: use the same settings"),
        (["--set", "swarm.max_lag=2"], "holds a run with swarm.max_lag = 4 and this run has swarm.max_lag = 2"),
    ],
)
def test_a_run_cannot_be_continued_with_other_settings_and_the_first_one_is_named(run, swarm, changed, difference):
    result = start(run, swarm.text, swarm.folder, *changed)
    assert result.exit_code == 2
    assert difference in result.stderr
    assert "give none to continue that run" in result.stderr


def test_a_second_coordinator_in_the_same_directory_is_refused(tmp_path):
    with alone_in(tmp_path), pytest.raises(ConfigError, match=r"another coordinator runs in .*: stop it first"):
        alone_in(tmp_path).__enter__()
    with alone_in(tmp_path):
        pass  # the first one has ended


def test_another_text_is_named_too(run, swarm, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("nothing of beer " * 500)
    result = start(run, other, swarm.folder)
    assert result.exit_code == 2
    assert f'this run has corpus.source = "{other}"' in result.stderr


def test_the_same_text_at_another_place_continues_the_run(run, swarm, tmp_path):
    moved = tmp_path / "moved.txt"
    moved.write_bytes(swarm.text.read_bytes())
    result = start(run, moved, swarm.folder)
    assert "is taken" in result.stderr  # by the coordinator that serves this run


def test_a_directory_alone_continues_the_run_that_is_there_without_its_text(run, tmp_path, open_tiny, text):
    with open_tiny() as before:
        known = before.ledger.run()
    text.unlink()
    with opened(tmp_path / "state", None, None, None, make_in_torch_process) as again:
        assert again.ledger.run() == known
        assert again.coordinator.info().spec["train"]["steps"] == 4
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("coordinator", "--dir", tmp_path / "state", "--port", port)
    assert f"port {port} on 127.0.0.1 is taken" in result.stderr  # it has got that far


def test_an_empty_directory_alone_is_not_enough(run, tmp_path):
    result = run("coordinator", "--dir", tmp_path / "new")
    assert result.exit_code == 2
    assert "no settings were given: name a TOML file, or --preset with one of" in result.stderr
    assert not (tmp_path / "new").exists()


def test_a_taken_port_is_an_error(run, swarm):
    result = start(run, swarm.text, swarm.folder)
    assert result.exit_code == 2
    assert f"port {parse_invite(swarm.invite).port} on 127.0.0.1 is taken" in result.stderr


def test_a_self_signed_certificate_is_made_once_and_pinned(tmp_path, open_tiny, serve):
    tls = tls_files(tmp_path, "127.0.0.1", None, None)
    assert tls_files(tmp_path, "127.0.0.1", None, None) == tls
    assert stat.S_IMODE(tls.key.stat().st_mode) == 0o600
    with open_tiny() as run, serve(run, tls) as invite:
        assert str(invite).startswith("bts://")
        with CoordinatorClient(parse_invite(str(invite))) as trusting:
            assert trusting.run_info().protocol == PROTOCOL_VERSION
        with pytest.raises(ConfigError, match="somebody else may be answering"):
            CoordinatorClient(replace(invite, fingerprint="0" * 64))


@pytest.fixture
def model(trained_run):
    return open_start(trained_run)


def from_model(folder, model, **changes):
    spec = model.begin(model.spec.with_(**{"train.steps": 4, **changes}))
    return opened(folder, spec, None, None, make_initial_blocks, None, model)


def test_a_run_that_starts_from_a_model_has_all_its_blocks_before_the_first_lease(tmp_path, model):
    with from_model(tmp_path / "state", model, **{"train.freeze": [0]}) as run:
        manifest = run.coordinator.manifest()
        assert {version.block: version.version for version in manifest.blocks} == {0: 0, 1: 0, 2: 0, 3: 0}
        stored, _ = decode(run.coordinator.blobs.get(manifest.blocks[2].tensors.sha256))
        assert all((stored[name] == tensor.numpy()).all() for name, tensor in StartBlocks(model)[2].items())
        assert str(model.path) not in str(run.coordinator.info().spec)
    with opened(tmp_path / "state", None, None, None, make_initial_blocks) as again:
        assert again.coordinator.manifest() == manifest


def test_a_kill_before_the_model_is_stored_asks_for_it_again(tmp_path, model, monkeypatch):
    folder = tmp_path / "state"
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "add_initial_blocks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            from_model(folder, model).__enter__()
    with pytest.raises(ConfigError, match="give its directory with --from"):
        opened(folder, None, None, None, make_initial_blocks).__enter__()
    with from_model(folder, model) as run:
        assert len(run.ledger.newest()) == 4


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_model_that_does_not_fit_leaves_no_run(run, tmp_path, trained_run):
    result = run("coordinator", "--preset", "small", "--dir", tmp_path / "state", "--from", trained_run)
    assert result.exit_code == 2
    assert "has model.width = 32 and this run has 64" in result.stderr
    assert not (tmp_path / "state").exists()
