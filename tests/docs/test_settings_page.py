"""The page of settings is what its script makes of the code, and names every key."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from blocktrain.spec import known_keys

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(DOCS / "settings_page.py"))


def test_the_page_is_what_its_script_writes(script):
    assert (DOCS / "settings.md").read_text() == script["page"](), "python docs/settings_page.py writes it anew"


def test_every_setting_has_a_row_that_says_what_it_does_and_when_to_change_it(script):
    rows = [line.split(" | ") for line in script["page"]().splitlines() if line.startswith("| `")]
    named = {row[0].removeprefix("| ").strip("`"): row[3:] for row in rows}
    assert known_keys() <= named.keys()
    assert all(len(what) > 10 and len(when) > 10 for what, when in map(named.get, known_keys()))
    assert script["WHEN"].keys() == known_keys()


@pytest.mark.parametrize(
    "key, allowed",
    [
        ("corpus.valid_share", "a number, at least 0, below 1"),
        ("train.steps", "a whole number, at least 1, or a list: a whole number, at least 1, each"),
        ("swarm.outer", '`"plain"`, `"nesterov"`'),
        ("swarm.outer_lr", "a number, above 0, or left out"),
    ],
)
def test_a_row_has_the_range_that_is_enforced(script, key, allowed):
    row = next(line for line in script["page"]().splitlines() if line.startswith(f"| `{key}`"))
    assert row.split(" | ")[2] == allowed
