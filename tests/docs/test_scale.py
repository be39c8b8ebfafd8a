"""docs/scale.md: its tables are what the shapes, the codecs and the measured counts give."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from blocktrain.sim.plan import Conditions, plan
from blocktrain.sim.plan_report import sizes_of
from blocktrain.spec import Stacked, preset

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    found = importlib.util.spec_from_file_location("scale_tables", DOCS / "scale_tables.py")
    assert found is not None
    assert found.loader is not None
    module = sys.modules["scale_tables"] = importlib.util.module_from_spec(found)  # dataclasses look there
    found.loader.exec_module(module)
    return module


def test_the_tables_of_the_page_are_computed_anew(tables):
    """Where they are not: python docs/scale_tables.py."""
    page = (DOCS / "scale.md").read_text()
    assert page == tables.filled(page)
    assert all(f"<!-- table: {name} -->" in page for name in tables.TABLES)


def test_the_first_row_of_the_simulation_is_what_the_simulator_says():
    spec = preset("paper").with_(objective=Stacked(), **{"swarm.round_steps": 600, "swarm.update": "vector"})
    found = plan(spec, Conditions(churn=0.2, rounds=2), lambda phase: sizes_of(spec, phase))
    row = f"| 100 | {found.rounds_per_hour:.1f} | {100 * found.goodput:.1f} % | {100 * found.busy:.1f} % |"
    assert row in (DOCS / "scale.md").read_text()
