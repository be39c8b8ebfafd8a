"""What all tests share: hypothesis draws the same examples on every machine and does not time them; torch computes with
one thread, in child processes too, since two on a busy machine wait for each other longer than tiny models take; and
the machine's Chromium for pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
settings.register_profile("house", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("house")

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A headless Chromium of this machine. Playwright keeps an event loop in this thread while it runs, so tests of
    one file are either of pages or of asyncio."""
    path = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if path is None:
        missing = f"no Chromium on this machine (looked for {', '.join(CHROMIUM_NAMES)}): install one to test pages"
        if os.environ.get("BLOCKTRAIN_REQUIRE_BROWSER") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # root has none
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=sandbox)
        yield browser
        browser.close()
