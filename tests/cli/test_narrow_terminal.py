"""On a terminal of 80 columns no word is cut: every word that is shown there is also shown on a wide one."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blocktrain.cli.commands.demo import processes as demo
from blocktrain.cli.commands.demo.demo import what_next
from blocktrain.cli.commands.demo.training import Killing
from blocktrain.cli.commands.swarm import doctor, status
from blocktrain.cli.commands.swarm.doctor_checks import Check
from blocktrain.cli.commands.training import compare_runs, eval
from blocktrain.cli.console import say, show_table
from blocktrain.cli.main import COMMANDS
from blocktrain.cli.shared import progress, training
from blocktrain.cli.shared.scoring import Measured
from blocktrain.spec import Stacked, preset
from blocktrain.swarm.worker.capacity import PhasePlan
from blocktrain.train.evaluate import Score

NARROW, WIDE = 80, 400
FRAME, COLOUR = re.compile("[│╭╮╰╯─━╸╺╴╶]"), re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
PAPER = preset("paper").with_(objective=Stacked())


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def printed(monkeypatch: pytest.MonkeyPatch, width: int, show: Callable[[], Any]) -> list[str]:
    screen = Terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    show()
    monkeypatch.undo()
    return FRAME.sub(" ", COLOUR.sub("", screen.getvalue())).splitlines()


def assert_no_word_is_cut(monkeypatch: pytest.MonkeyPatch, show: Callable[[], Any]) -> None:
    narrow, wide = (printed(monkeypatch, width, show) for width in (NARROW, WIDE))
    assert max(map(len, narrow)) <= NARROW
    whole = {word for line in wide for word in line.split()}
    behind_slashes = {part for word in whole for part in re.split("(?<=/)", word)}
    assert {word for line in narrow for word in line.split()} <= whole | behind_slashes


def round_of(reason: str) -> dict:
    return {"number": 123, "reason": reason, "time_left_s": 754.0, "leases": [{"reported_s": None}]}


STATUS = {
    "name": "paper",
    "now_s": 1000.0,
    "paused": True,
    "num_phases": 3,
    "time_left_s": 86000.0,
    "versions": {"0": 250, "1": 250},
    "phases": [
        {"phase": 0, "step": 25000, "steps": 25000, "finished": True, "round": None},
        {
            "phase": 1,
            "step": 1250,
            "steps": 6250,
            "finished": False,
            "round": round_of("2 updates in, 14 at work, min_updates = 3 needed, 754 s left"),
        },
    ],
    "workers": [
        {
            "name": "the-third-machine.example.org",
            "alias": "Brave Raven 67",
            "state": "quarantined",
            "why": "its update of phase 1, round 12 is not what 9 of 9 workers compute",
            "device": "cuda:0",
            "steps_per_s": 12.345,
            "updates": 1234,
            "tokens": 10**11,
            "last_seen_s": 1.0,
        }
    ],
    "evaluations": [
        {
            "scores": [{"path": "stack", "reading": "combined", "nats_per_byte": 1.2345}],
            "versions": {str(block): 250 for block in range(12)},
        }
    ],
    "samples": [
        {"samples": [{"prompt": "everywhere in their stru", "text": "ction of the people and the states of this"}]}
    ],
}
CHECKS = [
    Check("access token", "ok", "valid"),
    Check(
        "TLS",
        "warn",
        "none: others on the network can read the access token and change updates",
        "start the coordinator with --tls-self-signed, or only use this invite on a network that you trust",
    ),
]
PLANS = [
    PhasePlan(
        phase=0,
        blocks=(0, 1),
        memory_bytes=40_123_456_789,
        fits=True,
        streamed=True,
        micro_windows=4,
        steps_per_s=12.3,
        limit_s=900.0,
        steps_per_lease=50,
        rounds_a_day=96.0,
        down_bytes_a_day=3.3e12,
        up_bytes_a_day=4.4e12,
    )
]


def show_status() -> None:
    status._print(PAPER, STATUS, as_json=False, indent=None)


def show_doctor() -> None:
    doctor._show(doctor.Findings(checks=list(CHECKS)), PLANS, PAPER, asked=True)


def show_demo() -> None:
    demo.tell(
        "Starting a coordinator. Everything is saved in demo-run; logs are in demo-run/logs, one for each process."
    )
    demo.tell(
        "The coordinator is running. Watch the training in a browser:\n  http://127.0.0.1:45525/#7ScQ_zPPZybfULNDNvlS"
    )
    lease = {"worker": "id", "reported_s": None}
    phases = [{**STATUS["phases"][0], "round": {"number": 12, "leases": [lease]}, "finished": False}]
    victim = SimpleNamespace(name="worker-4", pid=1234567, kill=lambda: None, check=lambda may_end: None)
    killing = Killing(victim, lambda name: victim)
    for workers in ([{"id": "id", "name": "worker-4"}],) * 2:
        killing.look({**STATUS, "steps": 25000, "phases": phases, "workers": workers})
    demo.tell(what_next(Path("demo-run"), preset("small"), "The president", "http://127.0.0.1:8000/v1"))


def show_bars() -> None:
    labels = {
        phase.index: f"phase {phase.index + 1} of 3, blocks {phase.index}+{phase.index + 1}" for phase in PAPER.phases
    }
    with progress.swarm_progress(labels) as show:
        losses = [{"phase": 0, "points": [{"nats_per_byte": 1.2345}]}]
        show(STATUS, {"training": losses, "held_out": [{"nats_per_byte": 1.25}]})


def show_scores() -> None:
    scores = [
        Score("stack", reading, 1.5514, 0.0342, num_bytes=17229, num_tokens=6400) for reading in ("last", "combined")
    ]
    eval._show([Measured(SimpleNamespace(path=Path("my-run/model"), spec=PAPER), "", scores)])


def show_an_error() -> None:
    say(
        "error: this is not an invite, what follows the # has 3 characters and is not a whole access token: copy the "
        "whole line bt://HOST:PORT/…#… that blocktrain coordinator prints"
    )


def show_plan() -> None:
    training.describe(PAPER)


def show_comparison() -> None:
    show_table(
        compare_runs.COLUMNS, [["my-run/model", "1.4538", "0.0110", "+0.0000", "327,232", "4.667 Mtokens", "5.4 T"]]
    )


@pytest.mark.parametrize(
    "show", [show_status, show_doctor, show_demo, show_bars, show_scores, show_comparison, show_an_error, show_plan]
)
def test_what_is_shown_while_a_model_is_trained_cuts_no_word(monkeypatch, show):
    assert_no_word_is_cut(monkeypatch, show)


def test_the_status_wastes_no_line_of_a_small_terminal(monkeypatch):
    lines = [line.strip() for line in printed(monkeypatch, NARROW, show_status)]
    assert [number for number, pair in enumerate(pairwise(lines)) if pair == ("", "")] == []


@pytest.mark.parametrize("name", ["", *(example.split()[0] for _, _, example in COMMANDS)])
def test_help_cuts_no_word(run, monkeypatch, name):
    words = []
    for width in (NARROW, WIDE):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)  # typer reads the width when it is imported
        shown = FRAME.sub(" ", COLOUR.sub("", run(*name.split(), "--help").stdout))
        words.append(set(shown.split()))
    assert words[0] <= words[1]


@pytest.mark.parametrize("example", [example for _, _, example in COMMANDS])
def test_an_example_fits_one_line(run, monkeypatch, example):
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", NARROW)
    assert f"Example:  blocktrain {example}" in run(example.split()[0], "--help").stdout
