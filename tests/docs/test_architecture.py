"""docs/architecture.md describes the code that there is: its tree names every module, the steps of its journeys name
functions that exist, and no journey needs more files than agreed. Docstrings that say what to read next name a file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "blocktrain"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MODULES = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")}
LISTED = {path for path in MODULES if not path.endswith("/__init__.py")}  # those of packages are empty or a sentence
MOST_FILES = {"Train a model": 14, "A worker's round": 28, "A completion": 22, "make demo": None}

FILE = re.compile(r"`([\w/]+\.py)`")
FUNCTIONS = re.compile(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, | and )?)+)")
STEP = re.compile(r"^\d+\. (.+(?:\n {3}.+)*)", re.MULTILINE)
NEXT = re.compile(r"\bNext: (.*)", re.DOTALL)
NAMED = re.compile(r"(?:\.\./)*[\w/]+\.py\b")


def section(title: str, level: str = "##") -> str:
    found = re.search(
        rf"^{level} {re.escape(title)}\n(.*?)(?=^#{{2,{len(level)}}} |\Z)", PAGE, re.DOTALL | re.MULTILINE
    )
    assert found, f"docs/architecture.md has no section {title}"
    return found[1]


def tree() -> dict[str, str]:
    """Each module of the tree and its line. Folders end in / and are indented by two spaces per level."""
    lines: dict[str, str] = {}
    folders: list[str] = []
    (block,) = re.findall(r"```text\n(src/blocktrain/\n.*?)```", section("Packages and modules"), re.DOTALL)
    for line in block.splitlines()[1:]:
        name, _, purpose = line.strip().partition(" ")
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        folders = folders[:depth]
        if name.endswith("/"):
            folders.append(name)
        lines["".join(folders) + ("" if name.endswith("/") else name)] = purpose.strip()
    return lines


def functions(path: str) -> set[str]:
    """Every function, class and method of a module, as `name` or `Class.name`."""
    found: set[str] = set()
    for node in ast.parse((SOURCE / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


def steps(journey: str) -> list[str]:
    return STEP.findall(section(journey, "###"))


def test_every_module_has_its_line_in_the_tree():
    lines = tree()
    assert {path for path in lines if path.endswith(".py")} == LISTED
    assert [path for path, purpose in lines.items() if not purpose] == []


@pytest.mark.parametrize("journey", MOST_FILES)
def test_every_step_of_a_journey_names_a_function_that_exists(journey):
    named = [
        (path, re.findall(r"`([\w.]+)`", names)) for step in steps(journey) for path, names in FUNCTIONS.findall(step)
    ]
    assert len(named) >= len(steps(journey)) > 3
    lost = [f"{path}: {name}" for path, names in named for name in names if name not in functions(path)]
    assert lost == []


def test_every_function_that_the_table_of_changes_names_exists():
    named = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", section("Where do I change …"))
    assert len(named) > 10
    assert [f"{path}: {name}" for path, name in named if name not in functions(path)] == []


@pytest.mark.parametrize("journey", MOST_FILES)
def test_a_journey_needs_no_more_files_than_agreed(journey):
    files = {path for step in steps(journey) for path in FILE.findall(step)}
    most = MOST_FILES[journey]
    assert most is None or len(files) <= most, sorted(files)


def test_every_file_that_the_page_names_exists():
    prose = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    places = (SOURCE, ROOT)
    assert [path for path in FILE.findall(prose) if not any((place / path).exists() for place in places)] == []


@pytest.mark.parametrize("path", sorted(MODULES))
def test_what_a_docstring_says_to_read_next_exists(path):
    """Relative to the module's folder, or to one above it up to the repository."""
    docstring = ast.get_docstring(ast.parse((SOURCE / path).read_text())) or ""
    named = NAMED.findall(NEXT.search(docstring)[1]) if NEXT.search(docstring) else []
    places = [folder for folder in (SOURCE / path).parents if folder.is_relative_to(ROOT)]
    assert [name for name in named if not any((place / name).exists() for place in places)] == []
