"""Every page is in the site's navigation, and the pages that describe a protocol name its version from the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from blocktrain.serve.chain.messages import PROTOCOL
from blocktrain.wire.messages import PROTOCOL_VERSION

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("page, version", [("protocol.md", PROTOCOL_VERSION), ("serving.md", PROTOCOL)])
def test_a_page_names_the_version_of_its_protocol(page, version):
    assert re.findall(r"^Version (\d+)", (DOCS / page).read_text(), re.MULTILINE) == [str(version)]


def test_the_navigation_names_every_page_once():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert sorted(re.findall(r"[\w-]+\.md", navigation)) == sorted(path.name for path in DOCS.glob("*.md"))


@pytest.mark.parametrize("start, folder", [("README.md", "docs/"), ("docs/index.md", "")])
def test_both_first_pages_link_to_every_page(start, folder):
    links = set(re.findall(r"\]\(([\w/-]+\.md)", (ROOT / start).read_text()))
    pages = {f"{folder}{path.name}" for path in DOCS.glob("*.md")}
    assert pages - links == {f"{folder}index.md"}


def test_the_readme_fits_one_screen_and_a_half_and_names_the_two_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 80
    assert any(line.startswith("make demo") for line in lines)
    assert any(line.startswith("make test") for line in lines)
