"""Files of one JSON record per line that several processes may add to. A line that a crash cut short is left out.
Next: checkpoint.py, whose metrics and samples these are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from blocktrain.io.files import storage_errors
from blocktrain.io.tensor_file import read_file


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Appends one line with one write, so that lines of several processes do not mix."""
    with storage_errors(path), path.open("ab+", buffering=0) as file:
        file.write(_line_break_after_a_crash(file) + json.dumps(record).encode() + b"\n")


def read_records(path: Path) -> list[dict[str, Any]]:
    """In order; none if there is no file."""
    lines = read_file(path).splitlines() if path.exists() else []
    return [record for record in map(_parse_line, lines) if record is not None]


def _line_break_after_a_crash(file: Any) -> bytes:
    """A line break if the last line was cut short, so that the next record starts on its own line."""
    if file.tell() == 0:
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
