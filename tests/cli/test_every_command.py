"""Every command has a help text with an example that parses. And what all commands have in common."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from blocktrain.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def walk(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for word, command in group.commands.items():
        if command.hidden:
            continue
        yield f"{name} {word}", command
        if hasattr(command, "commands"):
            yield from walk(command, f"{name} {word}")


ROOT = typer.main.get_command(app)
EVERY = dict(walk(ROOT, "blocktrain"))
LEAVES = [name for name, command in EVERY.items() if not hasattr(command, "commands")]


def examples(command: Any) -> list[list[str]]:
    """An epilog's command lines, in words."""
    texts = (command.epilog or "").removeprefix("Example:  ")
    return [shlex.split(text) for text in re.split(r"   (?:or|then)   ", texts)]


@pytest.mark.parametrize("name", EVERY)
def test_a_command_says_what_it_does_in_one_line(name):
    first = (EVERY[name].help or "").partition("\n\n")[0]
    assert 10 <= len(" ".join(first.split())) <= 70, first


@pytest.mark.parametrize("name", LEAVES)
def test_a_command_has_a_help_with_an_example(run, name):
    result = run(*name.split()[1:], "--help")
    assert result.exit_code == 0
    assert f"Example:  {name} " in " ".join(result.stdout.replace("\n", " ").split(" "))


@pytest.mark.parametrize("name", EVERY)
def test_an_example_parses(name):
    for words in examples(EVERY[name]):
        named = max((each for each in LEAVES if words[: len(each.split())] == each.split()), key=len)
        assert named.startswith(name)
        rest = words[len(named.split()) :]
        EVERY[named].make_context(named, rest)  # raises where an option is unknown or something is missing


@pytest.mark.parametrize("name", LEAVES)
def test_every_option_is_explained(name):
    unexplained = [each.name for each in EVERY[name].params if not getattr(each, "help", None)]
    assert unexplained == []


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["train", "--no-such-option"]])
def test_without_a_terminal_there_is_no_colour(run, arguments):
    assert "\x1b" not in run(*arguments).output


def test_the_page_lists_the_exit_codes_and_the_commands_with_json():
    assert re.findall(r"\n\| (\d+) \|", PAGE) == ["0", "1", "2", "130"]
    with_json = [name for name in LEAVES if any("--json" in each.opts for each in EVERY[name].params)]
    (line,) = re.findall(r"`--json` prints[^.]*\.", PAGE)
    assert all(f"`{name.removeprefix('blocktrain ')}`" in line for name in with_json)


@pytest.mark.parametrize(
    "line, completed",
    [("blocktrain do", "doctor"), ("blocktrain export --h", "--hf"), ("blocktrain access-token r", "revoke")],
)
def test_the_tab_key_completes(line, completed):
    words = line.split()
    protocol = {"_BLOCKTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    code = "import sys; sys.argv = ['blocktrain']; from blocktrain.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **protocol}, capture_output=True, text=True)
    assert completed in done.stdout.split()
