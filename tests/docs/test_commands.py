"""Every command in the documents is one that there is: its options and arguments parse, its target, script or extra
exists. So does every command that a message of the package names. tests/e2e/test_tutorial.py runs the tutorial's;
tests/test_api_page.py runs the examples in Python."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import typer.main

from blocktrain.cli.main import app
from blocktrain.serve.gateway.app import ROUTES
from blocktrain.spec import load_spec

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))}
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`([^`]+)`")
LANGUAGES = {"sh", "text", "python", "toml", "yaml"}
FOREIGN = {"cp", "export", "mkdir", "openssl", "scp", "sqlite3"}  # commands that are not ours to check
COMMANDS = typer.main.get_command(app)
INVITE = "bt://127.0.0.1:7000/#an-access-token"
HELP = {"-h", "--help"}
PLACEHOLDERS = {"COMMAND", "<name>", "…"}
SOURCE = ROOT / "src" / "blocktrain"
NAMED = re.compile(r"\bblocktrain ([a-z][a-z-]*)(?: ([a-z-]+))?")
RENAMED = "blocktrain token is now called"  # the warning about an old name
VERBS = {"cannot", "computes", "has", "on", "speaks", "stages", "that", "with", "writes"}  # of sentences on BlockTrain

each_page = pytest.mark.parametrize("page", sorted(PAGES))


def fenced(page: str, language: str) -> list[str]:
    return [dedent(body) for found, body in FENCE.findall(PAGES[page].read_text()) if found == language]


def lines(body: str) -> Iterator[list[str]]:
    """The words of each command; a backslash continues one, # begins a comment."""
    for line in re.sub(r"\\\n\s*", " ", body).splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def inline(page: str) -> Iterator[list[str]]:
    for code in INLINE.findall(FENCE.sub("", PAGES[page].read_text())):
        yield code.split()


def literals(tree: ast.Module) -> Iterator[str]:
    """Every text in the code, docstrings too; { } stands for what is put into one."""
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in joined for part in node.values}
    for node in joined:
        yield "".join(x.value if isinstance(x, ast.Constant) else "{ }" for x in node.values)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


# What is checked of a command


def named(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words begin with, and the rest of them."""
    command, rest = COMMANDS, words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"there is no command {rest[0]}: {' '.join(words)}"
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def options_of(command: Any) -> set[str]:
    return HELP | {name for each in command.params for name in (*each.opts, *each.secondary_opts)}


def check_blocktrain(words: list[str]) -> None:
    command, rest = named(words)
    if command is COMMANDS:
        assert set(rest) <= options_of(command), words
    else:
        given = [INVITE if word.startswith("@") or word == "-" else word for word in rest]  # these read files or stdin
        command.make_context(words[0], given)  # raises where an option is unknown or something is missing


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in words[1:] if "=" not in word and word != "…"} <= targets, words


def check_script(words: list[str]) -> None:
    source = (ROOT / words[1]).read_text()
    assert all(f'"{word}"' in source for word in words if word.startswith("--")), words


def check_pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\[(\w+)\]", " ".join(words))) <= extras.keys(), words


def check_curl(words: list[str]) -> None:
    (url,) = [word for word in words if word.startswith("http")]
    assert "/" + url.split("/", 3)[3] in ROUTES, words


CHECKS = {
    "blocktrain": check_blocktrain,
    "make": check_make,
    "python": check_script,
    "pip": check_pip,
    "curl": check_curl,
}


@each_page
def test_every_block_says_what_it_is(page):
    """A block without a language would be a command that nothing checks."""
    assert {language for language, _ in FENCE.findall(PAGES[page].read_text())} <= LANGUAGES


@each_page
def test_every_command_is_one_that_there_is(page):
    for body in fenced(page, "sh"):
        for words in lines(body):
            if words[0] not in FOREIGN:
                CHECKS[words[0]](words)


@each_page
def test_what_the_prose_names_is_there(page):
    """Not whole commands: their options, targets and scripts."""
    for words in inline(page):
        if words[0] == "blocktrain" and not PLACEHOLDERS & set(words[:3]):
            command, rest = named(words)
            assert {word for word in rest if word.startswith("--")} <= options_of(command), words
        elif words[0] in ("make", "python", "pip") and len(words) > 1:
            CHECKS[words[0]](words)


def test_every_command_that_a_message_names_is_there():
    for path in SOURCE.rglob("*.py"):
        for text in literals(ast.parse(path.read_text())):
            for name, subcommand in NAMED.findall(text.replace(RENAMED, "")):
                command = COMMANDS.commands.get(name)
                assert name in VERBS or (command and not command.hidden), f"there is no command {name}: {text}"
                if subcommand and hasattr(command, "commands"):
                    assert subcommand in command.commands, f"there is no command {name} {subcommand}: {text}"


@each_page
def test_every_example_of_settings_loads(page, tmp_path):
    for body in fenced(page, "toml"):
        (tmp_path / "run.toml").write_text(body)
        load_spec(tmp_path / "run.toml")


@each_page
def test_every_example_in_python_compiles(page):
    for body in fenced(page, "python"):
        compile(body, page, "exec")


@each_page
def test_every_link_within_the_repository_leads_somewhere(page):
    text = FENCE.sub("", PAGES[page].read_text())
    targets = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'src="([^"]+)"', text)
    lost = [x for x in targets if "://" not in x and not (PAGES[page].parent / x).exists()]
    assert lost == []
