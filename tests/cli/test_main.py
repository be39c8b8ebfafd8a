"""The app itself: help, version, and how words and numbers look."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

from blocktrain.cli.console import duration, plain_table, quantity
from blocktrain.cli.shared.progress import LINE_EVERY_S, Lines
from blocktrain.train.trainer import StepReport

COMMANDS = ["train", "reference", "compare", "eval", "generate", "stage", "gateway", "serve", "keys"]


def test_the_version_is_the_package_s(run):
    assert run("--version").stdout == f"blocktrain {version('blocktrain')}\n"


def test_no_arguments_show_the_table_of_contents(run):
    result = run()
    assert all(command in result.output for command in COMMANDS)


def test_help_need_not_wait_for_torch():
    probe = "import sys, blocktrain.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0


@pytest.mark.parametrize("amount, words", [(0, "0 B"), (999, "999 B"), (46_080, "46.08 kB"), (1.5e12, "1.5 TB")])
def test_quantities_have_a_prefix(amount, words):
    assert quantity(amount, "B") == words


@pytest.mark.parametrize("seconds, words", [(0.4, "0s"), (75, "1m15s"), (3599.7, "1h00m"), (7260, "2h01m")])
def test_durations_have_two_units(seconds, words):
    assert duration(seconds) == words


def test_in_a_table_text_is_left_and_numbers_are_right():
    assert plain_table(["a", "n"], [["x", "1.5"], ["long", "-10.25"]]) == [
        "a          n",
        "x        1.5",
        "long  -10.25",
    ]


def test_lines_come_with_the_first_and_last_step_and_now_and_then_between(capsys):
    now_s = 0.0
    lines = Lines({0: "phase 1 of 1"}, clock=lambda: now_s)
    for step in range(1, 31):
        now_s += LINE_EVERY_S / 10
        lines(StepReport(0, step, 30, loss=2.5, grad_norm=1.0, lr_factor=1.0, step_bytes=1000, seconds=1.0))
    said = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[0] for line in said] == [f"phase 1 of 1: step {step}/30" for step in (1, 11, 21, 30)]
    assert said[1].endswith("loss 2.500 nats/byte, 1 kB/s, 19s left")
