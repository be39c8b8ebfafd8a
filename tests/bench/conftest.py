"""What the experiments' tests share: their pages are written, their pictures are not, since each starts a browser
(tests/test_figures.py draws one)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _no_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BROWSER_PATH", "/no/such/browser")
        yield
