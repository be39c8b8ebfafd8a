"""The servers that tests share: what somebody sees when one cannot start, and that none is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import services

SCRIPT = Path(services.__file__)


def test_a_server_that_cannot_start_says_why(tmp_path, monkeypatch):
    shared = tmp_path / f"shared-{os.getpid()}"
    (shared / "s3").mkdir(parents=True)
    (shared / "s3" / services.LOG).write_text("no port was free")
    (shared / "s3" / services.FAILED).write_text("it ended with code 1\nno port was free")
    monkeypatch.setenv(services.SHARED, str(shared))
    with pytest.raises(RuntimeError, match="the s3 server for tests did not start: it ended with code 1"):
        services.service("s3")


def test_a_server_ends_with_the_process_that_it_is_for():
    """Here that process has ended before: the server starts, finds nobody, and takes its files with it."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    shared = Path(tempfile.mkdtemp())
    shared.chmod(0o755)  # PostgreSQL runs as another user if this is root
    (shared / "postgres").mkdir()
    subprocess.run([sys.executable, SCRIPT, "postgres", shared / "postgres", str(gone.pid)], check=True)
    assert not shared.exists()
