"""The app itself: help, version, old names, and the format of tables and quantities."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
import typer

from blocktrain.cli import main
from blocktrain.cli.console import counted, duration, named_blocks, plain_table, quantity, say, show_line, show_table
from blocktrain.logs import visible

COMMANDS = ["train", "reference", "compare", "eval", "generate", "stage", "gateway", "serve", "keys"]


def test_the_version_is_the_package_s(run):
    assert run("--version").stdout == f"blocktrain {version('blocktrain')}\n"


def test_the_old_name_of_access_token_works_and_warns(run, tmp_path):
    old, new = (run(name, "list", "--dir", tmp_path) for name in ("token", "access-token"))
    assert old.exit_code == new.exit_code == 2
    warning, rest = old.stderr.split("\n", 1)
    assert warning.startswith("warning: blocktrain token is now called blocktrain access-token")
    assert rest == new.stderr


def test_without_arguments_the_commands_are_listed(run):
    result = run()
    assert all(command in result.output for command in COMMANDS)


@pytest.mark.parametrize("words", [[], ["train"], ["access-token", "add"]])
def test_help_is_a_command_too(run, words):
    assert run("help", *words).stdout == run(*words, "--help").stdout != ""


def test_a_ctrl_c_while_the_command_line_loads_shows_no_traceback():
    probe = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "blocktrain.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from blocktrain.__main__ import main
main()"""
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "interrupted: nothing was started yet\n")


def test_help_does_not_import_torch():
    probe = "import sys, blocktrain.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe]).returncode == 0


@pytest.mark.parametrize("amount, words", [(0, "0 B"), (999, "999 B"), (46_080, "46.08 kB"), (1.5e12, "1.5 TB")])
def test_quantities_have_a_prefix(amount, words):
    assert quantity(amount, "B") == words


@pytest.mark.parametrize("count, words", [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (1500, "1,500 steps")])
def test_one_of_something_is_not_several(count, words):
    assert counted(count, "step") == words


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS), ["access-token", "add"]])
def test_help_shows_no_types_of_python_and_no_doubled_brackets(run, command):
    printed = run(*command, "--help").stdout
    assert not re.search(r"<\w+|\[\[|\{|\.\.\.\.", printed)


@pytest.mark.parametrize(
    "command, usage", [("eval", "RUN..."), ("train", "[RUN.toml]"), ("doctor", "[INVITE]"), ("worker", "INVITE")]
)
def test_the_usage_line_names_what_must_be_given_and_what_may_be(run, command, usage):
    assert f"{command} [OPTIONS] {usage}\n" in re.sub(" *\n", "\n", run(command, "--help").stdout)


@pytest.mark.parametrize("blocks, words", [([2], "block 2 of 4 does"), ([1, 2, 3], "blocks 1, 2 and 3 of 4 do")])
def test_one_block_is_not_several(blocks, words):
    assert named_blocks(blocks, 4, "does", "do") == words


@pytest.mark.parametrize("seconds, words", [(0.4, "0s"), (75, "1m15s"), (3599.7, "1h00m"), (7260, "2h01m")])
def test_durations_have_two_units(seconds, words):
    assert duration(seconds) == words


def test_in_a_table_text_is_left_and_numbers_are_right():
    assert plain_table(["a", "n"], [["x", "1.5"], ["long", "-10.25"]]) == [
        "a          n",
        "x        1.5",
        "long  -10.25",
    ]


def test_every_folder_of_commands_is_a_panel(run):
    assert all(panel in run("--help").stdout for panel in ("Train on one machine", "Train together", "Serve"))


@pytest.mark.parametrize(
    "sent, shown",
    [
        ("cpu\x1b[2J\x1b]0;owned\x07", r"cpu\x1b[2J\x1b]0;owned\x07"),
        ("cpu\nfake  cuda", r"cpu\nfake  cuda"),
        ("a\u202eb\u2028c", r"a\u202eb\u2028c"),
        ("Zoë's 机器", "Zoë's 机器"),
    ],
)
def test_what_a_worker_calls_itself_cannot_control_the_terminal(capsys, sent, shown):
    assert visible(sent) == shown
    show_table(["worker", "device"], [["w", sent]])
    assert capsys.readouterr().out.splitlines() == ["worker  device", f"w       {shown}"]


def test_foreign_text_stays_one_line_and_controls_no_terminal(capsys):
    foreign = "refused\x1b[2J\nerror: forged \u202e"
    say("ours", foreign)
    show_line(foreign)
    shown = r"refused\x1b[2J\nerror: forged \u202e"
    assert capsys.readouterr() == (f"{shown}\n", f"ours\n{shown}\n")


def test_too_little_memory_is_a_sentence_with_a_remedy(capsys):
    with pytest.raises(typer.Exit) as ended, main._explained(debug=False):
        torch.empty(2**50)  # more than a processor can address
    assert ended.value.exit_code == 2
    assert "error: this machine has too little memory for it: use a smaller model" in capsys.readouterr().err
