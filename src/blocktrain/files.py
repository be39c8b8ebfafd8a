"""Files that appear whole or not at all, after a kill and after a power cut. Raises the operating system's own errors;
the rooms that write say what they mean. Next: checkpoint.py and swarm/blobs.py, which do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def put_in_place(path: Path, chunks: Iterable[bytes], staged: Path, *, synced: bool = True) -> None:
    """Written to `staged` on the same disk, synced, renamed, the folder synced. A failure leaves what was there.
    Not `synced`, it is whole after a kill but not after a power cut: for what is checked when it is read."""
    try:
        with staged.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
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
