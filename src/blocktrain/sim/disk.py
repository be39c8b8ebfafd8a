"""The simulated disk of a run: real files in memory, and what a power cut, a full disk, an fsync that lies and a
misdirected write do to them. SQLite's own files are cut as its promises allow: what was synced stays, the rest of its
log is lost, whole or torn.
Next: machines.py, which opens ledger and blobs on it; ../swarm/coordinator/storage/folder.py."""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from weakref import WeakSet

from blocktrain.swarm.coordinator.blobs import BLOBS, UPLOADS
from blocktrain.swarm.coordinator.storage.folder import Data, Folder
from blocktrain.swarm.ledger.chain import HEAD_FILE
from blocktrain.swarm.ledger.database import LOCK_TIMEOUT_S, Database
from blocktrain.swarm.ledger.drivers.connection import Connection
from blocktrain.swarm.ledger.drivers.sqlite import SqliteConnection, SqliteFile
from blocktrain.swarm.ledger.ledger import Ledger

DISK_BYTES = 2**40
TORN_SHARE = 0.5  # of lost files of which a part is there after a power cut


class SimDisk:
    def __init__(self, folder: Path) -> None:
        self.folder, self._ledgers = folder, 0
        self.dates: dict[str, float] = {}  # key of a blob or part: when it was written
        self._unsynced: set[str] = set()  # keys that a power cut may take
        self._synced_wal_bytes, self._head_at_lie = 0, b""
        self.is_full, self.is_ledger_full, self.lies = False, False, False

    @property
    def ledger_path(self) -> Path:
        return self.folder / f"ledger-{self._ledgers}.db"

    @property
    def head_path(self) -> Path:
        return self.folder / HEAD_FILE

    @property
    def _wal(self) -> Path:
        return self.ledger_path.with_name(f"{self.ledger_path.name}-wal")

    def require_room(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def wrote(self, key: str, synced: bool, at_s: float) -> None:
        self.dates[key] = at_s
        (self._unsynced.discard if synced and not self.lies else self._unsynced.add)(key)

    def deleted(self, key: str) -> None:
        self.dates.pop(key, None)
        self._unsynced.discard(key)

    def ledger_synced(self) -> None:
        """A synced transaction was kept."""
        if not self.lies:
            with suppress(FileNotFoundError):
                self._synced_wal_bytes = self._wal.stat().st_size

    def begin_to_lie(self) -> None:
        """From now on, fsync returns and does nothing."""
        if not self.lies:
            self.lies, self._head_at_lie = True, _bytes(self.head_path)

    def cut_power(self, draw: random.Random) -> None:
        """All machines are dead. What was not synced is lost, kept or torn; the ledger is opened at another path, since
        the dead process's SQLite may still tidy up the old one. A disk that lied keeps the blobs that the rest of the
        ledger names: without them nobody could go on."""
        wal = _bytes(self._wal)
        kept = wal[: draw.randint(min(self._synced_wal_bytes, len(wal)), len(wal))]
        garbage = draw.randbytes(draw.randrange(200)) if draw.random() < TORN_SHARE and len(kept) < len(wal) else b""
        before = self.ledger_path
        self._ledgers += 1
        shutil.copyfile(before, self.ledger_path)
        self._wal.write_bytes(kept + garbage)
        self._synced_wal_bytes = 0  # reading it below moves the log into the ledger
        for key in sorted(self._unsynced - self._named_blobs()):
            self._lose(self.folder / "blobs" / key, draw)
        if self.lies and draw.random() < 0.5:
            self.head_path.write_bytes(self._head_at_lie) if self._head_at_lie else self.head_path.unlink(
                missing_ok=True
            )
        self._unsynced.clear()
        self.lies = self.is_full = self.is_ledger_full = False

    def has_noted_head(self, ledger: sqlite3.Connection) -> bool:
        """Whether the ledger has the update that was noted beside it; also if none was."""
        number, _, sha256 = _bytes(self.head_path).decode().strip().partition(" ")
        row = ledger.execute("SELECT sha256 FROM chain WHERE number = ?", (int(number or 0),)).fetchone()
        return not number or (row is not None and row[0] == sha256)

    def _named_blobs(self) -> set[str]:
        with closing(sqlite3.connect(self.ledger_path)) as reader:
            versions = reader.execute("SELECT sha256, momentum_sha256, difference_sha256 FROM versions").fetchall()
            updates = reader.execute("SELECT id FROM updates").fetchall()
        return {f"{BLOBS}/{sha256}" for row in (*versions, *updates) for sha256 in row}

    def _lose(self, path: Path, draw: random.Random) -> None:
        fate, data = draw.random(), _bytes(path)
        if fate < 0.4:
            path.unlink(missing_ok=True)
        elif fate < 0.7 and data:
            path.write_bytes(data[: draw.randrange(len(data))])

    def misdirect(self, sha256: str, draw: random.Random) -> None:
        """Another write lands in this blob."""
        path = self.folder / "blobs" / BLOBS / sha256
        data = bytearray(_bytes(path))
        if data:
            start = draw.randrange(len(data))
            data[start : start + 16] = draw.randbytes(16)
            beside = path.with_name(f"{sha256}.other")
            beside.write_bytes(data[: draw.choice([len(data), start])])
            beside.replace(path)


class SimFolder(Folder):
    """The real folder on a simulated disk. `wall` is the clock of the machine that writes: files are dated with it."""

    uses_threads = False

    def __init__(self, disk: SimDisk, wall: Callable[[], float]) -> None:
        self._disk, self._wall = disk, wall
        super().__init__(disk.folder / "blobs", (BLOBS, UPLOADS))

    def write(self, key: str, chunks: Iterable[Data]) -> None:
        self._disk.require_room()
        super().write(key, chunks)
        self._disk.wrote(key, synced=True, at_s=self._wall())

    def keep_received(self, key: str, received: BinaryIO) -> None:
        self._disk.require_room()
        super().keep_received(key, received)
        self._disk.wrote(key, synced=False, at_s=self._wall())

    def arrived(self, file: BinaryIO) -> tuple[str, int] | None:
        self._disk.require_room()
        return super().arrived(file)

    def rename(self, key: str, inode: int, new_key: str, is_synced: bool = False) -> bool:
        is_renamed = super().rename(key, inode, new_key, is_synced)
        if is_renamed:
            self._disk.wrote(new_key, synced=True, at_s=self._wall())
        return is_renamed

    def delete(self, key: str) -> None:
        with suppress(FileNotFoundError):
            super().delete(key)
        self._disk.deleted(key)

    def list(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        for key, num_bytes, _ in sorted(super().list(prefix)):
            yield key, num_bytes, self._disk.dates.setdefault(key, self._wall())

    def disk_bytes(self) -> tuple[int, int] | None:
        return DISK_BYTES, 0 if self._disk.is_full else DISK_BYTES // 2


class SimDatabase(Database):
    """The real database. Its tables are in the template."""

    def __init__(self, disk: SimDisk) -> None:
        super().__init__(disk.ledger_path, None, LOCK_TIMEOUT_S)
        self.file = SimFile(disk, self._as_ours)


class SimFile(SqliteFile):
    def __init__(self, disk: SimDisk, as_ours: Callable[[Exception], Exception]) -> None:
        super().__init__(str(disk.ledger_path), LOCK_TIMEOUT_S, as_ours)
        self._disk, self._limited = disk, WeakSet[SqliteConnection]()

    def _connect(self) -> SqliteConnection:
        """The log is kept: a power cut may take its end."""
        connection = super()._connect()
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        return connection

    def begin(self, connection: SqliteConnection, for_writing: bool, synced: bool) -> None:
        """A full disk gives SQLite no new page. Who writes reads in the same transaction: a second connection would
        not see what was written, and many at once would wait for each other."""
        assert for_writing or not self.is_writing, "read in the transaction that this task is in"
        if self._disk.is_ledger_full or connection in self._limited:
            (pages,) = connection.execute("PRAGMA page_count").fetchone()
            connection.execute(f"PRAGMA max_page_count = {pages if self._disk.is_ledger_full else 2**30}")
            (self._limited.add if self._disk.is_ledger_full else self._limited.discard)(connection)
        super().begin(connection, for_writing, synced)


class SimLedger(Ledger):
    """The real ledger on a simulated disk. `between` is called before each of its transactions: other tasks may run
    there."""

    def __init__(self, disk: SimDisk, between: Callable[[], None]) -> None:
        self._use(SimDatabase(disk))
        self._between, self._disk = between, disk
        self._reading, self._writing = self._read, self._write

    def _read(self, single: bool = False) -> AbstractContextManager[Connection]:
        self._between()
        return self.database.quick_reading()

    @contextmanager
    def _write(self, synced: bool = True) -> Iterator[Connection]:
        self._between()
        with self.database.quick_writing(synced) as connection:
            yield connection
        if synced:
            self._disk.ledger_synced()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
