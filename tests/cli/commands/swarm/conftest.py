"""A coordinator in this process for the commands of a swarm. Real processes: tests/e2e/test_swarm_process.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blocktrain.cli.main import app
from blocktrain.http.server import Tls
from blocktrain.io.private import write_private
from blocktrain.spec import preset
from blocktrain.swarm.coordinator.server import OpenRun, opened, served_here
from blocktrain.swarm.initial_blocks import make_initial_blocks
from blocktrain.wire.invite import INVITE_FILE, Invite

SENTENCES = "".join(f"{n} bottles of beer on the wall, {n} bottles of beer. " for n in range(400))
TOKEN, ADMIN = "a-token-for-the-workers", "a-token-for-the-admin"
Serve = Callable[..., AbstractContextManager[Invite]]


@dataclass(frozen=True)
class Swarm:
    invite: str
    admin: str
    folder: Path
    text: Path
    home: Path


@contextmanager
def opened_tiny(folder: Path, text: Path, **changes: Any) -> Iterator[OpenRun]:
    settings = {"corpus.source": str(text), "train.steps": 4, "swarm.round_steps": 2}
    with opened(folder, preset("tiny").with_(**settings, **changes), None, None, make_initial_blocks) as run:
        run.ledger.add_access_token("worker", "worker", TOKEN, 0.0)
        yield run


@contextmanager
def served(run: OpenRun, tls: Tls | None = None) -> Iterator[Invite]:
    with served_here(run.coordinator, run.ledger, tls) as port:
        yield Invite("127.0.0.1", port, TOKEN, tls is not None, tls.fingerprint if tls else None)


@pytest.fixture
def serve() -> Serve:
    """Serves an open run; gives a worker's invite."""
    return served


@pytest.fixture
def open_tiny(tmp_path: Path, text: Path) -> Callable[..., AbstractContextManager[OpenRun]]:
    """Opens a new run of the smallest model, with settings changed."""
    return lambda **changes: opened_tiny(tmp_path / "state", text, **changes)


@pytest.fixture(scope="session")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A new run that is served."""
    folder = tmp_path_factory.mktemp("swarm")
    text = folder / "text.txt"
    text.write_text(SENTENCES)
    with opened_tiny(folder / "state", text) as run:
        run.ledger.add_access_token("admin", "admin", ADMIN, 0.0)
        with served(run) as invite:
            write_private(folder / "state" / INVITE_FILE, f"{invite}\n".encode())
            yield Swarm(str(invite), str(replace(invite, access_token=ADMIN)), folder / "state", text, folder / "home")


@pytest.fixture(scope="session")
def finished(swarm: Swarm) -> Swarm:
    """The same run after a worker's command has trained it to the end."""
    result = CliRunner().invoke(app, ["worker", swarm.invite, "--home", str(swarm.home), "--name", "ada"])
    assert result.exit_code == 0, result.stderr
    assert "finished: every phase is trained" in result.stderr
    return swarm
