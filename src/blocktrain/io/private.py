"""Files that only their owner may read, such as keys and invites; and where a user's cache is.
Next: swarm/coordinator/server.py, which keeps a run's invites; cli/commands/swarm/worker.py, which keeps a key."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from blocktrain.errors import ConfigError, StorageError

OWNER_ONLY = 0o600
LEDGER_FILE = "ledger.db"  # in a coordinator's directory
MANIFEST_FILE = "manifest.json"  # in the directory of a model
METRICS_FILE = "metrics.jsonl"  # beside it, if the model was trained there


def write_private(path: Path, data: bytes) -> None:
    """The file appears whole, and no other user can read it at any moment."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, OWNER_ONLY), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise StorageError(
            f"{path} cannot be written ({error.strerror}): make its folder writable, or name another"
        ) from None


def read_private(path: Path) -> bytes | None:
    """None when it is not there."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): make it yours, or delete it") from None


def cache_home() -> Path:
    """What may be deleted at any time, but for a worker's key: XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "blocktrain"
