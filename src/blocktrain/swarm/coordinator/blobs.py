"""Blobs: bytes stored under their own sha256, in a folder or a bucket, and uploads that continue where they broke off.
A blob is whole or absent, and safe when `put` or `keep` returns. It knows no tensors and no rounds.
Next: ../ledger/records.py, which says what the hashes stand for.

    blobs/<sha256>             whole; checked against its name when it is read
    uploads/<id>/<offset>      the parts of unfinished uploads; the id of one for a lease is <lease>/<sha256>
    staging/                   a folder's files before they are whole; a bucket needs none
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import SEEK_END
from mmap import mmap
from pathlib import Path
from tempfile import SpooledTemporaryFile, TemporaryFile
from typing import BinaryIO, TypeAlias, cast
from urllib.parse import urlsplit
from urllib.request import url2pathname
from weakref import WeakValueDictionary

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, from_url

from blocktrain.errors import BlobError, ConfigError, StorageError, UploadError
from blocktrain.io.files import mapped, mapped_file, put_in_place, sync_file, sync_folder
from blocktrain.swarm.coordinator.presigned import presigned_urls

MAX_OFFSET_DIGITS = 16
SEND_BYTES = 8 * 2**20  # of a large blob per request to a bucket; two requests run at once
CHUNK_BYTES = 2**19  # of a large blob that are read from a folder at once
SPOOLED_BYTES = 2**16  # of a part for a bucket that stay in memory while the rest arrives
WRONG_CLOCK = "RequestTimeTooSkewed"  # what S3 answers to a request from another time
BLOBS, UPLOADS, STAGING = "blobs", "uploads", "staging"

_SHA256 = re.compile("[0-9a-f]{64}")
# Refused, or there are none: then obstore asks the server that cloud machines have for them.
_NO_CREDENTIALS = re.compile("40[13] (Forbidden|Unauthorized)|/latest/api/token")
_UPLOAD_ID = re.compile("[0-9A-Za-z_-]{1,128}(/[0-9A-Za-z_-]{1,128})?")


Data: TypeAlias = bytes | memoryview
_FileState = tuple[int, int, int]  # bytes, nanoseconds of the last write, inode


@dataclass(frozen=True)
class Uploaded:
    """What has arrived of an upload."""

    id: str | None  # of what is stored of it; None if it came in one request
    data: memoryview
    file: tuple[Path, int] | None  # a file with all of it, and its inode: it can become the blob as it is


class Blobs:
    """A folder, or a bucket by URL (s3://, gs://, az://, …; credentials come from the environment as that service's own
    tools take them). Threads and processes may share it. `presigned`: workers get URLs to read and write in the bucket
    themselves; None: if the bucket limits what they write, and has TLS if their invite has (`tls`)."""

    def __init__(self, url_or_path: str | Path, *, presigned: bool | None = False, tls: bool = False) -> None:
        self.where = str(url_or_path)
        self._folder = _local_folder(url_or_path)
        self._checked: dict[str, _FileState | None] = {}  # the state of each file when its bytes were checked
        self._known_sizes: dict[str, int] = {}  # of blobs in a bucket: every lease names some
        self.damaged: set[str] = set()  # blobs that were found damaged when they were read
        self._mapped: WeakValueDictionary[tuple[str, _FileState | None], mmap] = (
            WeakValueDictionary()
        )  # while they are being read
        if self._folder is None:
            self._store = _bucket(self.where)
        else:
            with self._storage():
                for name in (BLOBS, UPLOADS, STAGING):
                    _make_folder(self._folder / name)
                sync_folder(self._folder)  # the process that made them may have been killed before
                self._store = LocalStore(self._folder)
        with self._storage():
            self._urls = presigned_urls(self._store, self.where, presigned, tls)

    @property
    def is_bucket(self) -> bool:
        return self._folder is None

    @property
    def direct_access(self) -> str:
        """Whether workers read and write the bucket themselves, as a sentence; empty for a folder."""
        if not self.is_bucket:
            return ""
        if self._urls is None:
            return "workers read and write the bucket through this coordinator"
        warning = "" if self._urls.limits_size else "; it does not limit what they write: not for strangers"
        return f"workers read and write the bucket directly, by presigned URLs{warning}"

    def download_url(self, sha256: str) -> str | None:
        """Where anybody may read this blob for a while; None if blobs are read through the coordinator."""
        if self._urls is None:
            return None
        with self._storage():
            return self._urls.download(_key(sha256))

    def upload_url(self, lease: str, num_bytes: int) -> str | None:
        """Where an upload of a lease may be put for a while, whole. A lease has one such place: however many URLs a
        worker asks for, it can store one update."""
        if self._urls is None:
            return None
        with self._storage():
            return self._urls.upload(_first_part(direct_id(lease)), num_bytes)

    def put(self, data: Data | Iterable[Data], sha256: str | None = None) -> str:
        """Stores the bytes, which may come as chunks, and returns their name. A caller that has just computed it may
        pass it. A repeat writes them again, and so repairs damage."""
        chunks = [data] if isinstance(data, bytes | memoryview) else list(data)
        sha256 = sha256 or _hash(chunks)
        self._write(_key(sha256), chunks)
        self._note(sha256)
        return sha256

    def _note(self, sha256: str) -> None:
        """Remembers that the file is right as it is now."""
        with self._reading(sha256):
            self._checked[sha256] = self._state(sha256)
        self.damaged.discard(sha256)

    def get(self, sha256: str) -> memoryview:
        """The bytes, checked against their name. A file that has not been written to since is not checked again."""
        with self._reading(sha256):
            state = self._state(sha256)
            data = self._shared(sha256, state)
        if state is not None and self._checked.get(sha256) == state and len(data) == state[0]:
            return data
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            self.damaged.add(sha256)
            raise BlobError(
                f"blob {sha256} in {self.where} is damaged ({len(data)} bytes with sha256 {found[:12]}…): "
                f"restore it from a copy, or have it uploaded again"
            )
        self._checked[sha256] = state
        self.damaged.discard(sha256)
        return data

    def _state(self, sha256: str) -> _FileState | None:
        """Of a file in a folder: changes with every write to it. None in a bucket."""
        if self._folder is None:
            return None
        stat = (self._folder / _key(sha256)).stat()
        return stat.st_size, stat.st_mtime_ns, stat.st_ino

    def _shared(self, sha256: str, state: _FileState | None) -> memoryview:
        """Mapped once for all concurrent readers: its pages count once, and a bucket is asked once."""
        if (there := self._mapped.get((sha256, state))) is not None:
            return memoryview(there)
        data = self._bytes(_key(sha256))
        if isinstance(data.obj, mmap):
            self._mapped[sha256, state] = data.obj
        return data

    def _bytes(self, key: str) -> memoryview:
        """Mapped from the file of a folder. From a bucket they are copied to a temporary file."""
        if self._folder is not None:
            return mapped(self._folder / key)
        with TemporaryFile() as file:
            for chunk in self._store.get(key).stream(min_chunk_size=SEND_BYTES):
                file.write(chunk)
            file.flush()
            return mapped_file(file)

    def stream(self, sha256: str, start: int, end: int) -> Iterator[bytes]:
        """Bytes start to end, or to the last one, in chunks that are read when they are asked for. The whole file is
        checked when it is first opened, and again when it was written to. A bucket checks its objects itself."""
        if self._folder is not None:
            self.get(sha256)
        num_bytes = self.size(sha256)
        if not 0 <= start <= min(end, num_bytes):
            raise BlobError(
                f"bytes {start} to {end} were asked of blob {sha256}, which has {num_bytes}: ask for some of these"
            )
        return self._chunks(sha256, start, min(end, num_bytes))

    def _chunks(self, sha256: str, start: int, end: int) -> Iterator[bytes]:
        with self._reading(sha256):
            if self._folder is None:
                for begin in range(start, end, SEND_BYTES):
                    yield bytes(self._store.get_range(_key(sha256), start=begin, end=min(begin + SEND_BYTES, end)))
                return
            with (self._folder / _key(sha256)).open("rb", buffering=0) as file:
                file.seek(start)
                while start < end and (chunk := file.read(min(CHUNK_BYTES, end - start))):
                    start += len(chunk)
                    yield chunk

    def size(self, sha256: str) -> int:
        if (known := self._known_sizes.get(sha256)) is not None:
            return known
        with self._reading(sha256):
            num_bytes = self._size(_key(sha256))
        if self.is_bucket:
            self._known_sizes[sha256] = num_bytes
        return num_bytes

    def whole_size(self, sha256: str) -> int:
        """Of the blob that the name stands for: a file that was cut off is found damaged, as by `get`."""
        with self._reading(sha256):
            state = self._state(sha256)
        if state is None:
            return self.size(sha256)
        if self._checked.get(sha256) != state:
            self.get(sha256)
        return state[0]

    def exists(self, sha256: str) -> bool:
        with self._storage(), suppress(FileNotFoundError):
            self._size(_key(sha256))
            return True
        return False

    def is_whole(self, sha256: str) -> bool:
        """Whether it is there and was not found damaged."""
        return sha256 not in self.damaged and self.exists(sha256)

    def _size(self, key: str) -> int:
        """Of a folder, without obstore: that takes a hundredth of the time."""
        if self._folder is not None:
            return os.stat(f"{self._folder}/{key}").st_size  # noqa: PTH116 (every lease names blobs with their sizes)
        return int(self._store.head(key)["size"])

    def delete(self, sha256: str) -> None:
        """Deleting a blob that is not there is no error: it may be the second try."""
        self._checked.pop(sha256, None)
        self._known_sizes.pop(sha256, None)
        self._delete(_key(sha256))

    def iterate(self, before_s: float | None = None) -> Iterator[str]:
        """The names of the blobs that were last put before that time. A younger one may be about to be recorded."""
        for key, _, written_s in self._list(BLOBS):
            name = key.removeprefix(f"{BLOBS}/")
            if _SHA256.fullmatch(name) and (before_s is None or written_s < before_s):
                yield name

    @contextmanager
    def receiving(self) -> Iterator[BinaryIO]:
        """A file for the bytes of a part while they arrive, to be appended then: many may be sending, and slowly."""
        with self._storage():
            if self._folder is None:
                with SpooledTemporaryFile(SPOOLED_BYTES) as spooled:
                    yield cast("BinaryIO", spooled)
                return
            path = self._folder / STAGING / uuid.uuid4().hex
            try:
                with path.open("x+b") as file:
                    yield file
            finally:
                path.unlink(missing_ok=True)

    def append(self, upload_id: str, offset: int, part: bytes | BinaryIO) -> int:
        """Stores the next part of an upload and returns the number of bytes that are there. An upload has one sender.
        Parts are not synced: a power cut may lose them, and then they are asked for again."""
        if isinstance(part, bytes):
            with self.receiving() as file:
                file.write(part)
                return self.append(upload_id, offset, file)
        expected = self.received(upload_id)
        if offset != expected:
            raise UploadError(
                f"upload {upload_id} has {expected} bytes and a part for offset {offset} came: "
                f"continue at offset {expected}",
                expected_offset=expected,
            )
        if num_bytes := part.seek(0, SEEK_END):
            self._put_part(f"{_upload(upload_id)}/{offset:0{MAX_OFFSET_DIGITS}d}", part)
        return offset + num_bytes

    def _put_part(self, key: str, part: BinaryIO) -> None:
        if self._folder is None:
            part.seek(0)
            self._write(key, iter(lambda: part.read(SEND_BYTES), b""))
            return
        with self._storage():
            part.flush()
            (self._folder / key).parent.mkdir(parents=True, exist_ok=True)
            os.replace(part.name, self._folder / key)  # noqa: PTH105 (the call that the tests make fail)

    def received(self, upload_id: str) -> int:
        """Bytes from the start without a gap; 0 for an upload that was never begun."""
        return sum(num_bytes for _, num_bytes in self._parts(upload_id))

    def uploaded(self, upload_id: str, most_bytes: int | None = None) -> Uploaded:
        """What has arrived of an upload, to be checked before it becomes a blob. More than this is discarded unread:
        who writes to a bucket directly can write too much."""
        parts = self._parts(upload_id)
        if most_bytes is not None and sum(num_bytes for _, num_bytes in parts) > most_bytes:
            self.discard(upload_id)
            parts = []
        keys = [key for key, _ in parts]
        with self._storage():
            if len(keys) != 1:
                return Uploaded(upload_id, memoryview(b"".join(self._bytes(key) for key in keys)), None)
            path = self._folder / keys[0] if self._folder is not None else None
            file = (path, path.stat().st_ino) if path is not None else None
            return Uploaded(upload_id, self._bytes(keys[0]), file)

    def whole(self, part: BinaryIO) -> Uploaded:
        """A whole upload that came in one request: a file of `receiving`, which must still be open when it is kept."""
        with self._storage():
            part.flush()
            data = mapped_file(part)
            file = None if self._folder is None else (Path(part.name), os.fstat(part.fileno()).st_ino)
            return Uploaded(None, data, file)

    def keep(self, upload: Uploaded, sha256: str) -> None:
        """The upload becomes the blob of this name, which its bytes were checked against."""
        if not (upload.file and self._renamed(*upload.file, _key(sha256))):
            self._write(_key(sha256), [upload.data])
        self._note(sha256)
        if upload.id is not None:
            self.discard(upload.id)

    def _renamed(self, path: Path, inode: int, key: str) -> bool:
        """Whether the file is the blob now, and still the one that was checked: then no second write is needed."""
        assert self._folder is not None
        with self._storage(), suppress(FileNotFoundError):
            sync_file(path)
            os.utime(path)  # young again: it may be about to be recorded, however long ago it arrived
            os.replace(path, self._folder / key)  # noqa: PTH105 (the call that the tests make fail)
            sync_folder(self._folder / BLOBS)
            return (self._folder / key).stat().st_ino == inode
        return False

    def discard(self, upload_id: str) -> None:
        prefix = _upload(upload_id)
        for key, _, _ in list(self._list(prefix)):
            self._delete(key)
        self._remove_folder(prefix)

    def uploads_of(self, lease: str) -> list[str]:
        """The ids of the unfinished uploads of a lease."""
        folder = _upload(_lease_id(lease))
        return sorted({key.rpartition("/")[0].removeprefix(f"{UPLOADS}/") for key, _, _ in self._list(folder)})

    def leases_with_uploads(self, leases: Iterable[str]) -> set[str]:
        """Those that have an unfinished upload, by one listing."""
        there = {key.split("/")[1] for key, _, _ in self._list(UPLOADS)}
        return {lease for lease in leases if _lease_id(lease) in there}

    def used_bytes(self) -> int:
        """Of all blobs and uploads."""
        return sum(num_bytes for folder in (BLOBS, UPLOADS, STAGING) for _, num_bytes, _ in self._list(folder))

    def disk_bytes(self) -> tuple[int, int] | None:
        """The size of the folder's disk, and what is free of it. None in a bucket."""
        if self._folder is None:
            return None
        with self._storage():
            usage = shutil.disk_usage(self._folder)
            return usage.total, usage.free

    def discard_uploads(self, before_s: float) -> int:
        """Deletes uploads that have not been continued since. Returns the number of deleted files."""
        stale = [x for folder in (UPLOADS, STAGING) for x, _, written_s in self._list(folder) if written_s < before_s]
        for key in stale:
            self._delete(key)
        for folder in {key.rpartition("/")[0] for key in stale} - {STAGING}:
            self._remove_folder(folder)
        return len(stale)

    def _parts(self, upload_id: str) -> list[tuple[str, int]]:
        """Key and size of the parts that follow each other from offset 0."""
        prefix, parts, position = _upload(upload_id), [], 0
        for key, num_bytes, _ in sorted(self._list(prefix)):
            offset = key.rpartition("/")[2]
            if offset.isdecimal() and int(offset) == position:
                parts.append((key, num_bytes))
                position += num_bytes
        return parts

    def _write(self, key: str, chunks: Iterable[Data]) -> None:
        """An object of a bucket appears whole when its writer is closed. Files of obstore would be whole, but not
        synced."""
        with self._storage():
            if self._folder is not None:
                _make_folder((self._folder / key).parent)
                put_in_place(self._folder / key, chunks, self._folder / STAGING / uuid.uuid4().hex)
                return
            writer = obstore.open_writer(self._store, key, buffer_size=SEND_BYTES, max_concurrency=2)
            for chunk in chunks:
                writer.write(chunk)
            writer.close()

    def _list(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        """Key, bytes and time of the last write of everything below. Of a folder, without obstore, as for sizes."""
        with self._storage():
            if self._folder is not None:
                yield from _files_below(self._folder / prefix, prefix)
                return
            for metas in self._store.list(prefix):
                for meta in metas:
                    yield meta["path"], meta["size"], meta["last_modified"].timestamp()

    def _delete(self, key: str) -> None:
        with self._storage(), suppress(FileNotFoundError):
            self._store.delete(key)

    def _remove_folder(self, name: str) -> None:
        if self._folder is not None:
            with suppress(OSError):  # gone already, or a part has just arrived
                (self._folder / name).rmdir()
                if name.count("/") > 1:  # of a lease, which may have no other upload
                    (self._folder / name).parent.rmdir()

    @contextmanager
    def _reading(self, sha256: str) -> Iterator[None]:
        with self._storage():
            try:
                yield
            except FileNotFoundError:
                self._known_sizes.pop(sha256, None)
                raise BlobError(
                    f"blob {sha256} is not in {self.where}: restore it from a copy, or have it uploaded again"
                ) from None

    @contextmanager
    def _storage(self) -> Iterator[None]:
        """Raises errors of the operating system and of the bucket as StorageError."""
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
        raise BlobError(f"{upload_id!r} names no upload: give one or two words of letters, digits, _ and -, like a/b")
    return f"{UPLOADS}/{upload_id}"


def _first_part(upload_id: str) -> str:
    return f"{_upload(upload_id)}/{0:0{MAX_OFFSET_DIGITS}d}"


def upload_id(lease: str, sha256: str) -> str:
    return f"{_lease_id(lease)}/{sha256}"


def direct_id(lease: str) -> str:
    """Of what a worker puts into the bucket itself, whatever its bytes are."""
    return f"{_lease_id(lease)}/direct"


def _lease_id(lease: str) -> str:
    return hashlib.sha256(lease.encode()).hexdigest()[:32]


def _hash(chunks: Iterable[Data]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


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


def _sentence(error: Exception) -> str:
    """The first of the many lines of an obstore error, with the message that a bucket's XML holds."""
    text = str(getattr(error, "strerror", None) or error)
    message = re.search("<Message>(.{1,300}?)</Message>", text, re.DOTALL)
    first = text.partition("\n")[0].partition("<?xml")[0].rstrip(".: ")
    return f"{first}: {message[1].rstrip('.')}" if message else first


def _remedy(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space on that disk and try again"
    if WRONG_CLOCK in str(error):
        return "set the clock of this machine, which signs requests with its time"
    if _NO_CREDENTIALS.search(str(error)):
        return (
            "give credentials that may read, write, list and delete there in the environment (for S3 AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY)"
        )
    return "make it reachable and writable and try again"
