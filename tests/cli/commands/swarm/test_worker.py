"""blocktrain worker: its key, its stops and its lines. tests/e2e/test_swarm_process.py runs it."""

from __future__ import annotations

import stat
from datetime import datetime, timedelta
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.status import Status

from blocktrain.cli.commands.swarm.devices import chosen_devices
from blocktrain.cli.commands.swarm.worker import (
    NO_LEASE,
    Shift,
    StandingEverySoOften,
    WorkLines,
    WorkStatus,
    standing_of,
)
from blocktrain.cli.shared.training import check_memory
from blocktrain.errors import ConfigError, CoordinatorUnreachable
from blocktrain.io.private import cache_home
from blocktrain.spec import preset
from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.worker.identity import own_key
from blocktrain.swarm.worker.schedule import parse_schedule
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
    shift = Shift(WorkLines(), stop=lambda: False, once=False, url="http://there")
    for _ in range(3):
        shift.failed(CoordinatorUnreachable("the coordinator's disk is full", answered=True))
        shift.unreachable(0.0)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "the coordinator at http://there cannot go on, trying again until it can (Ctrl-C stops): "
        "the coordinator's disk is full"
    ]


def test_an_unreachable_coordinator_and_its_return_are_printed_once(capsys):
    shift = Shift(WorkLines(), stop=lambda: False, once=False, url="http://there")
    for _ in range(3):
        shift.unreachable(0.0)
    for _ in range(2):
        shift.report(WorkReport("wait", "why"))
    said = [line for line in capsys.readouterr().err.splitlines() if "there" in line]
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


@pytest.mark.parametrize(
    "kind, shown",
    [
        ("lease", "fetching what the lease needs"),
        ("step", "text"),
        ("submitted", "asking for work"),
        ("away", "waiting for the coordinator"),
    ],
)
def test_a_terminal_shows_below_a_printed_line_what_happens_next_and_not_the_line_again(kind, shown):
    console = Console(file=StringIO())
    status = Status("joining", console=console)
    WorkStatus(status)(WorkReport(kind, "text"))
    assert (status.status, console.file.getvalue().count("text")) == (shown, kind != "step")


def test_a_lease_a_first_step_and_a_submission_are_printed(capsys):
    lines = WorkLines(clock=lambda: 0.0)
    for kind, text in (("lease", "phase 0"), ("step", "step 1"), ("step", "step 2"), ("submitted", "2 steps")):
        lines(WorkReport(kind, text, None if kind == "lease" else 2.0))
    said = capsys.readouterr().err.splitlines()
    assert said == ["lease: phase 0", "step 1, loss 2.000 nats/byte", "submitted: 2 steps, loss 2.000 nats/byte"]


def test_outside_of_its_hours_a_worker_hands_in_and_waits(monkeypatch, capsys):
    now = datetime(2026, 1, 1, 6, 59)

    def sleep(self: Shift, seconds: float) -> None:
        nonlocal now
        now += timedelta(hours=1)

    monkeypatch.setattr(Shift, "sleep", sleep)
    hours = parse_schedule("22:00-07:00")
    shift = Shift(lambda _: None, lambda: False, once=False, url="", hours=hours, now=lambda: now)
    assert (shift.begins(), shift.over()) == (True, False)
    now += timedelta(minutes=1)
    assert shift.over()
    assert shift.begins()
    assert (now.hour, shift.over()) == (22, False)
    assert capsys.readouterr().err.count("outside of the hours 22:00-07:00") == 1
    shift.report(WorkReport("finished", "every phase is trained"))
    assert not shift.begins()


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--schedule", "at night"], "give two times of a day"),
        (["--devices", "cpu,cpu", "--device", "cpu"], "--devices excludes --device"),
        (["--devices", "cpu,none"], "is not the name of a device"),
    ],
)
def test_options_that_make_no_sense_are_a_user_error(run, options, complaint):
    result = run("worker", "bt://127.0.0.1:1/#" + "x" * 20, *options)
    assert (result.exit_code, complaint in result.stderr) == (2, True)


def test_all_devices_are_all_gpus_of_the_machine_which_must_have_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert chosen_devices("all") == ["cuda:0", "cuda:1"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match="--devices all finds no CUDA device here: leave it out, or name devices"):
        chosen_devices("all")


@pytest.mark.parametrize(
    "mine, others, left_s, said",
    [
        (30, [70], None, "30% of the run's training so far, rank 2 of 2"),
        (50, [30, 20, 0], 90.0, "50% of the run's training so far, rank 1 of 3; the run has 1m30s left"),
        (50, [50], None, "50% of the run's training so far, rank 1 of 2"),
        (0, [10], None, None),
    ],
)
def test_a_worker_s_standing_is_its_share_and_its_rank(mine, others, left_s, said):
    workers = [{"alias": f"other {n}", "tokens": tokens} for n, tokens in enumerate(others)]
    assert standing_of("me", [*workers, {"alias": "me", "tokens": mine}], left_s) == said


def test_the_coordinator_is_asked_for_the_standing_at_most_once_a_minute(capsys):
    asked, now_s = [], [0.0]

    def status():
        asked.append(now_s[0])
        return {"workers": [{"alias": alias_of("ab" * 32), "tokens": 5}], "time_left_s": None}

    shift = Shift(WorkLines(lambda: now_s[0]), stop=lambda: False, once=False, url="http://there")
    shift.standing = StandingEverySoOften(status, "ab" * 32, clock=lambda: now_s[0])
    for now_s[0] in (0.0, 30.0, 59.0, 60.0):
        shift.report(WorkReport("submitted", "2 steps", 2.0))
    assert asked == [0.0, 60.0]
    assert capsys.readouterr().err.count("standing: 100% of the run's training so far, rank 1 of 1\n") == 2


@pytest.mark.parametrize("memory_bytes, said", [(20_000_000, ""), (3_000_000, "trains with"), (500_000, NO_LEASE)])
def test_a_worker_says_before_its_first_lease_how_the_phases_fit_its_memory(capsys, memory_bytes, said):
    check_memory(preset("tiny"), preset("tiny").phases[:1], memory_bytes, NO_LEASE)
    assert said in capsys.readouterr().err
