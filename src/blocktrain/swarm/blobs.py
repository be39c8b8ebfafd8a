"""Blobs: bytes kept under their own sha256, in a folder or a bucket, and uploads that go on where they broke. A blob is
whole or absent, and safe when `put` or `finish` returns. Knows no tensors and no rounds.
Next: ledger.py, which says what the hashes stand for.

    blobs/<sha256>             appear whole: what a blob's name promises is checked when it is read
    uploads/<id>/<offset>      the parts of unfinished uploads
    staging/                   a folder's files before they are whole; a bucket needs none
"""

from __future__ import annotations

import errno
import hashlib
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from blocktrain.errors import BlobError, ConfigError, StorageError, UploadError
from blocktrain.files import put_in_place, sync_folder

MAX_OFFSET_DIGITS = 16
SEND_BYTES = 8 * 2**20  # of a large blob that travel to a bucket at once, twice over
BLOBS, UPLOADS, STAGING = "blobs", "uploads", "staging"

_SHA256 = re.compile("[0-9a-f]{64}")
_UPLOAD_ID = re.compile("[0-9A-Za-z_-]{1,128}")


_FileState = tuple[int, int, int]  # bytes, nanoseconds of the last write, inode


@dataclass(frozen=True)
class _Part:
    key: str
    offset: int
    num_bytes: int


