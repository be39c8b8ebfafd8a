"""The files around the package: templates and hooks that parse and that name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/**/*.yml")), ids=lambda path: path.name)
def test_an_issue_template_has_a_name_and_fields(path):
    template = yaml.safe_load(path.read_text())
    assert template["name"]
    assert template["description"]
    assert all(field["attributes"]["label"] for field in template["body"])


def test_the_hooks_run_what_make_check_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    recipes = MAKEFILE.replace("$(BIN)", ".venv/bin").replace("$(MAKE)", "make")
    for entry in (hook["entry"] for hook in hooks):
        assert entry in recipes or re.search(rf"^{entry.removeprefix('make ')}:", recipes, re.MULTILINE), entry


def test_a_citation_names_the_licence_of_the_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
