"""The commands of a swarm, against a coordinator in this process. Real processes: tests/e2e/test_swarm_process.py."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from blocktrain.cli.commands.swarm.worker import Shift, WorkLines, own_key
from blocktrain.cli.main import app
from blocktrain.cli.shared.certificates import tls_files
from blocktrain.errors import ConfigError
from blocktrain.http.server import Tls
from blocktrain.io.private import INVITE_FILE, cache_home, write_private
from blocktrain.spec import preset
from blocktrain.swarm.coordinator.server import OpenRun, opened, served_here
from blocktrain.swarm.initial_blocks import make_in_torch_process
from blocktrain.swarm.worker import client
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import WorkReport
from blocktrain.wire.invite import Invite, parse_invite
from blocktrain.wire.messages import PROTOCOL_VERSION

SENTENCES = "".join(f"{n} bottles of beer on the wall, {n} bottles of beer. " for n in range(400))
TOKEN, ADMIN = "a-token-for-the-workers", "a-token-for-the-admin"
NOBODY = "bt://127.0.0.1:1/#a-token-for-nobody-at-all"
SETTINGS = ["--set", "train.steps=4", "--set", "swarm.round_steps=2"]


@dataclass(frozen=True)
class Swarm:
    invite: str
    admin: str
    folder: Path
    text: Path
    home: Path


@contextmanager
def served(run: OpenRun, tls: Tls | None = None) -> Iterator[Invite]:
    with served_here(run.coordinator, run.ledger, tls) as port:
        yield Invite("127.0.0.1", port, TOKEN, tls is not None, tls.fingerprint if tls else None)


def tiny_spec(text: Path):
    return preset("tiny").with_(**{"corpus.source": str(text), "train.steps": 4, "swarm.round_steps": 2})


@pytest.fixture(scope="module")
def swarm(tmp_path_factory) -> Iterator[Swarm]:
    """A founded run that is served."""
    folder = tmp_path_factory.mktemp("swarm")
    text = folder / "text.txt"
    text.write_text(SENTENCES)
    with opened(folder / "state", tiny_spec(text), None, None, make_in_torch_process) as run:
        run.ledger.add_token("worker", "worker", TOKEN, 0.0)
        run.ledger.add_token("admin", "admin", ADMIN, 0.0)
        with served(run) as invite:
            write_private(folder / "state" / INVITE_FILE, f"{invite}\n".encode())
            yield Swarm(str(invite), str(replace(invite, access_token=ADMIN)), folder / "state", text, folder / "home")


@pytest.fixture(scope="module")
def finished(swarm) -> Swarm:
    """A worker's command has trained it to its end."""
    result = CliRunner().invoke(app, ["worker", swarm.invite, "--home", str(swarm.home), "--name", "ada"])
    assert result.exit_code == 0, result.stderr
    assert "finished: every phase is trained" in result.stderr
    return swarm


def test_a_swarm_is_a_panel_of_its_own(run):
    assert "Train together" in run("--help").stdout


# Bad input: one sentence, exit 2


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["worker", "http://here:80/#x"], 'this is not an invite, it starts with "http:"'),
        (["status", "bt://here:80/"], "put the invite in quotes"),
        (["export", "bt://here/#a-token-for-nobody", "m"], "it names no host and port"),
        (["worker", NOBODY, "--memory", "0"], "--memory 0 is too small"),
        (["worker", NOBODY, "--name", ""], "--name has 0 characters"),
        (["ledger"], "which ledger?"),
        (["ledger", NOBODY, "--dir", "x"], "which ledger?"),
        (["ledger", "--dir", "no-such-dir"], "give the --dir of blocktrain coordinator"),
        (["access-token", "list", "--dir", "no-such-dir"], "give the --dir of blocktrain coordinator"),
        (["coordinator", "--dir", "x"], "no settings were given"),
        (
            ["coordinator", "--dir", "x", "--preset", "tiny", "--host", "0.0.0.0"],
            "machine with --public",
        ),
        (["coordinator", "--dir", "x", "--preset", "tiny", "--tls-cert", "c"], "give both --tls-cert and --tls-key"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_remedy(run, arguments, sentence):
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [["status"], ["export", "m"], ["ledger"]])
def test_a_coordinator_that_is_not_there_is_said_with_the_remedy(run, monkeypatch, command):
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 100.0)  # longer than patience: no second try
    result = run(command[0], NOBODY, *command[1:])
    assert result.exit_code == 2
    assert "check that it runs and can be reached" in result.stderr


