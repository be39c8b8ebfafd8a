"""pyproject.toml: what is imported is declared, and what only some people need is an extra."""

from __future__ import annotations

import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from blocktrain.cli.commands.swarm.doctor_checks import TESTED_TORCH

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOR_ALL = {Requirement(each).name.lower().replace("_", "-"): Requirement(each) for each in PROJECT["dependencies"]}
FOR_SOME = {
    Requirement(each).name.lower().replace("_", "-")
    for extra in ("png", "postgres", "hf", "parquet", "zstd", "tensorboard", "ray", "sim")
    for each in EXTRAS[extra]
}
IMPORT = re.compile(r"^ *(?:import|from) (\w+)(?:[\w.]* import .*|[\w.]*(?: as \w+)?)$", re.MULTILINE)  # ast: seconds
THROUGH_OTHERS = {"starlette": "fastapi", "click": "typer"}
distributions_of = cache(packages_distributions)  # it reads the file lists of all packages: seconds


def imported() -> set[str]:
    """The top-level names that the package imports anywhere, its own and the standard library's left out."""
    names = {name for path in (ROOT / "src").rglob("*.py") for name in IMPORT.findall(path.read_text())}
    return names - set(sys.stdlib_module_names) - {"blocktrain"}


@pytest.mark.parametrize("name", sorted(imported()))
def test_what_the_package_imports_is_declared(name):
    distributions = {each.lower().replace("_", "-") for each in distributions_of().get(name, [name])}
    distributions |= {THROUGH_OTHERS[each] for each in distributions & set(THROUGH_OTHERS)}
    assert distributions & (set(FOR_ALL) | FOR_SOME)


def test_torch_is_a_range_that_includes_the_tested_version():
    assert TESTED_TORCH in FOR_ALL["torch"].specifier
    assert not any(clause.operator == "==" for clause in FOR_ALL["torch"].specifier)


def test_the_makefile_installs_the_torch_that_doctor_checks_for():
    assert f"TORCH := torch=={TESTED_TORCH}\n" in (ROOT / "Makefile").read_text()


def test_the_development_environment_has_every_extra_that_tests_need():
    everything = {name for each in EXTRAS["dev"] for name in Requirement(each).extras}
    assert everything >= {"png", "hf", "tensorboard"}


def test_the_version_is_told_once_and_repeated_faithfully():
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()
    newest = re.search(r"^## (?:\[)?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == PROJECT["version"]
