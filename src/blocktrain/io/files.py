"""Files that appear whole or not at all, after a kill and after a power cut. Raises the operating system's own errors;
the rooms that write say what they mean. Next: checkpoint.py and swarm/coordinator/blobs.py, which do."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


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
