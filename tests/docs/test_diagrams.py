"""The diagrams in docs/images are those that their script draws: they follow the code's own schedule."""

from __future__ import annotations

import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

IMAGES = Path(__file__).parents[2] / "docs" / "images"


@pytest.mark.parametrize("name, function", [("blocks", "blocks"), ("round", "a_round"), ("serving", "serving")])
def test_a_diagram_is_what_its_script_draws(name, function):
    drawn = runpy.run_path(str(IMAGES / "diagrams.py"))[function]()
    assert (IMAGES / f"{name}.svg").read_text() == drawn, "python docs/images/diagrams.py draws them anew"
    assert ElementTree.fromstring(drawn).get("aria-label")