def test_a_wrong_token_is_refused_with_the_remedy(run, swarm):
    stranger = replace(parse_invite(swarm.invite), access_token="not-a-token-of-this-run")
    result = run("worker", stranger, "--home", swarm.home)
    assert result.exit_code == 2
    assert "ask the operator of the swarm for an invite" in result.stderr


# What a finished run gives


def test_status_shows_phases_workers_and_the_loss(run, finished):
    result = run("status", finished.admin)
    assert result.exit_code == 0, result.stderr
    assert "3 of 3 phases finished" in result.stdout
    assert "ada" in result.stdout
    assert "ada" not in run("status", finished.invite).stdout  # names are for admins
    assert "held-out loss: " in result.stdout


def test_status_is_json_for_programs(run, finished):
    facts = json.loads(run("status", finished.invite, "--json").stdout)
    assert [phase["finished"] for phase in facts["phases"]] == [True] * 3


def test_the_watch_ends_well_with_ctrl_c(run, finished, monkeypatch):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("blocktrain.cli.commands.swarm.status.time.sleep", interrupted)
    assert run("status", finished.invite, "--watch").exit_code == 0


def test_an_exported_model_can_be_measured_and_writes(run, finished, tmp_path):
    for _ in range(2):  # the second renews the first
        result = run("export", finished.invite, tmp_path / "model", "--home", finished.home)
        assert result.exit_code == 0, result.stderr
        assert "training is finished" in result.stdout
    scores = json.loads(run("eval", tmp_path / "model", "--json").stdout)["runs"][0]["scores"]
    assert scores[-1]["reading"] == "combined"
    assert run("generate", tmp_path / "model", "--max-bytes", 5).exit_code == 0


def test_a_model_can_be_exported_in_half_the_bytes(run, finished, tmp_path):
    for precision in ("float32", "float16"):
        options = ("--precision", precision, "--home", finished.home)
        assert run("export", finished.invite, tmp_path / precision, *options).exit_code == 0
    whole, half = (
        sum(path.stat().st_size for path in (tmp_path / precision).glob("block-*"))
        for precision in ("float32", "float16")
    )
    assert half < 0.55 * whole
    assert run("generate", tmp_path / "float16", "--max-bytes", 5).exit_code == 0


def test_a_swarm_s_model_goes_straight_to_transformers(run, finished, tmp_path):
    pytest.importorskip("transformers", reason="needs the extra: pip install 'blocktrain[hf]'")
    result = run("export", finished.invite, "--hf", tmp_path / "hf", "--home", finished.home)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "hf" / "model.safetensors").exists()


def test_an_early_export_says_which_blocks_do_not_exist_yet(run, tmp_path, text):
    with opened(tmp_path / "state", tiny_spec(text), None, None, make_in_torch_process) as early:
        early.ledger.add_token("worker", "worker", TOKEN, 0.0)
        early.coordinator.loop.tick()
        with served(early) as invite:
            result = run("export", invite, tmp_path / "model", "--home", tmp_path)
            assert "not open yet" in run("status", invite).stdout
    assert result.exit_code == 0, result.stderr
    assert "block 2, 3 of 4 does not exist yet" in result.stderr
    assert "blocks 0 (version 0), 1 (version 0); training continues" in result.stdout


