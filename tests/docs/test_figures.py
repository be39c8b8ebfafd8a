"""Figures in prose are measured, and are still what was measured.

A figure is a number with a unit of measurement behind it, or one with three or more decimals. In README.md and docs/ it
names, in a comment right behind the number, where it comes from: a file of bench/results and a path in it,

    1.259<!-- quality: summary.scaffold.test --> nats/byte
    0.51<!-- logical: sweep.stages.0.peak_rss_bytes / 2**30 --> GiB

or its paragraph or table says why it is none: <!-- not measured: a default -->. docs/results.md is generated and
compared as a whole (tests/bench/test_page.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "results.md")]

NUMBER = r"(?<![\w.,/#-])[-+−]?\d[\d,]*(?:\.\d+)?"
UNITS = (
    r"nats?\b", r"bits?(?:/| a | per )", r"×", r"times\b", r"%", r"per ?cent\b", r"(?:µs|ms|s|min|h)\b",
    r"(?:milli)?seconds?\b", r"minutes?\b", r"hours?\b", r"[kKMGT]i?B\b", r"[kMG]?bit/s", r"bytes?(?:/s| a second)",
    r"(?:tokens?|steps?|requests?)(?:/s| a second)", r"[MGTP]FLOP", r"[mb]illion\b", r"[MB] parameters\b",
)  # fmt: skip
MARKED = re.compile(rf"(?P<shown>{NUMBER})<!--\s*(?P<file>[\w-]+):\s*(?P<path>.+?)\s*-->")
FIGURE = re.compile(rf"{NUMBER}\s?(?:{'|'.join(UNITS)})|(?<!arXiv )(?<![\w.])\d+\.\d{{3,}}(?![\w.])")
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
BLANK_LINE = re.compile(r"\n\s*\n")
EXCUSE = re.compile(r"<!--\s*not measured:\s*\S.*?-->")


def unmarked(text: str) -> list[str]:
    """The figures of a page that say neither where they come from nor why they are none."""
    prose = MARKED.sub("", CODE.sub("", text))
    blocks = [block for block in BLANK_LINE.split(prose) if not EXCUSE.search(block)]
    return [match[0] for block in blocks for match in FIGURE.finditer(block)]


def wrong(text: str, read: Callable[[str], Any]) -> list[str]:
    """The marked figures of a page that are not what the results say, as a reader sees them."""
    found = []
    for marked in MARKED.finditer(CODE.sub("", text)):
        value = resolve(read(marked["file"]), marked["path"])
        if as_shown(value, marked["shown"]) != plain(marked["shown"]):
            found.append(f"{marked['shown']} where {marked['file']}: {marked['path']} is {value}")
    return found


def resolve(document: Any, path: str) -> float:
    """`a.b.c`, through lists by number or name; behind a slash the unit that it is shown in: `a.b / 2**20`."""
    keys, _, unit = path.partition(" / ")
    for key in keys.strip().split("."):
        document = _entry(document, key)
    base, _, power = (unit or "1").partition("**")
    return float(document) / float(base) ** float(power or 1)


def _entry(value: Any, key: str) -> Any:
    if isinstance(value, list) and not key.isdigit():
        return next(entry for entry in value if key in entry.values())  # its name, row, codec …
    return value[int(key)] if isinstance(value, list) else value[key]


def plain(shown: str) -> str:
    return shown.replace(",", "").replace("−", "-").lstrip("+")


def as_shown(value: float, shown: str) -> str:
    return f"{value:.{len(shown.partition('.')[2])}f}"


def read_result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_figure_says_where_it_comes_from(page):
    assert unmarked(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_figure_is_what_was_measured(page):
    assert wrong(page.read_text(), read_result) == []


@pytest.mark.parametrize(
    "text, found",
    [
        ("It takes 1.26 nats/byte.", ["1.26 nats"]),
        ("It takes 1.26\nnats/byte.", ["1.26\nnats"]),
        ("It reached 1.2594 at last, or +0.02.", ["1.2594"]),
        ("12.8 times as fast, 95 % of it, 3 × that", ["12.8 times", "95 %", "3 ×"]),
        ("0.5 GiB in 40 ms and 7 s at 1,200 tokens/s", ["0.5 GiB", "40 ms", "7 s", "1,200 tokens/s"]),
        ("a model of 75.80 billion, of 1.3B parameters", ["75.80 billion", "1.3B parameters"]),
        ("4 blocks, 256 bytes, port 8000, Python 3.11, arXiv 2606.24722, `sleep 5 s`", []),
        ("```\nwait 5 s\n```\nand go on", []),
        ("It waits 5 s.<!-- not measured: a default -->", []),
        ("It waits 5 s.<!-- not measured: a default -->\n\nIt took 6 s.", ["6 s"]),
        ("It waits 5 s.<!-- not measured: -->", ["5 s"]),
        ("It has 1.26<!-- quality: a --> nats/byte.", []),
    ],
)
def test_a_figure_is_a_number_with_a_unit_or_many_decimals(text, found):
    assert unmarked(text) == found


@pytest.mark.parametrize(
    "text, right",
    [
        ("1.26<!-- file: rows.first.loss --> nats/byte", True),
        ("1.27<!-- file: rows.first.loss --> nats/byte", False),
        ("−0.020<!-- file: gap --> nats/byte", True),
        ("+0.020<!-- file: gap --> nats/byte", False),
        ("1,500<!-- file: rows.0.bytes / 1e3 --> kB, 1.4<!-- file: rows.0.bytes / 2**20 --> MiB", True),
    ],
)
def test_a_marked_figure_is_compared_as_precisely_as_it_is_shown(text, right):
    document = {"rows": [{"name": "first", "loss": 1.2649, "bytes": 1_500_000}], "gap": -0.0196}
    assert (wrong(text, lambda name: document) == []) == right
