"""The wheel: built from the repository's files, installed into a fresh environment, it trains and serves a page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
pytestmark = pytest.mark.timeout(900)  # where torch is fetched: minutes on a busy machine


def run(*command: object, **options: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bin folder of a fresh environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    run(sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", folder / "dist", folder)
    (wheel,) = (folder / "dist").glob("blocktrain-*.whl")
    venv.create(folder / "fresh")
    python = folder / "fresh" / "bin" / "python"
    provide_torch(python)  # first and by itself: nothing else chooses its version
    link_requirements(wheel, packages_of(python))
    run(sys.executable, *PIP, "--python", python, "install", "--no-compile", wheel)
    yield python.parent
    shutil.rmtree(folder)


def provide_torch(python: Path) -> None:
    """The version that the Makefile pins, if another one is installed here."""
    pinned = re.search(r"^TORCH := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    if f"torch=={metadata.version('torch').partition('+')[0]}" != pinned:
        run(sys.executable, *PIP, "--python", python, "install", "--no-compile", pinned)


def packages_of(python: Path) -> Path:
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


def link_requirements(wheel: Path, there: Path) -> None:
    """What the wheel declares, and what that declares, as links to the packages that are installed here: pip takes
    them for installed ones, and fetches what is missing. What the wheel does not declare is not there."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        declared = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist")
    waiting, seen = [(line, "") for line in declared], set[tuple[str, str]]()
    while waiting:
        line, extra = waiting.pop()
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            continue
        for asked in {"", *wanted.extras} - {old for name, old in seen if name == wanted.name}:
            seen.add((wanted.name, asked))
            with suppress(metadata.PackageNotFoundError):
                found = metadata.distribution(wanted.name)
                link(found, there)
                waiting += [(each, asked) for each in found.requires or ()]


def link(found: metadata.Distribution, there: Path) -> None:
    """Unless it has been fetched."""
    if any(metadata.distributions(name=found.name, path=[str(there)])):
        return
    for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        if not (there / name).exists():  # some packages share a folder
            (there / name).symlink_to(found.locate_file(name))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, sentences: bytes) -> Path:
    """A small corpus: what is tested is the package, not the training."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_bytes(sentences)
    return path


@pytest.fixture(scope="module")
def trained(installed: Path, text: Path) -> Path:
    command = ["train", "--preset", "tiny", "--corpus", text, "--set", "train.steps=2", "--out", "run"]
    run(installed / "blocktrain", *command, cwd=text.parent)
    return text.parent / "run"


@contextmanager
def coordinator(installed: Path, text: Path, folder: Path) -> Iterator[str]:
    """A coordinator of the installed package; gives the URL of its dashboard."""
    command = [installed / "blocktrain", "coordinator", "--preset", "tiny", "--corpus", text, "--dir", folder / "swarm"]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            invited = process.stdout.readline()  # printed when it listens
            yield "http://" + re.search(r"bt://([^/]+)/", invited)[1]
        finally:
            process.terminate()


def test_the_wheel_trains_a_model(trained):
    assert "block-0-" in " ".join(path.name for path in trained.iterdir())


def test_the_wheel_has_what_the_pages_need(installed, text, tmp_path):
    with coordinator(installed, text, tmp_path) as url:
        page = httpx.get(url, timeout=PATIENCE_S)
        assert "<title>" in page.text
        for path in re.findall(r'(?:src|href)="(/page/[^"]+)"', page.text):
            assert httpx.get(f"{url}{path}", timeout=PATIENCE_S).status_code == 200, path
    code = "from importlib.resources import files; print(files('blocktrain.http') / 'static' / 'playground')"
    playground = Path(run(installed / "python", "-c", code).strip())
    assert {"index.html", "playground.js", "playground.css"} <= {path.name for path in playground.iterdir()}


def test_what_is_an_extra_is_named_when_it_is_missing(installed, trained):
    command = [str(installed / "blocktrain"), "export", "run", "--hf", "hf"]
    refused = subprocess.run(command, capture_output=True, text=True, cwd=trained.parent)
    assert refused.returncode == 2
    assert "pip install 'blocktrain[hf]'" in " ".join(refused.stderr.split())
