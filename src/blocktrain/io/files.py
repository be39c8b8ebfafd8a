"""Files that appear whole or not at all, after a kill and after a power cut. `write_whole`, `written_whole` and
`make_folder` raise StorageError; the other functions raise OSError.
Next: checkpoint.py, swarm/coordinator/storage/folder.py."""

from __future__ import annotations

import errno
import mmap
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from blocktrain.errors import StorageError

POSIX = hasattr(os, "O_DIRECTORY")


Target = Path | Callable[[], Path]  # a function is called when the bytes are safe: they may have their name from it


def put_in_place(path: Target, chunks: Iterable[bytes | memoryview], staged: Path, *, synced: bool = True) -> None:
    with appearing(path, staged, synced=synced) as file:
        for chunk in chunks:
            file.write(chunk)


@contextmanager
def appearing(path: Target, staged: Path, *, synced: bool = True) -> Iterator[BinaryIO]:
    """Writes to `staged` on the same disk, syncs it, renames it to `path` and syncs the folder. After a failure `path`
    is what it was. Without `synced` the file is whole after a kill, but not after a power cut: for files that are
    checked when they are read."""
    try:
        with staged.open("xb") as file:
            yield file
            file.flush()
            if synced:
                os.fsync(file.fileno())
        path = path if isinstance(path, Path) else path()
        os.replace(staged, path)  # noqa: PTH105 (the call that the tests make fail)
    except BaseException:
        with suppress(OSError):
            staged.unlink()
        raise
    if synced:
        sync_folder(path.parent)


def mapped(path: Path) -> memoryview:
    """The bytes of a file, mapped read-only: they are not copied and do not count as memory of this process. They stay
    valid when the file is deleted or replaced. The file must not be shortened."""
    with path.open("rb") as file:
        return mapped_file(file)


def mapped_file(file: BinaryIO) -> memoryview:
    """The same for an open file, which may be closed afterwards."""
    if not os.fstat(file.fileno()).st_size:
        return memoryview(b"")
    # shared, because a private mapping counts as memory of this process, and the file may be larger than the memory
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def forget(data: memoryview) -> None:
    """The pages of mapped bytes that were read so far no longer count as memory of this process."""
    if isinstance(data.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        data.obj.madvise(mmap.MADV_DONTNEED)


def sync_file(path: Path) -> None:
    """After this the contents survive a power cut."""
    with path.open("rb" if POSIX else "r+b") as file:  # Windows syncs only what may be written
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """After this a rename in the folder survives a power cut, if the file system supports that."""
    if not POSIX:
        return  # Windows opens no folders
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # network and FUSE mounts
            raise
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes, *, synced: bool = True) -> None:
    """The file appears with all its bytes, or stays what it was. A file that can be fetched again and is checked when
    it is read need not be `synced`."""
    with storage_errors(path, num_bytes=len(data)):
        put_in_place(path, [data], _beside(path), synced=synced)


@contextmanager
def written_whole(path: Path, *, synced: bool = True) -> Iterator[BinaryIO]:
    """The same for bytes that are written piece by piece."""
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
        need = f"at least {_size(num_bytes)}" if num_bytes else "some space"
        return f"free {need} on that disk and run the command again, nothing was overwritten"
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f) or choose a disk that holds larger ones"
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return "a file has this name or that of a folder above it, choose another --out, nothing was overwritten"
    return "make the folder writable or choose another --out, nothing was overwritten"


def _size(num_bytes: int) -> str:
    return f"{num_bytes} bytes" if num_bytes < 100_000 else f"{num_bytes / 1e6:.1f} MB"


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
