"""The sizes that CONTRIBUTING.md names: a folder that a reader can look through, a function that fits a screen."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_MODULES, MOST_LINES = 15, 60
MODULES = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "bench").rglob("*.py"))
RELEASED = ROOT / "src" / "blocktrain" / "swarm" / "ledger" / "migrations" / "versions"  # never edited again


def test_no_folder_has_more_than_fifteen_modules():
    """Except bench/ itself: every file in it is a command that people run."""
    count = Counter(path.parent for path in MODULES if path.name != "__init__.py" and path.parent != ROOT / "bench")
    assert {str(folder.relative_to(ROOT)): n for folder, n in count.items() if n > MOST_MODULES} == {}


def test_no_function_has_more_than_sixty_lines():
    long = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in MODULES
        if path.parent != RELEASED
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MOST_LINES
    ]
    assert long == []


def test_every_file_in_bench_itself_is_a_command():
    assert [path.name for path in (ROOT / "bench").glob("*.py") if "__main__" not in path.read_text()] == []
