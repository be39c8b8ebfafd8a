"""The threat model of docs/security.md: every row says who, what they can and cannot do, and names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
SECTION = re.search(r"^## Threat model\n(.*?)^## ", PAGE, re.DOTALL | re.MULTILINE)
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION[1].splitlines() if line[:1] == "|"]
HEAD, RULE, *THREATS = ROWS


@cache
def functions_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_table_has_its_columns_and_begins_with_a_name():
    assert HEAD == ["who", "can", "cannot", "test"]
    assert THREATS[0][0]
    assert len(THREATS) >= 20


@pytest.mark.parametrize("row", THREATS, ids=lambda row: row[2][:60])
def test_every_cannot_names_tests_that_exist(row):
    _, can, cannot, tests = row
    assert can
    assert cannot
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", tests)
    assert named
    assert re.sub(r"`[^`]+`|[, ]", "", tests) == ""
    for path, name in named:
        assert name in functions_of(path), f"{path} has no {name}"