@pytest.mark.parametrize("evaluated, kept", [(0, {"stack": [0.25, 0.75]}), (7, {})], ids=["these", "others"])
def test_an_export_has_the_composition_s_weights_only_of_its_own_versions(run, tmp_path, text, evaluated, kept):
    with opened(
        tmp_path / "state", tiny_spec(text).with_(**{"model.blocks": 2}), None, None, make_in_torch_process
    ) as early:
        early.ledger.add_token("worker", "worker", TOKEN, 0.0)
        early.ledger.see_worker("a" * 64, "ada", "cpu", 1, 1.0, now_s=1.0, nonce=1)
        early.coordinator.loop.tick()
        lease = early.ledger.grant_evaluation("a" * 64, {0: evaluated, 1: evaluated}, 1.0, 60.0)
        early.ledger.record_evaluation(lease.id, "valid", [], {"stack": (0.25, 0.75)}, 2.0)
        with served(early) as invite:
            result = run("export", invite, tmp_path / "model", "--home", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert json.loads((tmp_path / "model" / "manifest.json").read_text())["combine"] == kept


def test_an_export_into_another_run_s_directory_is_refused(run, finished, trained):
    before = sorted(trained[0].iterdir())
    result = run("export", finished.invite, trained[0], "--home", finished.home)
    assert result.exit_code == 2
    assert "holds a run with" in result.stderr
    assert sorted(trained[0].iterdir()) == before


def test_the_ledger_is_the_same_from_the_coordinator_and_from_its_disk(run, finished):
    asked = json.loads(run("ledger", finished.admin, "--json").stdout)
    assert asked == json.loads(run("ledger", "--dir", finished.folder, "--json").stdout)
    assert {record["worker_name"] for record in asked} == {"ada"}
    assert run("ledger", finished.invite).stdout.count("merged in round") == len(asked)


def test_a_viewer_may_look_but_not_work_until_revoked(run, finished):
    made = run("access-token", "add", "eve", "--role", "viewer", "--dir", finished.folder)
    invite = made.stdout.strip()
    assert run("status", invite).exit_code == 0
    refused = run("worker", invite, "--home", finished.home)
    assert refused.exit_code == 2
    assert "an access token of role viewer may not do this" in refused.stderr
    assert run("access-token", "revoke", "eve", "--dir", finished.folder).exit_code == 0
    assert run("status", invite).exit_code == 2
    assert "eve" in run("access-token", "list", "--dir", finished.folder).stdout
    again = run("access-token", "revoke", "eve", "--dir", finished.folder)
    assert again.exit_code == 2
    assert "(worker, admin)" in again.stderr


def test_an_admin_pauses_a_run_and_status_shows_it_until_it_goes_on(run, finished):
    admin = run("access-token", "add", "boss", "--role", "admin", "--dir", finished.folder).stdout.strip()
    for command, shown in (("pause", True), ("pause", True), ("resume", False)):
        assert run(command, admin).exit_code == 0
        assert (", paused" in run("status", finished.invite).stdout) == shown
    refused = run("pause", finished.invite)
    assert refused.exit_code == 2
    assert "an access token of role worker may not do this: ask for one of role admin" in refused.stderr


def test_no_token_is_in_the_ledger(finished):
    assert all(TOKEN.encode() not in path.read_bytes() for path in finished.folder.glob("ledger.db*"))


# The coordinator's own


def start(run, text, folder, *options):
    return run("coordinator", "--preset", "tiny", "--corpus", text, "--dir", folder, *SETTINGS, *options)


def test_a_run_cannot_be_continued_with_other_settings(run, swarm):
    result = start(run, swarm.text, swarm.folder, "--seed", 7)
    assert result.exit_code == 2
    assert "holds a run with another spec" in result.stderr


def test_the_port_that_workers_know_being_taken_is_said(run, swarm):
    result = start(run, swarm.text, swarm.folder)
    assert result.exit_code == 2
    assert f"port {parse_invite(swarm.invite).port} on 127.0.0.1 is taken" in result.stderr


def test_a_certificate_of_our_own_is_made_once_and_pinned(tmp_path, text):
    tls = tls_files(tmp_path, "127.0.0.1", None, None)
    assert tls_files(tmp_path, "127.0.0.1", None, None) == tls
    assert stat.S_IMODE(tls.key.stat().st_mode) == 0o600
    with opened(tmp_path, tiny_spec(text), None, None, make_in_torch_process) as run:
        run.ledger.add_token("worker", "worker", TOKEN, 0.0)
        with served(run, tls) as invite:
            assert str(invite).startswith("bts://")
            with CoordinatorClient(parse_invite(str(invite))) as trusting:
                assert trusting.run_info().protocol == PROTOCOL_VERSION
            with pytest.raises(ConfigError, match="somebody else may be answering"):
                CoordinatorClient(replace(invite, fingerprint="0" * 64))


# The worker's own


def test_workers_of_one_home_have_keys_of_their_own_and_keep_them(tmp_path):
    with own_key(tmp_path) as (first, one), own_key(tmp_path) as (second, two):
        assert (one, two) == (1, 2)
        assert first.public_key() != second.public_key()
    with own_key(tmp_path) as (again, _):
        assert again.public_key() == first.public_key()
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_broken_key_is_not_replaced(tmp_path):
    (tmp_path / "key").write_text("nothing")
    with pytest.raises(ConfigError, match="restore it, or delete it to join as a new worker"), own_key(tmp_path):
        pass
    assert (tmp_path / "key").read_text() == "nothing"


def test_the_cache_is_where_the_user_has_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_home() == tmp_path / "blocktrain"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_home() == Path.home() / ".cache" / "blocktrain"


def test_an_unreachable_coordinator_is_mentioned_once_and_so_is_its_return(capsys):
    shift = Shift(lambda _: None, stop=lambda: False, once=False, url="http://there")
    for _ in range(3):
        shift.unreachable(0.0)
    for _ in range(2):
        shift.report(WorkReport("wait", "why"))
    said = capsys.readouterr().err.splitlines()
    assert [line.split("http://there ")[1][:12] for line in said] == ["does not ans", "answers agai"]


def test_who_stops_does_not_wait_for_the_coordinator():
    with pytest.raises(KeyboardInterrupt):
        Shift(lambda _: None, stop=lambda: True, once=False, url="http://there").unreachable(1000.0)


@pytest.mark.parametrize("once, kind, over", [(True, "submitted", 1), (True, "step", 0), (False, "submitted", 0)])
def test_once_is_one_piece_of_work(once, kind, over):
    shift = Shift(lambda _: None, stop=lambda: False, once=once, url="http://there")
    shift.report(WorkReport(kind, "text", 1.0))
    assert shift.over() == over


def test_a_reason_to_wait_is_said_once_while_its_seconds_count_down(capsys):
    lines = WorkLines(clock=lambda: 0.0)
    for text in ("round 3 has 2.5 s left", "round 3 has 1.5 s left", "the run is paused", "the run is paused"):
        lines(WorkReport("wait", text))
    assert capsys.readouterr().err.splitlines() == ["wait: round 3 has 2.5 s left", "wait: the run is paused"]


def test_a_lease_a_first_step_and_what_was_handed_in_are_said(capsys):
    lines = WorkLines(clock=lambda: 0.0)
    for kind, text in (("lease", "phase 0"), ("step", "step 1"), ("step", "step 2"), ("submitted", "2 steps")):
        lines(WorkReport(kind, text, None if kind == "lease" else 2.0))
    said = capsys.readouterr().err.splitlines()
    assert said == ["lease: phase 0", "step 1, loss 2.000 nats/byte", "submitted: 2 steps, loss 2.000 nats/byte"]
