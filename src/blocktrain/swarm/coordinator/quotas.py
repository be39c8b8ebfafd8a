"""Quotas: how much workers may store. One upload per lease, so many bytes of unfinished uploads per access token, so
many bytes in all, and a reserve of the disk for the coordinator itself. What nothing needs is deleted by loop.py.
Next: intake.py, which asks before it takes bytes; blobs.py, which stores them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from blocktrain.errors import RequestRefused, StorageError
from blocktrain.swarm.coordinator.blobs import Blobs

GIB = 2**30
RESERVE_SHARE, LARGEST_RESERVE_BYTES = 0.02, GIB  # of the disk, left for the ledger and for merges


@dataclass(frozen=True)
class StorageLimits:
    """Of the storage of a run. They change nothing that is trained, so they are no part of the run's settings."""

    total_bytes: int | None = None  # of all blobs and uploads; None: what the disk has
    access_token_bytes: int = 16 * GIB  # of the unfinished uploads of one access token


@dataclass(frozen=True)
class StorageState:
    """As it was measured last. `problem` is a sentence while nothing more is taken in."""

    used_bytes: int = 0
    free_bytes: int | None = None  # of the disk; None in a bucket
    total_bytes: int | None = None
    problem: str | None = None


class Quotas:
    """Threads may share it. What it counts per access token, it counts in this process."""

    def __init__(self, blobs: Blobs, limits: StorageLimits) -> None:
        self._blobs, self._limits, self._turn = blobs, limits, threading.Lock()
        self._unfinished: dict[str, tuple[str, int]] = {}  # lease: access token, bytes of its upload
        self.state = StorageState(total_bytes=limits.total_bytes)

    def measure(self) -> StorageState:
        """Looks how much is stored, and forgets uploads that were deleted. Called by time, not at every request."""
        with self._turn:
            known = tuple(self._unfinished)
        for lease in set(known) - self._blobs.leases_with_uploads(known):
            self.finished(lease)
        used_bytes, disk = self._blobs.used_bytes(), self._blobs.disk_bytes()
        free_bytes = disk[1] if disk else None
        self.state = replace(self.state, used_bytes=used_bytes, free_bytes=free_bytes, problem=None)
        self.state = replace(self.state, problem=self._shortage(0))
        return self.state

    def now(self) -> StorageState:
        """As it was measured, with a shortage of this moment: the disk may fill up between two measurements, and the
        ledger then records nothing."""
        try:
            return replace(self.state, problem=self.state.problem or self._shortage(0))
        except StorageError as error:
            return replace(self.state, problem=str(error))

    def _shortage(self, more_bytes: int) -> str | None:
        total, disk = self._limits.total_bytes, self._blobs.disk_bytes()
        if total is not None and self.state.used_bytes + more_bytes > total:
            return (
                f"the coordinator's storage is full: {self.state.used_bytes} bytes of at most {total} are used. Its "
                f"operator must raise --max-storage, or wait until old versions are deleted"
            )
        if disk is not None and disk[1] - more_bytes < min(RESERVE_SHARE * disk[0], LARGEST_RESERVE_BYTES):
            return f"the coordinator's disk is full: {disk[1]} bytes are left. Its operator must free space on it"
        return None

    def admit(self, lease: str, access_token: str, end: int) -> None:
        """Refuses the bytes of a lease's upload up to `end`, before they are read, if there is no room for them."""
        with self._turn:
            before = self._unfinished.get(lease, (access_token, 0))[1]
            if problem := self._shortage(max(0, end - before)):
                self.state = replace(self.state, problem=problem)
                raise StorageError(problem)
            mine = [size for key, (other, size) in self._unfinished.items() if other == access_token and key != lease]
            if (wanted := sum(mine) + max(before, end)) > self._limits.access_token_bytes:
                raise RequestRefused(
                    f"the unfinished uploads with this access token would have {wanted} bytes, at most "
                    f"{self._limits.access_token_bytes} are kept: finish those, or ask for another access token",
                    code="quota",
                )
            self._unfinished[lease] = access_token, max(before, end)
            self.state = replace(self.state, used_bytes=self.state.used_bytes + max(0, end - before))

    def finished(self, lease: str) -> None:
        """The upload has become an update, or is gone."""
        with self._turn:
            self._unfinished.pop(lease, None)
