"""What the experiments' tests share: the scripts by name; and their pages are written, their pictures are not, since
each starts a browser (tests/test_figures.py draws one)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[Callable[[str], ModuleType]]:
    """A module of bench/ by its name, found as its own scripts find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module


@pytest.fixture(scope="session")
def small_text(tmp_path_factory: pytest.TempPathFactory, sentences: bytes) -> Path:
    """A corpus that every process of an experiment has read at once."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_bytes(sentences)
    return path


@pytest.fixture(scope="module", autouse=True)
def _no_pictures() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BROWSER_PATH", "/no/such/browser")
        yield
