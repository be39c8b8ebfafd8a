"""How this process gets memory from the operating system and returns it. The system clears every returned page when it
is requested again, which takes longer than most computations on it. These settings are for glibc and torch; with other
libraries they have no effect. Next: train/trainer.py, which keeps freed memory."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's names for what mallopt sets


def use_huge_pages() -> None:
    """Put large tensors in pages of megabytes, which are cleared at once. Call this before torch is imported."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed_memory() -> None:
    """For training: every step needs as much memory as the one before, so freed memory is kept for the next step."""
    _set({_MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**30})


def keep_some_memory() -> None:
    """For serving: each traversal needs megabytes for a moment, as the one before did. What is freed beyond a hundred
    of them is returned."""
    _set({_MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**27})


def keep_little_memory() -> None:
    """For a coordinator. By default glibc has one heap per thread, and each keeps its freed memory, so memory would
    grow with the number of concurrent updates. Here all threads share two heaps, and large freed pieces are
    returned."""
    _set({_ARENA_MAX: 2, _MMAP_THRESHOLD: 2**20, _TRIM_THRESHOLD: 2**20})


def _set(settings: dict[int, int]) -> None:
    with suppress(AttributeError, OSError, TypeError):  # another C library
        for setting, value in settings.items():
            ctypes.CDLL(None).mallopt(setting, value)
