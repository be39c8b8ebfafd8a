"""The chain of acknowledged updates: each one's facts are hashed together with the hash before. A ledger that lost or
changed an acknowledged update, for example with a damaged write-ahead log, no longer has the head that was noted beside
it. It knows no files but that note.
Next: updates.py, which adds to the chain; ../verify.py, which checks it."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass
from pathlib import Path

from blocktrain.errors import StorageError
from blocktrain.io.private import read_private, write_private
from blocktrain.swarm.ledger.records import NewUpdate

START = "0" * 64
HEAD_FILE = "ledger-head"


@dataclass(frozen=True)
class ChainHead:
    """The hash of everything up to the update with this number."""

    number: int
    sha256: str


def link(previous: str, number: int, update: NewUpdate) -> str:
    """The hash of an update's facts and of all before. What a merge changes later is no part of them."""
    facts = {name: getattr(update, name) for name in NewUpdate.__dataclass_fields__} | {"number": number}
    facts["base"] = {str(block): version for block, version in update.base.items()}
    return hashlib.sha256(f"{previous}\n{json.dumps(facts, sort_keys=True)}".encode()).hexdigest()


class NotedHead:
    """The newest head, in a small file beside the ledger. It is written before the receipt is sent. Threads may share
    it."""

    def __init__(self, path: Path) -> None:
        self.path, self._turn = path, threading.Lock()
        self._noted = self.read()

    def read(self) -> ChainHead | None:
        """None if there is no such file."""
        data = read_private(self.path)
        if data is None:
            return None
        try:
            number, sha256 = data.decode().split()
            return ChainHead(int(number), sha256)
        except ValueError:
            raise StorageError(
                f"{self.path} is damaged: check the run with blocktrain verify, and remove the file to go on"
            ) from None

    def note(self, head: ChainHead) -> None:
        """Another thread may have noted a later one already: that stays."""
        with self._turn:
            if self._noted is None or head.number > self._noted.number:
                write_private(self.path, f"{head.number} {head.sha256}\n".encode())
                self._noted = head
