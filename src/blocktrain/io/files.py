"""Files that appear whole or not at all, after a kill and after a power cut. `write_whole` raises StorageError; the
functions below it raise the operating system's own errors. Next: checkpoint.py and swarm/coordinator/blobs.py."""

from __future__ import annotations

import errno
import mmap
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from blocktrain.errors import StorageError


def put_in_place(path: Path, chunks: Iterable[bytes | memoryview], staged: Path, *, synced: bool = True) -> None:
    with appearing(path, staged, synced=synced) as file:
        for chunk in chunks:
            file.write(chunk)


@contextmanager
def appearing(path: Path, staged: Path, *, synced: bool = True) -> Iterator[BinaryIO]:
    """What the block writes goes to `staged` on the same disk, is synced, renamed, the folder synced. A failure leaves
    what was there. Not `synced`, it is whole after a kill but not after a power cut: for what is checked when it is
    read."""
    try:
        with staged.open("xb") as file:
            yield file
            file.flush()
            if synced:
                os.fsync(file.fileno())
        os.replace(staged, path)  # noqa: PTH105 (the call that the tests make fail)
    except BaseException:
        with suppress(OSError):
            staged.unlink()
        raise
    if synced:
        sync_folder(path.parent)


def mapped(path: Path) -> memoryview:
    """The bytes of a file where the system keeps them, to be read only: no copy, and no memory of ours. They stay when
    the file is deleted or replaced; nobody may shorten it."""
    with path.open("rb") as file:
        return mapped_file(file)


def mapped_file(file: BinaryIO) -> memoryview:
    """The same of an open file, which may be closed then."""
    if not os.fstat(file.fileno()).st_size:
        return memoryview(b"")
    # shared: a private mapping counts as memory of ours, and the file may be larger than that
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def forget(data: memoryview) -> None:
    """Of bytes that are mapped, what was read so far stops counting as memory of ours."""
    if isinstance(data.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        data.obj.madvise(mmap.MADV_DONTNEED)


def sync_file(path: Path) -> None:
    """Makes what was written to it survive a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes a rename in it survive a power cut, where the file system can promise that."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # network and FUSE mounts
            raise
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes, *, synced: bool = True) -> None:
    """The file appears with all its bytes, or stays what it was: written beside, synced, renamed, the folder synced.
    What can be fetched again, and is checked when it is read, need not be `synced`."""
    with storage_errors(path, num_bytes=len(data)):
        put_in_place(path, [data], _beside(path), synced=synced)


@contextmanager
def written_whole(path: Path, *, synced: bool = True) -> Iterator[BinaryIO]:
    """The same for bytes that come one after the other: what the block writes."""
    with storage_errors(path), appearing(path, _beside(path), synced=synced) as file:
        yield file


def make_folder(path: Path) -> None:
    with storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)


@contextmanager
def storage_errors(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Raises the operating system's errors as StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written ({error.strerror}): {_storage_remedy(error, num_bytes)}"
        ) from None


def _storage_remedy(error: OSError, num_bytes: int | None) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        need = f"at least {num_bytes} bytes" if num_bytes else "some space"
        return f"free {need} on that disk and run the command again, nothing was overwritten"
    return "make the folder writable or choose another --out, nothing was overwritten"


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
