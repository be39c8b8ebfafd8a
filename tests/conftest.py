"""What all tests share: a text and a tiny run on it, a real PostgreSQL and a real bucket (services.py), and the
machine's Chromium for pages. Hypothesis draws the same
examples on every machine and does not time them; torch computes with one thread, in child processes too, since two on a
busy machine wait for each other longer than tiny models take."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from blocktrain.spec import RunSpec

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
gc.disable()  # while tests are collected: nearly all that is made then is kept
settings.register_profile("house", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("house")

sys.path.insert(0, str(Path(__file__).parent))  # for services.py, which no folder of tests can import otherwise
import services  # noqa: E402

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_configure(config: pytest.Config) -> None:
    """The process that started the others, if there are others, owns the servers that tests share."""
    if not hasattr(config, "workerinput"):
        shared = Path(tempfile.mkdtemp(prefix="blocktrain-tests-", suffix=f"-{os.getpid()}"))
        shared.chmod(0o755)  # PostgreSQL runs as another user if this is root
        os.environ[services.SHARED] = str(shared)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and (shared := os.environ.pop(services.SHARED, None)):
        services.end_services(Path(shared))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector need not look at it, which takes a tenth of many tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def postgres() -> str:
    """The URL of a ledger without tables, in a real PostgreSQL."""
    return f"{services.service('postgres')['url']}?schema=test_{uuid.uuid4().hex}"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty folder in a bucket of a real S3 server, for this process and those that it starts."""
    for name, value in services.bucket_environment().items():
        monkeypatch.setenv(name, value)
    return f"s3://{services.BUCKET}/{uuid.uuid4().hex}"


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
    from playwright.sync_api import expect, sync_playwright

    patience_ms = 60_000  # the machine may be busy
    expect.set_options(timeout=patience_ms)
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # root has none
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=sandbox, timeout=patience_ms)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def sentences() -> bytes:
    return b"".join(b"%d bottles of beer on the wall, %d bottles of beer. " % (n, n) for n in range(400))


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory, sentences: bytes) -> Path:
    """The directory of a small model that has learned something; tests only read it. Its text is beside it."""
    from blocktrain.data.corpus import load_corpus
    from blocktrain.io.checkpoint import RunDirectory
    from blocktrain.spec import preset
    from blocktrain.train.run import train_run

    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.txt"
    text.write_bytes(sentences)
    spec = preset("tiny").with_(**{"corpus.source": str(text), "train.steps": 60})
    corpus = load_corpus(spec.corpus, spec.model.context)
    train_run(RunDirectory.create(folder / "run", spec, corpus.sha256), corpus)
    return folder / "run"


@pytest.fixture
def text(tmp_path: Path, sentences: bytes) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(sentences)
    return path


@pytest.fixture
def tiny(text: Path) -> Callable[..., RunSpec]:
    """The smallest run of an objective, with settings changed."""
    from blocktrain.spec import preset

    def build(objective: Any, **changes: Any) -> RunSpec:
        return preset("tiny").with_(objective=objective, **{"corpus.source": str(text), "train.steps": 5, **changes})

    return build
