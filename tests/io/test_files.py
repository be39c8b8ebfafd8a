"""Files that appear whole or not at all; a disk that refuses is named with the remedy."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from blocktrain.errors import StorageError
from blocktrain.io.files import write_whole


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {".lock"}


def refuse(monkeypatch: pytest.MonkeyPatch, function: str, code: int) -> None:
    def refused(*arguments: object) -> object:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, function, refused)


def test_a_file_is_written_whole_and_nothing_is_left_beside_it(tmp_path):
    write_whole(tmp_path / "file", b"old")
    write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert files(tmp_path) == {"file"}


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize(
    "code, remedy",
    [
        (errno.ENOSPC, r"file cannot be written \(No space left on device\): free at least 3 bytes on that disk"),
        (errno.EFBIG, r"file cannot be written \(File too large\): raise the limit on the size of files \(ulimit -f\)"),
        (errno.EEXIST, r"file cannot be written \(File exists\): a file has this name"),
        (errno.EROFS, r"file cannot be written \(Read-only file system\): make the folder writable"),
    ],
)
def test_a_refusing_disk_leaves_the_old_file_and_names_the_remedy(tmp_path, monkeypatch, function, code, remedy):
    write_whole(tmp_path / "file", b"old")
    refuse(monkeypatch, function, code)
    with pytest.raises(StorageError, match=remedy):
        write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert files(tmp_path) == {"file"}


def test_a_folder_that_is_gone_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match=r"file cannot be written \(No such file or directory\)"):
        write_whole(tmp_path / "gone" / "file", b"new")


def test_a_large_need_for_space_is_named_in_megabytes(tmp_path, monkeypatch):
    refuse(monkeypatch, "fsync", errno.ENOSPC)
    with pytest.raises(StorageError, match=r"free at least 1\.2 MB on that disk"):
        write_whole(tmp_path / "file", bytes(1_200_000))
