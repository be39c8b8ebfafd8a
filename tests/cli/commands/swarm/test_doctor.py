"""doctor, against a real coordinator in this process and the faults that can be planned for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from blocktrain.cli.shared.certificates import tls_files
from blocktrain.http.server import served_in_thread
from blocktrain.spec import preset
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.routes import build_service
from blocktrain.swarm.coordinator.server import OpenRun, opened, served_here
from blocktrain.swarm.initial_blocks import make_initial_blocks
from blocktrain.swarm.worker import capacity
from blocktrain.swarm.worker.probe import ProbeClient
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import PROTOCOL_VERSION

TOKEN, VIEWER = "a-token-for-the-workers", "a-token-for-the-viewers"
CLOSED_PORT = 1  # nothing listens there: only the system may
EVERY = ["Python", "torch", "device", "memory", "disk", "blocks", "speed"]
THERE = ["DNS", "reachable", "TLS", "clock", "access token", "protocol", "role", "download", "upload"]


@pytest.fixture(scope="module")
def open_run(tmp_path_factory) -> Iterator[OpenRun]:
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "text.txt").write_text("".join(f"{n} bottles of beer on the wall, " for n in range(500)))
    spec = preset("tiny").with_(**{"corpus.source": str(folder / "text.txt"), "train.steps": 4})
    with opened(folder / "state", spec, None, None, make_initial_blocks) as run:
        run.ledger.add_access_token("worker", "worker", TOKEN, 0.0)
        run.ledger.add_access_token("viewer", "viewer", VIEWER, 0.0)
        run.coordinator.loop.tick()
        yield run


@pytest.fixture(scope="module")
def invite(open_run) -> Iterator[Invite]:
    with served_here(open_run.coordinator, open_run.ledger) as port:
        yield Invite("127.0.0.1", port, TOKEN)


def examined(run, *arguments: object, exit_code: int = 0) -> dict:
    result = run("doctor", *arguments, "--json")
    assert result.exit_code == exit_code, result.stdout + result.stderr
    return json.loads(result.stdout)


def levels(document: dict) -> dict[str, str]:
    return {check["name"]: check["level"] for check in document["checks"]}


def remedy(document: dict, name: str) -> str:
    (check,) = [check for check in document["checks"] if check["name"] == name]
    return f"{check['found']} → {check['remedy']}"


def test_a_ready_machine_gets_an_estimate_of_its_work(run, invite, tmp_path):
    document = examined(run, invite, "--home", tmp_path)
    assert document["ready"]
    assert set(levels(document)) == {*EVERY, *THERE}
    assert all(document["bytes_per_s"][way] > 0 for way in ("download", "upload"))
    for phase, blocks in zip(document["phases"], ([0, 1], [1, 2], [2, 3]), strict=True):
        assert phase["blocks"] == blocks
        assert phase["fits"]
        assert phase["steps_per_lease"] >= 1
        assert phase["up_bytes_a_day"] > 0


def test_a_check_changes_nothing(run, invite, open_run, tmp_path):
    before = (open_run.ledger.workers(), open_run.ledger.events(), open_run.ledger.open_rounds())
    examined(run, invite, "--home", tmp_path / "home")
    assert (open_run.ledger.workers(), open_run.ledger.events(), open_run.ledger.open_rounds()) == before
    assert list(tmp_path.iterdir()) == []


def test_without_an_invite_only_the_machine_is_checked(run, tmp_path):
    document = examined(run, "--preset", "tiny", "--home", tmp_path)
    assert list(levels(document)) == EVERY
    assert document["not_tried"] == []
    assert len(document["phases"]) == 3


def test_the_output_for_people_is_lines_and_a_table(run, invite, tmp_path):
    result = run("doctor", invite, "--home", tmp_path)
    assert result.exit_code == 0
    assert f"ok    protocol      version {PROTOCOL_VERSION} on both sides\n" in result.stdout
    assert "what this machine could do for the run tiny" in result.stdout
    assert TOKEN not in result.output


@pytest.mark.parametrize(
    "change, fails, words, not_tried",
    [
        ({"access_token": "x" * 20}, "access token", "ask the operator of the swarm for an invite", THERE[5:]),
        ({"port": CLOSED_PORT}, "reachable", "start the coordinator", THERE[2:]),
        ({"host": "no-such-host.invalid"}, "DNS", "check the invite's host", THERE[1:]),
        ({"tls": True}, "TLS", "ask for the present invite", THERE[3:]),
        ({"tls": True, "fingerprint": "0" * 64}, "TLS", "ask for the present invite", THERE[3:]),
    ],
)
def test_the_first_fault_is_named_with_its_remedy(run, invite, tmp_path, change, fails, words, not_tried):
    document = examined(run, replace(invite, **change), "--home", tmp_path, exit_code=1)
    assert [name for name, level in levels(document).items() if level == "fail"] == [fails]
    assert words in remedy(document, fails)
    assert document["not_tried"] == not_tried
    assert document["phases"] == []


def test_a_certificate_with_another_fingerprint_fails(run, open_run, tmp_path):
    tls = tls_files(tmp_path, "127.0.0.1", None, None)
    service = build_service(open_run.coordinator, open_run.ledger)
    with served_in_thread(service, tls=tls) as server:
        good = Invite("127.0.0.1", server.port, TOKEN, tls=True, fingerprint=tls.fingerprint)
        assert "the invite's certificate" in remedy(examined(run, good, "--home", tmp_path), "TLS")
        document = examined(run, replace(good, fingerprint="0" * 64), "--home", tmp_path, exit_code=1)
    assert "somebody else may be answering" in remedy(document, "TLS")


def test_another_protocol_fails(run, invite, tmp_path, monkeypatch):
    real, newer = Coordinator.info, PROTOCOL_VERSION + 1
    monkeypatch.setattr(Coordinator, "info", lambda self: real(self).model_copy(update={"protocol": newer}))
    document = examined(run, invite, "--home", tmp_path, exit_code=1)
    said = f"{PROTOCOL_VERSION} here, {newer} at the coordinator → install the coordinator's version"
    assert said in remedy(document, "protocol")


def test_a_viewer_s_invite_is_a_warning(run, invite, tmp_path):
    document = examined(run, replace(invite, access_token=VIEWER), "--home", tmp_path)
    assert levels(document)["role"] == "warn"


def test_a_wrong_clock_is_a_warning(run, invite, tmp_path, monkeypatch):
    real = ProbeClient.clock_s
    monkeypatch.setattr(ProbeClient, "clock_s", lambda self: real(self) - 3600)
    assert "synchronise it" in remedy(examined(run, invite, "--home", tmp_path), "clock")


def test_a_run_whose_blocks_are_too_large_fails(run, tmp_path, monkeypatch):
    monkeypatch.setattr("blocktrain.cli.machine.free_memory_bytes", lambda device: 10**6)
    document = examined(run, "--home", tmp_path, exit_code=1)
    assert not any(phase["fits"] for phase in document["phases"])
    assert levels(document)["blocks"] == "fail"


def test_a_home_that_is_a_file_fails(run, tmp_path):
    path = Path(tmp_path / "file")
    path.touch()
    document = examined(run, "--preset", "tiny", "--home", path / "home", exit_code=1)
    assert "choose another with --home" in remedy(document, "disk")


def test_the_settings_that_make_a_large_model_fit_are_named(run, tmp_path, monkeypatch):
    monkeypatch.setattr(capacity, "measure_speeds", lambda *_: {})
    result = run("doctor", "--preset", "paper", "--home", tmp_path, "--memory", "2GB")
    plan = "1 window at once and one block in memory at a time (1.742 GB; train.micro_windows = 1)"
    assert f"phase 1 needs 79.68 GB as it is; in 2 GB it trains with {plan}" in result.stdout
    assert "in 8 GB it trains with 4 windows at once (6.703 GB; train.micro_windows = 4)" in result.stdout


def test_every_address_of_an_invite_is_tried_and_one_that_answers_is_enough(run, invite, tmp_path):
    dead = replace(invite, port=CLOSED_PORT)
    several = replace(dead, others=(invite,))
    document = examined(run, several, "--home", tmp_path)
    found = levels(document)
    assert found[f"at 127.0.0.1:{CLOSED_PORT}"] == "warn"
    assert found[f"at 127.0.0.1:{invite.port}"] == "ok"
    assert [name for name in THERE if found.get(name) not in ("ok", "warn")] == []


def test_an_address_of_another_run_fails(run, invite, tmp_path):
    spec = preset("tiny").with_(**{"corpus.source": str(tmp_path / "text.txt"), "train.steps": 4, "seed": 7})
    (tmp_path / "text.txt").write_text("another text. " * 500)
    with opened(tmp_path / "state", spec, None, None, make_initial_blocks) as other:
        other.ledger.add_access_token("worker", "worker", TOKEN, 0.0)
        other.coordinator.loop.tick()
        with served_here(other.coordinator, other.ledger) as port:
            several = replace(invite, others=(replace(invite, port=port),))
            document = examined(run, several, "--home", tmp_path / "home", exit_code=1)
    assert levels(document)[f"at 127.0.0.1:{port}"] == "fail"
    assert "new invite" in remedy(document, f"at 127.0.0.1:{port}")


def test_a_bad_invite_is_refused(run):
    result = run("doctor", "http://there")
    assert result.exit_code == 2
    assert "this is not an invite" in result.stderr