class Blobs:
    """A folder, or a bucket by URL (s3://, gs://, az://, …; credentials come from the environment as that service's own
    tools take them). Threads and processes may share it."""

    def __init__(self, url_or_path: str | Path) -> None:
        self.where = str(url_or_path)
        self._folder = _local_folder(url_or_path)
        self._checked: dict[str, _FileState | None] = {}  # what files were like when their bytes were right
        if self._folder is None:
            self._store = _bucket(self.where)
        else:
            with self._storage():
                for name in (BLOBS, UPLOADS, STAGING):
                    _make_folder(self._folder / name)
                sync_folder(self._folder)  # should whoever made them have been killed before
                self._store = LocalStore(self._folder)

    def put(self, data: bytes, sha256: str | None = None) -> str:
        """Keeps the bytes and gives their name, which whoever has just computed it may give. Again costs a write, and
        mends what was damaged."""
        sha256 = sha256 or hashlib.sha256(data).hexdigest()
        self._write(_key(sha256), [data])
        with self._reading(sha256):
            self._checked[sha256] = self._state(sha256)
        return sha256

    def get(self, sha256: str) -> bytes:
        """The bytes, checked against their name; of a file that nobody has written to since they were, not again."""
        with self._reading(sha256):
            state = self._state(sha256)
            data = self._bytes(_key(sha256))
        if state is not None and self._checked.get(sha256) == state and len(data) == state[0]:
            return data
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            raise BlobError(
                f"blob {sha256} in {self.where} is damaged ({len(data)} bytes with sha256 {found[:12]}…): "
                f"restore it from a copy, or have it uploaded again"
            )
        self._checked[sha256] = state
        return data

    def _state(self, sha256: str) -> _FileState | None:
        """Of a file in a folder: another one after every write to it. None in a bucket."""
        if self._folder is None:
            return None
        stat = (self._folder / _key(sha256)).stat()
        return stat.st_size, stat.st_mtime_ns, stat.st_ino

    def _bytes(self, key: str) -> bytes:
        """A folder is read itself: a store's answer is copied twice."""
        if self._folder is not None:
            return (self._folder / key).read_bytes()
        return bytes(self._store.get(key).bytes())

    def get_range(self, sha256: str, start: int, end: int) -> bytes:
        """Bytes start to end, or to the last one. Not checked: only the whole can be."""
        num_bytes = self.size(sha256)
        if not 0 <= start <= min(end, num_bytes):
            raise BlobError(
                f"bytes {start} to {end} were asked of blob {sha256}, which has {num_bytes}: ask for some of these"
            )
        end = min(end, num_bytes)
        if start == end:
            return b""
        with self._reading(sha256):
            if self._folder is None:
                return bytes(self._store.get_range(_key(sha256), start=start, end=end))
            with (self._folder / _key(sha256)).open("rb") as file:
                file.seek(start)
                return file.read(end - start)

    def size(self, sha256: str) -> int:
        with self._reading(sha256):
            return self._size(_key(sha256))

    def exists(self, sha256: str) -> bool:
        with self._storage(), suppress(FileNotFoundError):
            self._size(_key(sha256))
            return True
        return False

    def _size(self, key: str) -> int:
        """A folder is asked itself: it answers in a hundredth of the time."""
        if self._folder is not None:
            return (self._folder / key).stat().st_size
        return int(self._store.head(key)["size"])

    def delete(self, sha256: str) -> None:
        """Deleting what is not there is no error: it may be the second try."""
        self._checked.pop(sha256, None)
        self._delete(_key(sha256))

    def iterate(self, before_s: float | None = None) -> Iterator[str]:
        """The names of the blobs that were last put before that time: a younger one may belong to something that is
        just about to be recorded."""
        for key, _, written_s in self._list(BLOBS):
            name = key.removeprefix(f"{BLOBS}/")
            if _SHA256.fullmatch(name) and (before_s is None or written_s < before_s):
                yield name

    def append(self, upload_id: str, offset: int, data: bytes | Iterator[bytes]) -> int:
        """Keeps the next part of an upload and gives the number of bytes that are there. An upload has one sender.
        Parts are not synced: a power cut may take them, and then they are asked for again."""
        expected = self.received(upload_id)
        if offset != expected:
            raise UploadError(
                f"upload {upload_id} has {expected} bytes and a part for offset {offset} came: "
                f"continue at offset {expected}",
                expected_offset=expected,
            )
        chunks, end = iter([data]) if isinstance(data, bytes) else data, offset

        def counted() -> Iterator[bytes]:
            nonlocal end
            for chunk in chain([first], chunks):
                end += len(chunk)
                yield chunk

        if first := next(chunks, b""):
            self._write(f"{_upload(upload_id)}/{offset:0{MAX_OFFSET_DIGITS}d}", counted(), synced=False)
        return end

    def received(self, upload_id: str) -> int:
        """Bytes from the start without a gap; 0 for an upload that nobody began."""
        return sum(part.num_bytes for part in self._parts(upload_id))

    def uploaded(self, upload_id: str) -> bytes:
        """What has come of an upload, to be judged before it becomes a blob."""
        return b"".join(self._read(self._parts(upload_id)))

    def finish(self, upload_id: str, sha256: str, size_bytes: int) -> str:
        """The parts become the blob, if they are what was announced. May be called again after a crash at any point."""
        key, parts = _key(sha256), self._parts(upload_id)
        received = sum(part.num_bytes for part in parts)
        if received > size_bytes:
            self.discard(upload_id)
            raise _start_again(upload_id, f"has {received} bytes where {size_bytes} were announced")
        if received == size_bytes:
            self._require_hash(parts, upload_id, sha256)
            self._write(key, self._read(parts))
        elif not (self.exists(sha256) and self.size(sha256) == size_bytes):
            raise UploadError(
                f"upload {upload_id} has {received} of {size_bytes} bytes: continue at offset {received}",
                expected_offset=received,
            )
        self.discard(upload_id)
        return sha256

    def discard(self, upload_id: str) -> None:
        prefix = _upload(upload_id)
        for key, _, _ in list(self._list(prefix)):
            self._delete(key)
        self._remove_folder(prefix)

    def discard_uploads(self, before_s: float) -> int:
        """Forgets what nobody has continued since; gives the number of files that went."""
        stale = [x for folder in (UPLOADS, STAGING) for x, _, written_s in self._list(folder) if written_s < before_s]
        for key in stale:
            self._delete(key)
        for folder in {key.rpartition("/")[0] for key in stale} - {STAGING}:
            self._remove_folder(folder)
        return len(stale)

    def _parts(self, upload_id: str) -> list[_Part]:
        """The parts that follow each other from offset 0."""
        prefix, parts, position = _upload(upload_id), [], 0
        for key, num_bytes, _ in sorted(self._list(prefix)):
            offset = key.rpartition("/")[2]
            if offset.isdecimal() and int(offset) == position:
                parts.append(_Part(key, position, num_bytes))
                position += num_bytes
        return parts

    def _read(self, parts: list[_Part]) -> Iterator[bytes]:
        """One part in memory at a time."""
        for part in parts:
            with self._storage():
                data = self._bytes(part.key)
            yield data

    def _require_hash(self, parts: list[_Part], upload_id: str, sha256: str) -> None:
        """Before the blob is begun: a bucket bills for large objects that were begun and never completed."""
        digest = hashlib.sha256()
        for data in self._read(parts):
            digest.update(data)
        if digest.hexdigest() != sha256:
            self.discard(upload_id)
            raise _start_again(upload_id, f"has sha256 {digest.hexdigest()} where {sha256} was announced")

    def _write(self, key: str, chunks: Iterable[bytes], synced: bool = True) -> None:
        """A bucket's object appears whole when its writer is closed. obstore's files are whole too, but not synced."""
        with self._storage():
            if self._folder is not None:
                _make_folder((self._folder / key).parent)
                put_in_place(self._folder / key, chunks, self._folder / STAGING / uuid.uuid4().hex, synced=synced)
                return
            writer = obstore.open_writer(self._store, key, buffer_size=SEND_BYTES, max_concurrency=2)
            for chunk in chunks:
                writer.write(chunk)
            writer.close()

    def _list(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """Key, bytes and time of the last write of everything below."""
        with self._storage():
            for metas in self._store.list(prefix):
                for meta in metas:
                    yield meta["path"], meta["size"], meta["last_modified"].timestamp()

    def _delete(self, key: str) -> None:
        with self._storage(), suppress(FileNotFoundError):
            self._store.delete(key)

    def _remove_folder(self, name: str) -> None:
        if self._folder is not None:
            with suppress(OSError):  # gone already, or a part has just come
                (self._folder / name).rmdir()

    @contextmanager
    def _reading(self, sha256: str) -> Iterator[None]:
        with self._storage():
            try:
                yield
            except FileNotFoundError:
                raise BlobError(
                    f"blob {sha256} is not in {self.where}: restore it from a copy, or have it uploaded again"
                ) from None

    @contextmanager
    def _storage(self) -> Iterator[None]:
        """The operating system's and the bucket's refusals as StorageError."""
        try:
            yield
        except (OSError, BaseError) as error:
            raise StorageError(f"{self.where}: {_sentence(error)}: {_remedy(error)}") from None


def _local_folder(url_or_path: str | Path) -> Path | None:
    text = str(url_or_path)
    if isinstance(url_or_path, Path) or "://" not in text:
        return Path(url_or_path).absolute()
    return Path(url2pathname(urlsplit(text).path)) if text.startswith("file://") else None


def _bucket(url: str) -> ObjectStore:
    try:
        return from_url(url)
    except (BaseError, ValueError) as error:
        raise ConfigError(
            f"{url} cannot hold blobs ({_sentence(error)}): give a folder or a URL like s3://bucket/run, and the "
            f"service's settings in its environment variables"
        ) from None


def _key(sha256: str) -> str:
    if not _SHA256.fullmatch(sha256):
        raise BlobError(f"{sha256!r} names no blob: give the 64 lower-case hexadecimal digits of a sha256")
    return f"{BLOBS}/{sha256}"


def _upload(upload_id: str) -> str:
    if not _UPLOAD_ID.fullmatch(upload_id):
        raise BlobError(f"{upload_id!r} names no upload: give 1 to 128 letters, digits, _ and -")
    return f"{UPLOADS}/{upload_id}"


def _start_again(upload_id: str, what: str) -> UploadError:
    return UploadError(f"upload {upload_id} {what}: it was discarded, send it again from offset 0", expected_offset=0)


def _make_folder(path: Path) -> None:
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def _sentence(error: Exception) -> str:
    """Of the many lines that obstore gives, the first."""
    return str(getattr(error, "strerror", None) or error).partition("\n")[0].rstrip(".")


def _remedy(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space on that disk and try again"
    return "make it reachable and writable and try again"
