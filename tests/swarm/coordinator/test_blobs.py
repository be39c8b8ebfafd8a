"""Blobs in a real folder, in a bucket of a real S3 server, and in obstore's in-memory bucket. Faults are planned:
a process ends at its n-th rename or sync without another instruction, or the disk refuses."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import BlobError, StorageError, UploadError
from blocktrain.swarm.coordinator import blobs as blobs_module
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.storage import bucket as bucket_module
from blocktrain.swarm.coordinator.storage import folder as folder_module

DATA = bytes(range(256)) * 40
SHA256 = hashlib.sha256(DATA).hexdigest()

PLANNED_END = """
import os, sys
from itertools import count
from blocktrain.swarm.coordinator.blobs import Blobs

folder, function, call, action = sys.argv[1:]
real, calls, blobs = getattr(os, function), count(), Blobs(folder)

def planned(*arguments):
    return os._exit(9) if next(calls) == int(call) else real(*arguments)

setattr(os, function, planned)
exec(action)
"""


@pytest.fixture(params=["folder", "memory", "bucket"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    places = {"folder": lambda: tmp_path / "store", "memory": lambda: "memory:///"}
    return Blobs(places.get(request.param, lambda: request.getfixturevalue("bucket"))())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file())


def killed(folder: Path, function: str, call: int, action: str) -> bool:
    """Whether a process that ends at that call of os.<function> got so far."""
    done = subprocess.run([sys.executable, "-c", PLANNED_END, folder, function, str(call), action], check=False)
    assert done.returncode in (0, 9)
    return done.returncode == 9


def refuse(monkeypatch: pytest.MonkeyPatch, function: str, code: int) -> None:
    def refused(*arguments: object) -> object:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, function, refused)


def send(blobs: Blobs, data: bytes, part_bytes: int, upload_id: str = "up") -> None:
    for start in range(blobs.received(upload_id), len(data), part_bytes):
        blobs.append(upload_id, start, data[start : start + part_bytes])


def test_bytes_come_back_by_their_hash(blobs):
    assert blobs.put(DATA) == SHA256
    assert blobs.get(SHA256) == DATA
    assert blobs.size(SHA256) == len(DATA)
    assert blobs.exists(SHA256)


def test_putting_the_same_bytes_again_keeps_one_blob(blobs):
    assert blobs.put(DATA) == blobs.put(DATA)
    assert list(blobs.iterate()) == [SHA256]


def test_empty_bytes_are_a_blob_too(blobs):
    assert blobs.get(blobs.put(b"")) == b""


def test_a_blob_is_there_when_the_folder_is_opened_again(folder):
    Blobs(folder).put(DATA)
    assert Blobs(folder.as_uri()).get(SHA256) == DATA


def test_a_missing_blob_is_named_with_the_remedy(blobs):
    for read in (blobs.get, blobs.size):
        with pytest.raises(BlobError, match=f"blob {SHA256} is not in .*: restore it from a copy"):
            read(SHA256)
    assert not blobs.exists(SHA256)


@pytest.mark.parametrize("damage", [DATA[:-1], DATA[:-1] + b"?", b""])
def test_a_damaged_blob_is_detected_and_repaired_by_putting_it_again(folder, damage):
    blobs = Blobs(folder)
    blobs.put(DATA)
    (folder / "blobs" / SHA256).write_bytes(damage)
    with pytest.raises(BlobError, match=f"blob {SHA256} in .* is damaged .*: restore it"):
        blobs.get(SHA256)
    blobs.put(DATA)
    assert blobs.get(SHA256) == DATA


def test_a_file_that_was_cut_off_has_no_size_until_the_blob_is_put_again(folder):
    """A worker that was told the size of the file asked for so many bytes forever."""
    Blobs(folder).put(DATA)
    (folder / "blobs" / SHA256).write_bytes(DATA[:-7])
    blobs = Blobs(folder)
    with pytest.raises(BlobError, match="is damaged"):
        blobs.whole_size(SHA256)
    assert blobs.damaged == {SHA256}
    blobs.put(DATA)
    assert blobs.whole_size(SHA256) == len(DATA)


@pytest.mark.parametrize("start, end", [(0, 10), (9, 10), (10_000, 99_999), (5, 5), (len(DATA), len(DATA) + 1)])
def test_a_range_is_what_slicing_gives(blobs, start, end):
    assert b"".join(blobs.stream(blobs.put(DATA), start, end)) == DATA[start:end]


@pytest.mark.parametrize("start, end", [(-1, 5), (6, 5), (len(DATA) + 1, len(DATA) + 2)])
def test_a_range_outside_the_blob_is_refused_with_its_size(blobs, start, end):
    blobs.put(DATA)
    with pytest.raises(BlobError, match=f"which has {len(DATA)}"):
        list(blobs.stream(SHA256, start, end))


def test_a_deleted_blob_is_gone_and_may_be_deleted_again(blobs):
    blobs.delete(blobs.put(DATA))
    blobs.delete(SHA256)
    assert not blobs.exists(SHA256)
    assert list(blobs.iterate()) == []


def test_pruning_passes_over_blobs_that_are_young_or_needed(folder):
    blobs = Blobs(folder)
    old, new, needed = blobs.put(b"old"), blobs.put(b"new"), blobs.put(b"needed")
    for name, written_s in ((old, 1000), (new, 3000), (needed, 1000)):
        os.utime(folder / "blobs" / name, (written_s, written_s))
    blobs.prune({needed}, before_s=2000)
    assert set(blobs.iterate()) == {new, needed}


def test_pruning_forgets_what_another_coordinator_has_deleted(folder):
    blobs = Blobs(folder)
    gone, kept = blobs.put(b"gone"), blobs.put(b"kept")
    Blobs(folder).delete(gone)
    blobs.prune({kept}, before_s=0)
    assert set(blobs._checked) == {kept}


@pytest.mark.parametrize("name", ["", "../../etc/passwd", SHA256.upper(), SHA256 + "\n", "0" * 63])
def test_a_name_that_is_no_hash_reaches_no_file(blobs, name):
    for use in (blobs.get, blobs.exists, blobs.delete):
        with pytest.raises(BlobError, match="names no blob"):
            use(name)


@pytest.mark.parametrize("name", ["", "..", "../a", "/a", "a/b/c", "a" * 129, "a\n"])
def test_a_name_that_is_no_upload_reaches_no_file(blobs, name):
    with pytest.raises(BlobError, match="names no upload"):
        blobs.append(name, 0, b"x")


@given(st.binary(max_size=300), st.lists(st.integers(0, 120), max_size=8))
def test_an_upload_in_odd_parts_is_the_whole(data, part_sizes):
    blobs, sha256 = Blobs("memory:///"), hashlib.sha256(data).hexdigest()
    for size in [*part_sizes, len(data)]:
        start = blobs.received("up")
        assert blobs.append("up", start, data[start : start + size]) == min(start + size, len(data))
    blobs.keep(blobs.uploaded("up"), sha256)
    assert blobs.get(sha256) == data


def test_an_upload_goes_on_in_another_process(folder):
    send(Blobs(folder), DATA[:7000], part_bytes=3000)
    assert Blobs(folder).received("up") == 7000
    send(Blobs(folder), DATA, part_bytes=3000)
    blobs = Blobs(folder)
    blobs.keep(blobs.uploaded("up"), SHA256)
    assert Blobs(folder).get(SHA256) == DATA


@pytest.mark.parametrize("offset", [0, 99, 101])
def test_a_part_for_a_wrong_offset_says_which_is_expected_and_changes_nothing(blobs, offset):
    blobs.append("up", 0, DATA[:100])
    with pytest.raises(UploadError, match="continue at offset 100") as refusal:
        blobs.append("up", offset, DATA)
    assert refusal.value.expected_offset == blobs.received("up") == 100


def test_uploads_with_like_names_do_not_mix(blobs):
    blobs.append("up", 0, b"1")
    blobs.append("up2", 0, b"22")
    blobs.discard("up")
    assert (blobs.received("up"), blobs.received("up2")) == (0, 2)


@pytest.mark.parametrize("part_bytes", [4000, len(DATA)], ids=["in parts", "in one"])
def test_an_upload_that_is_kept_is_a_blob_and_leaves_no_parts(folder, part_bytes):
    blobs = Blobs(folder)
    send(blobs, DATA, part_bytes)
    upload = blobs.uploaded("up")
    assert upload.data == DATA
    blobs.keep(upload, SHA256)
    assert blobs.get(SHA256) == DATA
    assert files(folder) == ["blobs"]


def test_an_upload_in_one_part_becomes_the_blob_without_another_write(folder):
    blobs = Blobs(folder)
    blobs.append("up", 0, DATA)
    (part,) = (folder / "uploads" / "up").iterdir()
    inode = part.stat().st_ino
    blobs.keep(blobs.uploaded("up"), SHA256)
    assert (folder / "blobs" / SHA256).stat().st_ino == inode


def test_the_blob_is_what_was_looked_at_though_its_part_was_replaced_meanwhile(folder):
    blobs = Blobs(folder)
    blobs.append("up", 0, DATA)
    upload = blobs.uploaded("up")
    (part,) = (folder / "uploads" / "up").iterdir()
    (folder / "other").write_bytes(b"?" * len(DATA))
    (folder / "other").replace(part)
    blobs.keep(upload, SHA256)
    assert blobs.get(SHA256) == DATA


def test_a_part_that_came_as_a_file_is_not_copied(folder):
    blobs = Blobs(folder)
    with blobs.receiving() as part:
        part.write(DATA)
        inode = os.fstat(part.fileno()).st_ino
        assert blobs.append("up", 0, part) == len(DATA)
    (kept,) = (folder / "uploads" / "up").iterdir()
    assert kept.stat().st_ino == inode


def test_a_part_that_is_not_appended_leaves_nothing(blobs, folder):
    with blobs.receiving() as part:
        part.write(DATA)
    assert blobs.received("up") == 0
    assert not folder.exists() or files(folder) == []


def test_a_blob_is_mapped_once_for_all_who_read_it(folder):
    blobs = Blobs(folder)
    blobs.put(DATA)
    one, other = blobs.get(SHA256), blobs.get(SHA256)
    assert one.obj is other.obj


def test_a_blob_that_is_put_in_chunks_is_the_whole(blobs):
    assert blobs.put([DATA[:100], memoryview(DATA)[100:]]) == SHA256
    assert blobs.get(SHA256) == DATA


def test_a_blob_is_streamed_in_chunks(blobs, monkeypatch):
    sha256 = blobs.put(DATA)
    monkeypatch.setattr(folder_module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(bucket_module, "SEND_BYTES", 1000)
    chunks = list(blobs.stream(sha256, 500, len(DATA)))
    assert b"".join(chunks) == DATA[500:]
    assert max(map(len, chunks)) == 1000


def test_uploads_that_nobody_continued_can_be_discarded(folder):
    blobs = Blobs(folder)
    for name, age_s in (("old", 1000), ("new", 3000)):
        blobs.append(name, 0, b"part")
        (part,) = (folder / "uploads" / name).iterdir()
        os.utime(part, (age_s, age_s))
    (folder / "staging" / "left").touch()
    os.utime(folder / "staging" / "left", (1000, 1000))
    assert blobs.discard_uploads(before_s=2000) == 2
    assert (blobs.received("old"), blobs.received("new")) == (0, 4)
    assert not (folder / "uploads" / "old").exists()


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_refuses_leaves_no_blob_and_no_rest(folder, monkeypatch, function):
    blobs = Blobs(folder)
    refuse(monkeypatch, function, errno.ENOSPC)
    with pytest.raises(StorageError, match=r"No space left.*: free space on that disk and try again"):
        blobs.put(DATA)
    monkeypatch.undo()
    assert files(folder) == []


LARGE = DATA * (blobs_module.LARGE_BYTES // len(DATA) + 1)


def test_a_blob_that_is_hashed_while_it_is_written_has_the_name_of_its_bytes(folder):
    blobs = Blobs(folder)
    name = blobs.put([LARGE, DATA])
    assert name == hashlib.sha256(LARGE + DATA).hexdigest()
    assert blobs.get(name) == LARGE + DATA


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_refuses_a_large_blob_leaves_nothing_of_it(folder, monkeypatch, function):
    blobs = Blobs(folder)
    refuse(monkeypatch, function, errno.ENOSPC)
    with pytest.raises(StorageError, match="No space left"):
        blobs.put(LARGE)
    monkeypatch.undo()
    assert files(folder) == []


def test_several_blobs_that_are_stored_together_get_their_own_names(folder):
    blobs = Blobs(folder)
    names = blobs.put_all([[DATA, LARGE], LARGE, DATA])
    assert [bytes(blobs.get(name)) for name in names] == [DATA + LARGE, LARGE, DATA]


def test_an_upload_that_the_disk_cannot_sync_does_not_pass_its_checks(folder, monkeypatch):
    blobs = Blobs(folder)
    with blobs.receiving() as part:
        part.write(DATA)
        upload = blobs.whole(part)
        refuse(monkeypatch, "fsync", errno.EIO)
        with pytest.raises(StorageError, match="error"), blobs.syncing(upload):
            pass


def test_a_blob_is_hashed_again_only_when_its_file_was_written_to(folder, monkeypatch):
    blobs, hashed, real = Blobs(folder), [], hashlib.sha256
    blobs.put(DATA)
    monkeypatch.setattr(blobs_module.hashlib, "sha256", lambda data: hashed.append(len(data)) or real(data))
    assert [blobs.get(SHA256), blobs.get(SHA256), hashed] == [DATA, DATA, []]
    (folder / "blobs" / SHA256).write_bytes(DATA)
    assert [blobs.get(SHA256), blobs.get(SHA256), hashed] == [DATA, DATA, [len(DATA)]]
    assert [Blobs(folder).get(SHA256), hashed] == [DATA, [len(DATA)] * 2]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_killed_put_leaves_nothing_or_the_whole(folder, function):
    put = f"blobs.put({DATA!r})"
    for call in count():
        was_killed = killed(folder, function, call, put)
        blobs = Blobs(folder)
        assert was_killed or blobs.exists(SHA256)
        if blobs.exists(SHA256):
            assert blobs.get(SHA256) == DATA
            break


@pytest.mark.parametrize("part_bytes", [6000, len(DATA)], ids=["in parts", "in one"])
@pytest.mark.parametrize("function", ["fsync", "replace", "rmdir"])
def test_an_upload_that_a_kill_kept_from_being_kept_is_there_still_as_it_was_or_as_the_blob(
    folder, function, part_bytes
):
    keep = f"blobs.keep(blobs.uploaded('up'), '{SHA256}')"
    for call in count():
        send(Blobs(folder), DATA, part_bytes)
        was_killed = killed(folder, function, call, keep)
        blobs = Blobs(folder)
        assert (blobs.get(SHA256) if blobs.exists(SHA256) else blobs.uploaded("up").data) == DATA
        blobs.discard("up")
        blobs.delete(SHA256)
        if not was_killed:
            break


def test_a_bucket_is_asked_once_for_a_size_and_again_when_the_blob_is_gone(bucket, monkeypatch):
    blobs, sizes = Blobs(bucket), list[str]()
    asked = blobs.storage.size
    monkeypatch.setattr(blobs.storage, "size", lambda key: sizes.append(key) or asked(key))
    sha256 = blobs.put(DATA)
    assert [blobs.size(sha256), blobs.whole_size(sha256), len(sizes)] == [len(DATA), len(DATA), 1]
    Blobs(bucket).delete(sha256)  # by another coordinator
    with pytest.raises(BlobError):
        blobs.get(sha256)
    with pytest.raises(BlobError):
        blobs.size(sha256)


def test_an_upload_in_one_request_becomes_the_blob_and_leaves_no_part(blobs):
    with blobs.receiving() as part:
        part.write(DATA)
        upload = blobs.whole(part)
        assert upload.data == DATA
        assert not blobs.exists(SHA256)
        blobs.keep(upload, SHA256)
    assert blobs.get(SHA256) == DATA
    assert blobs.used_bytes() == len(DATA)
