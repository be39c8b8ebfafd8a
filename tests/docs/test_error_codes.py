"""The table of errors in docs/protocol.md has every code that a coordinator answers, in the row of its status."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from blocktrain.swarm.coordinator.refusals import STATUS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "blocktrain"
SERVICE = [*(SOURCE / "swarm" / "coordinator").rglob("*.py"), *(SOURCE / "wire").rglob("*.py")]
SERVICE += [SOURCE / "errors.py", SOURCE / "swarm" / "signatures.py", SOURCE / "http" / "middleware.py"]
OF_GATEWAYS = {"host"}  # the check for it is in http/, and coordinators do not use it
PLACE = {"RequestRefused": 1, "TensorError": 1, "damaged": 1, "_response": 1, "CheckFailed": 1}  # of the code in a call


def texts(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def codes_in(tree: ast.Module) -> Iterator[str]:
    """Given to an error or an answer, chosen by an `if`, the default of a parameter, or what `_code` returns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PLACE:
            given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
            for value in given or node.args[PLACE[node.func.id] :][:1]:
                yield from [value.value] if isinstance(value, ast.Constant) else []
        if isinstance(node, ast.Assign) and "code" in (getattr(target, "id", "") for target in node.targets):
            yield from texts(node.value) if isinstance(node.value, ast.IfExp) else ()
        if isinstance(node, ast.FunctionDef) and node.name == "_code":
            yield from [text for statement in node.body[1:] for text in texts(statement)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [argument.arg for argument in node.args.args][-len(node.args.defaults) or len(node.args.args) :]
            defaults = dict(zip(names, node.args.defaults, strict=True))
            yield from texts(defaults.get("code", ast.Pass()))


def documented() -> dict[str, set[int]]:
    """Each code and the statuses of its row."""
    table = (ROOT / "docs" / "protocol.md").read_text().partition("\n## Errors\n")[2]
    rows = re.findall(r"^\| (\d{3}(?:, \d{3})*) \| ([^|]+) \|", table, re.MULTILINE)
    return {
        code: {int(status) for status in statuses.split(", ")}
        for statuses, codes in rows
        for code in re.findall(r"`(\w+)`", codes)
    }


def test_the_table_has_every_code_and_no_other():
    in_code = {code for path in SERVICE for code in codes_in(ast.parse(path.read_text()))} | set(STATUS)
    assert set(documented()) == in_code - OF_GATEWAYS


def test_every_code_is_in_the_row_of_its_status():
    table = documented()
    assert {code: status for code, status in STATUS.items() if status not in table[code]} == {}
