"""How this process gets memory from the system and gives it back. A page that was given back is cleared by the system
when it is asked for again, which takes longer than most of what is computed in it. Settings for glibc and torch; with
other libraries nothing happens. Next: cli/shared/serving.py and train/trainer.py, which choose."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's names for what mallopt sets


def use_huge_pages() -> None:
    """Large tensors in pages of megabytes, which are cleared at once. Before torch is imported."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed_memory() -> None:
    """For training, whose every step needs as much as the one before: what is freed is kept for the next."""
    _set({_MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**30})


def keep_little_memory() -> None:
    """For a service: glibc gives threads heaps of their own, and each keeps what was freed in it; with one a thread,
    memory would grow with the number of updates that come at once. Large pieces go back when they are freed."""
    _set({_ARENA_MAX: 2, _MMAP_THRESHOLD: 2**20, _TRIM_THRESHOLD: 2**20})


def _set(settings: dict[int, int]) -> None:
    with suppress(AttributeError, OSError, TypeError):  # another C library
        for setting, value in settings.items():
            ctypes.CDLL(None).mallopt(setting, value)
