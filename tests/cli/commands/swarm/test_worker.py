"""blocktrain worker: its key, its stops and its lines. tests/e2e/test_swarm_process.py runs it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from blocktrain.cli.commands.swarm.worker import Shift, WorkLines, own_key, own_share
from blocktrain.errors import ConfigError, CoordinatorUnreachable
from blocktrain.io.private import cache_home
from blocktrain.swarm.worker.worker import WorkReport


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


def test_why_a_coordinator_cannot_go_on_is_printed_once_if_it_says_so(capsys):
    shift = Shift(lambda _: None, stop=lambda: False, once=False, url="http://there")
    for _ in range(3):
        shift.failed(CoordinatorUnreachable("the coordinator's disk is full", answered=True))
        shift.unreachable(0.0)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "the coordinator at http://there cannot go on, trying again until it can (Ctrl-C stops): "
        "the coordinator's disk is full"
    ]


def test_an_unreachable_coordinator_and_its_return_are_printed_once(capsys):
    shift = Shift(lambda _: None, stop=lambda: False, once=False, url="http://there")
    for _ in range(3):
        shift.unreachable(0.0)
    for _ in range(2):
        shift.report(WorkReport("wait", "why"))
    said = capsys.readouterr().err.splitlines()
    assert [line.split("http://there ")[1][:12] for line in said] == ["does not ans", "answers agai"]


def test_a_worker_that_stops_does_not_wait_for_the_coordinator():
    with pytest.raises(KeyboardInterrupt):
        Shift(lambda _: None, stop=lambda: True, once=False, url="http://there").unreachable(1000.0)


@pytest.mark.parametrize("once, kind, over", [(True, "submitted", 1), (True, "step", 0), (False, "submitted", 0)])
def test_once_means_one_lease(once, kind, over):
    shift = Shift(lambda _: None, stop=lambda: False, once=once, url="http://there")
    shift.report(WorkReport(kind, "text", 1.0))
    assert shift.over() == over


def test_a_reason_to_wait_is_printed_once_while_its_seconds_count_down(capsys):
    lines = WorkLines(clock=lambda: 0.0)
    for text in ("round 3 has 2.5 s left", "round 3 has 1.5 s left", "the run is paused", "the run is paused"):
        lines(WorkReport("wait", text))
    assert capsys.readouterr().err.splitlines() == ["wait: round 3 has 2.5 s left", "wait: the run is paused"]


def test_a_lease_a_first_step_and_a_submission_are_printed(capsys):
    lines = WorkLines(clock=lambda: 0.0)
    for kind, text in (("lease", "phase 0"), ("step", "step 1"), ("step", "step 2"), ("submitted", "2 steps")):
        lines(WorkReport(kind, text, None if kind == "lease" else 2.0))
    said = capsys.readouterr().err.splitlines()
    assert said == ["lease: phase 0", "step 1, loss 2.000 nats/byte", "submitted: 2 steps, loss 2.000 nats/byte"]


def test_a_worker_is_told_its_share_and_its_place():
    facts = {"workers": [{"id": str(n), "tokens": tokens, "updates": n} for n, tokens in enumerate([0, 300, 100])]}
    assert own_share(facts, "2") == ["this worker's share of the run: 25% of the text, 2 updates, place 2 of 3"]
    assert own_share(facts, "0") == []
    assert own_share(facts, "of nobody") == []
