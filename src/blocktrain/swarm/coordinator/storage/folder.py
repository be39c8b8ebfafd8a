"""A folder in which blobs are stored: bytes under keys like `blobs/<sha256>`. What is written is whole and synced, or
absent. It knows no hashes and no uploads. Its methods raise errors of the operating system and of obstore, also
FileNotFoundError (errors.py makes them ours). Next: bucket.py, which has the same methods; ../blobs.py."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeAlias
from urllib.parse import urlsplit
from urllib.request import url2pathname

from obstore.store import LocalStore

from blocktrain.io.files import mapped, put_in_place, sync_file, sync_folder
from blocktrain.swarm.coordinator.storage.errors import storage_errors

CHUNK_BYTES = 2**19  # of a large blob that are read at once
STAGING = "staging"  # files before they are whole

Data: TypeAlias = bytes | memoryview
FileState: TypeAlias = tuple[int, int, int]  # bytes, nanoseconds of the last write, inode


def is_folder(url_or_path: str | Path) -> bool:
    text = str(url_or_path)
    return isinstance(url_or_path, Path) or "://" not in text or text.startswith("file://")


class Folder:
    uses_threads = True  # whether several may write at the same time

    def __init__(self, url_or_path: str | Path, subfolders: Iterable[str] = ()) -> None:
        self.where = text = str(url_or_path)
        is_path = isinstance(url_or_path, Path) or "://" not in text
        self._path = Path(url_or_path).absolute() if is_path else Path(url2pathname(urlsplit(text).path))
        with storage_errors(self.where):
            for name in (*subfolders, STAGING):
                _make_folder(self._path / name)
            sync_folder(self._path)  # the process that made them may have been killed before
            self.store = LocalStore(self._path)

    def state(self, key: str) -> FileState:
        """Changes with every write to the file."""
        stat = self._stat(key)
        return stat.st_size, stat.st_mtime_ns, stat.st_ino

    def size(self, key: str) -> int:
        """Without obstore: that takes a hundredth of the time."""
        return self._stat(key).st_size

    def _stat(self, key: str) -> os.stat_result:
        return os.stat(f"{self._path}/{key}")  # noqa: PTH116 (every request looks at some blobs)

    def read(self, key: str) -> memoryview:
        """The bytes, mapped."""
        return mapped(self._path / key)

    def chunks(self, key: str, start: int, end: int) -> Iterator[bytes]:
        with (self._path / key).open("rb", buffering=0) as file:
            file.seek(start)
            while start < end and (chunk := file.read(min(CHUNK_BYTES, end - start))):
                start += len(chunk)
                yield chunk

    def write(self, key: str, chunks: Iterable[Data]) -> None:
        """Not by obstore: its files would be whole, but not synced."""
        _make_folder((self._path / key).parent)
        self.write_as(lambda: key, chunks)

    def write_as(self, key: Callable[[], str], chunks: Iterable[Data]) -> None:
        """The same for a key, of a folder that is there, that is found while the bytes are written."""
        put_in_place(lambda: self._path / key(), chunks, self._path / STAGING / uuid.uuid4().hex)

    def sync(self, key: str) -> None:
        """Of a file that may have been replaced, or be gone."""
        with suppress(FileNotFoundError):
            sync_file(self._path / key)

    def list(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """Key, bytes and time of the last write of everything below. Without obstore, as for sizes."""
        return _files_below(self._path / prefix, prefix)

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def remove_folder(self, name: str) -> None:
        with suppress(OSError):  # gone already, or a part has just arrived
            (self._path / name).rmdir()
            if name.count("/") > 1:  # of a lease, which may have no other upload
                (self._path / name).parent.rmdir()

    @contextmanager
    def receiving(self) -> Iterator[BinaryIO]:
        """A file for bytes while they arrive."""
        path = self._path / STAGING / uuid.uuid4().hex
        try:
            with path.open("x+b") as file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def keep_received(self, key: str, received: BinaryIO) -> None:
        """The file of `receiving` gets this key. It is not synced."""
        received.flush()
        (self._path / key).parent.mkdir(parents=True, exist_ok=True)
        os.replace(received.name, self._path / key)  # noqa: PTH105 (the call that the tests make fail)

    def arrived(self, file: BinaryIO) -> tuple[str, int] | None:
        """Key and inode of the file of `receiving`, while it is open."""
        return f"{STAGING}/{Path(file.name).name}", os.fstat(file.fileno()).st_ino

    def inode(self, key: str) -> int | None:
        return (self._path / key).stat().st_ino

    def rename(self, key: str, inode: int, new_key: str, is_synced: bool = False) -> bool:
        """Synced. Whether this file has the new key now: it may have been replaced, or be gone. Where its bytes
        `is_synced` already, they are not synced again: that would wait for the disk too."""
        with suppress(FileNotFoundError):
            path, new_path = self._path / key, self._path / new_key
            if not is_synced:
                sync_file(path)
            os.utime(path)  # young again: it may be about to be recorded, however long ago it arrived
            os.replace(path, new_path)  # noqa: PTH105 (the call that the tests make fail)
            sync_folder(new_path.parent)
            return new_path.stat().st_ino == inode
        return False

    def disk_bytes(self) -> tuple[int, int] | None:
        """The size of the folder's disk, and what is free of it."""
        usage = shutil.disk_usage(self._path)
        return usage.total, usage.free


def _files_below(folder: Path, prefix: str) -> Iterator[tuple[str, int, float]]:
    """Files that are deleted meanwhile are left out."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files_below(folder / entry.name, f"{prefix}/{entry.name}")
                continue
            with suppress(FileNotFoundError):
                stat = entry.stat()
                yield f"{prefix}/{entry.name}", stat.st_size, stat.st_mtime


def _make_folder(path: Path) -> None:
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)
