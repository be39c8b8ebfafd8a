"""The address file: how a command tells another process where it listens. It holds the address and the process id as
JSON and appears, whole, when the command accepts connections. No torch.
Next: cli/shared/stage_processes.py, cli/commands/demo/processes.py and fleet/supervisor.py, which start commands and
read their files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from blocktrain.io.private import read_private, write_private

POLL_S = 0.05  # between two looks for a file of a process that is starting


def write_address(path: Path | None, address: str) -> None:
    """Call it once connections are accepted. Does nothing where the user named no file."""
    if path is not None:
        write_private(path, json.dumps({"address": address, "pid": os.getpid()}).encode())


def read_address(path: Path, pid: int | None = None) -> str | None:
    """The address that process `pid` wrote, or any process without one; None while there is none. A file of an earlier
    process does not count."""
    found = _read(path)
    return str(found["address"]) if found and pid in (None, found.get("pid")) else None


def stage_file(path: Path, number: int) -> Path:
    """The address file of a stage of blocktrain serve, beside its own: serve.json, serve-stage-0.json"""
    return path.with_name(f"{path.stem}-stage-{number}{path.suffix}")


def read_pid(path: Path) -> int | None:
    """The process that wrote the file last; it may have ended since. None if there is no file."""
    pid = _read(path).get("pid")
    return None if pid is None else int(pid)


def _read(path: Path) -> dict[str, Any]:
    data = read_private(path)
    return dict(json.loads(data)) if data else {}
