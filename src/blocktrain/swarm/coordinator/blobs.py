"""Blobs: bytes stored under their own sha256, in a folder or a bucket, and uploads that continue where they broke off.
A blob is whole or absent, and safe when `put` or `keep` returns. It knows no tensors and no rounds.
Next: storage/folder.py, where the bytes are; ../ledger/records.py, which says what the hashes stand for.

    blobs/<sha256>             whole; checked against its name when it is read
    uploads/<id>/<offset>      the parts of unfinished uploads; the id of one for a lease is <lease>/<sha256>
    staging/                   a folder's files before they are whole; a bucket needs none
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import SEEK_END
from mmap import mmap
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from weakref import WeakValueDictionary

from blocktrain.errors import BlobError, UploadError
from blocktrain.io.files import mapped_file
from blocktrain.swarm.coordinator.storage.bucket import Bucket
from blocktrain.swarm.coordinator.storage.errors import storage_errors
from blocktrain.swarm.coordinator.storage.folder import STAGING, Data, FileState, Folder, is_folder
from blocktrain.swarm.coordinator.storage.presigned import presigned_urls

MAX_OFFSET_DIGITS = 16
BLOBS, UPLOADS = "blobs", "uploads"
LARGE_BYTES = 2**18  # to hash so many takes longer than to hand them to a thread
THREADS = 4
RESTORE = (
    "restore it from a copy, or have it uploaded again; text is stored again when the coordinator is started with its "
    "whole command (--corpus …)"
)

Result = TypeVar("Result")

_SHA256 = re.compile("[0-9a-f]{64}")
_UPLOAD_ID = re.compile("[0-9A-Za-z_-]{1,128}(/[0-9A-Za-z_-]{1,128})?")


@dataclass(frozen=True)
class Uploaded:
    """What has arrived of an upload."""

    id: str | None  # of what is stored of it; None if it came in one request
    data: memoryview
    file: tuple[str, int] | None  # key and inode of a file with all of it: it can become the blob as it is


class Blobs:
    """In a folder, or in a bucket by URL (s3://, gs://, az://, …). Threads and processes may share it. `presigned`:
    workers get URLs to read and write in the bucket themselves; None: if the bucket limits what they write, and has TLS
    if their invite has (`tls`)."""

    def __init__(self, place: str | Path | Folder, *, presigned: bool | None = False, tls: bool = False) -> None:
        if isinstance(place, str | Path):
            self.storage = Folder(place, (BLOBS, UPLOADS)) if is_folder(place) else Bucket(str(place))
        else:
            self.storage = place
        self.where = self.storage.where
        self._checked: dict[str, FileState | None] = {}  # the state of each file when its bytes were checked
        self._known_sizes: dict[str, int] = {}  # of blobs in a bucket: every lease names some
        self.damaged: set[str] = set()  # blobs that were found damaged when they were read
        self._threads = ThreadPoolExecutor(THREADS, "blobs")
        # While they are being read.
        self._mapped: WeakValueDictionary[tuple[str, FileState | None], mmap] = WeakValueDictionary()
        with storage_errors(self.where):
            self._urls = presigned_urls(self.storage.store, self.where, presigned, tls)

    @property
    def is_bucket(self) -> bool:
        return isinstance(self.storage, Bucket)

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
        with storage_errors(self.where):
            return self._urls.download(_key(sha256))

    def upload_url(self, lease: str, num_bytes: int) -> str | None:
        """Where an upload of a lease may be put for a while, whole. A lease has one such place: however many URLs a
        worker asks for, it can store one update."""
        if self._urls is None:
            return None
        with storage_errors(self.where):
            return self._urls.upload(_first_part(direct_id(lease)), num_bytes)

    def put(self, data: Data | Iterable[Data], sha256: str | None = None) -> str:
        """Stores the bytes, which may come as chunks, and returns their name. A caller that has just computed it may
        pass it. A repeat writes them again, and so repairs damage."""
        chunks = [data] if isinstance(data, bytes | memoryview) else list(data)
        with storage_errors(self.where):
            if sha256 is None and self.storage.uses_threads and sum(map(len, chunks)) >= LARGE_BYTES:
                hashed = self._begin(_hash, chunks)  # while they are written and synced
                self.storage.write_as(lambda: _key(hashed()), chunks)
                sha256 = hashed()
            else:
                sha256 = sha256 or _hash(chunks)
                self.storage.write(_key(sha256), chunks)
        self._note(sha256)
        return sha256

    def put_all(self, blobs: Sequence[Data | Iterable[Data]]) -> list[str]:
        """The same for several, which wait for the disk together."""
        others = [self._begin(self._put_hashed, data) for data in blobs[1:]]
        return [self.put(blobs[0]), *(name() for name in others)]

    def _put_hashed(self, data: Data | Iterable[Data]) -> str:
        """In a thread of its own, which waits for no other one."""
        chunks = [data] if isinstance(data, bytes | memoryview) else list(data)
        return self.put(chunks, _hash(chunks))

    def _begin(self, work: Callable[..., Result], *given: Any) -> Callable[[], Result]:
        """Begins it in another thread. The function that is returned waits for the result."""
        if self.storage.uses_threads:
            return self._threads.submit(work, *given).result
        result = work(*given)
        return lambda: result

    def _note(self, sha256: str) -> None:
        """Remembers that the file is right as it is now."""
        with self._reading(sha256):
            self._checked[sha256] = self.storage.state(_key(sha256))
        self.damaged.discard(sha256)

    def get(self, sha256: str) -> memoryview:
        """The bytes, checked against their name. A file that has not been written to since is not checked again."""
        with self._reading(sha256):
            state = self.storage.state(_key(sha256))
            data = self._shared(sha256, state)
        if state is not None and self._checked.get(sha256) == state and len(data) == state[0]:
            return data
        found = hashlib.sha256(data).hexdigest()
        if found != sha256:
            self.damaged.add(sha256)
            raise BlobError(
                f"blob {sha256} in {self.where} is damaged ({len(data)} bytes with sha256 {found[:12]}…): {RESTORE}"
            )
        self._checked[sha256] = state
        self.damaged.discard(sha256)
        return data

    def _shared(self, sha256: str, state: FileState | None) -> memoryview:
        """Mapped once for all concurrent readers: its pages count once, and a bucket is asked once."""
        if (there := self._mapped.get((sha256, state))) is not None:
            return memoryview(there)
        data = self.storage.read(_key(sha256))
        if isinstance(data.obj, mmap):
            self._mapped[sha256, state] = data.obj
        return data

    def stream(self, sha256: str, start: int, end: int) -> Iterator[bytes]:
        """Bytes start to end, or to the last one, in chunks that are read when they are asked for. The whole file is
        checked when it is first opened, and again when it was written to. A bucket checks its objects itself."""
        if not self.is_bucket:
            self.get(sha256)
        num_bytes = self.size(sha256)
        if not 0 <= start <= min(end, num_bytes):
            raise BlobError(
                f"bytes {start} to {end} were asked of blob {sha256}, which has {num_bytes}: ask for some of these"
            )
        return self._chunks(sha256, start, min(end, num_bytes))

    def _chunks(self, sha256: str, start: int, end: int) -> Iterator[bytes]:
        with self._reading(sha256):
            yield from self.storage.chunks(_key(sha256), start, end)

    def size(self, sha256: str) -> int:
        if (known := self._known_sizes.get(sha256)) is not None:
            return known
        with self._reading(sha256):
            num_bytes = self.storage.size(_key(sha256))
        if self.is_bucket:
            self._known_sizes[sha256] = num_bytes
        return num_bytes

    def whole_size(self, sha256: str) -> int:
        """Of the blob that the name stands for: a file that was cut off is found damaged, as by `get`."""
        with self._reading(sha256):
            state = self.storage.state(_key(sha256))
        if state is None:
            return self.size(sha256)
        if self._checked.get(sha256) != state:
            self.get(sha256)
        return state[0]

    def exists(self, sha256: str) -> bool:
        with storage_errors(self.where), suppress(FileNotFoundError):
            self.storage.size(_key(sha256))
            return True
        return False

    def is_whole(self, sha256: str) -> bool:
        """Whether it is there and was not found damaged."""
        return sha256 not in self.damaged and self.exists(sha256)

    def has_whole(self, sha256: str, num_bytes: int) -> bool:
        """Whether its bytes are there, checked against their name if they are in a folder."""
        with suppress(BlobError):
            return self.whole_size(sha256) == num_bytes
        return False

    def delete(self, sha256: str) -> None:
        """Deleting a blob that is not there is no error: it may be the second try."""
        self._checked.pop(sha256, None)
        self._known_sizes.pop(sha256, None)
        self._delete(_key(sha256))

    def iterate(self) -> Iterator[str]:
        return (name for name, _ in self._written())

    def _written(self) -> Iterator[tuple[str, float]]:
        """The names of the blobs, and when each was last put."""
        for key, _, written_s in self._list(BLOBS):
            name = key.removeprefix(f"{BLOBS}/")
            if _SHA256.fullmatch(name):
                yield name, written_s

    def prune(self, live: Set[str], before_s: float) -> None:
        """Deletes the blobs that are not among these and were last put before that time: a younger one may be about to
        be recorded. Forgets what it knows of blobs that another coordinator has deleted."""
        there = set()
        for name, written_s in list(self._written()):
            if name in live or written_s >= before_s:
                there.add(name)
            else:
                self.delete(name)
        for known in (self._checked, self._known_sizes):
            for name in {*list(known)} - there:  # a list of it at once: other threads add to it
                known.pop(name, None)

    @contextmanager
    def receiving(self) -> Iterator[BinaryIO]:
        """A file for the bytes of a part while they arrive, to be appended then: many may be sending, and slowly."""
        with storage_errors(self.where), self.storage.receiving() as file:
            yield file

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
            with storage_errors(self.where):
                self.storage.keep_received(f"{_upload(upload_id)}/{offset:0{MAX_OFFSET_DIGITS}d}", part)
        return offset + num_bytes

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
        with storage_errors(self.where):
            if len(keys) != 1:
                return Uploaded(upload_id, memoryview(b"".join(map(self.storage.read, keys))), None)
            inode = self.storage.inode(keys[0])
            return Uploaded(upload_id, self.storage.read(keys[0]), None if inode is None else (keys[0], inode))

    def whole(self, part: BinaryIO) -> Uploaded:
        """A whole upload that came in one request: a file of `receiving`, which must still be open when it is kept."""
        with storage_errors(self.where):
            part.flush()
            return Uploaded(None, mapped_file(part), self.storage.arrived(part))

    @contextmanager
    def syncing(self, upload: Uploaded) -> Iterator[bool]:
        """While its bytes are checked, they are synced in another thread. Whether they are: `keep` then need not wait
        for the disk."""
        if upload.file is None or not self.storage.uses_threads:
            yield False
            return
        synced = self._begin(self.storage.sync, upload.file[0])
        try:
            yield True
        finally:
            with storage_errors(self.where):
                synced()

    def keep(self, upload: Uploaded, sha256: str, is_synced: bool = False) -> None:
        """The upload becomes the blob of this name, which its bytes were checked against."""
        with storage_errors(self.where):
            if not (upload.file and self.storage.rename(*upload.file, _key(sha256), is_synced)):
                self.storage.write(_key(sha256), [upload.data])
        self._note(sha256)
        if upload.id is not None:
            self.discard(upload.id)

    def discard(self, upload_id: str) -> None:
        prefix = _upload(upload_id)
        for key, _, _ in list(self._list(prefix)):
            self._delete(key)
        self.storage.remove_folder(prefix)

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
        with storage_errors(self.where):
            return self.storage.disk_bytes()

    def discard_uploads(self, before_s: float) -> int:
        """Deletes uploads that have not been continued since. Returns the number of deleted files."""
        stale = [x for folder in (UPLOADS, STAGING) for x, _, written_s in self._list(folder) if written_s < before_s]
        for key in stale:
            self._delete(key)
        for folder in {key.rpartition("/")[0] for key in stale} - {STAGING}:
            self.storage.remove_folder(folder)
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

    def _list(self, prefix: str) -> Iterator[tuple[str, int, float]]:
        with storage_errors(self.where):
            yield from self.storage.list(prefix)

    def _delete(self, key: str) -> None:
        with storage_errors(self.where), suppress(FileNotFoundError):
            self.storage.delete(key)

    @contextmanager
    def _reading(self, sha256: str) -> Iterator[None]:
        with storage_errors(self.where):
            try:
                yield
            except FileNotFoundError:
                self._known_sizes.pop(sha256, None)
                raise BlobError(f"blob {sha256} is not in {self.where}: {RESTORE}") from None


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
