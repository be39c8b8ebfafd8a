"""Ctrl-C: once asks for a stop at the next step, twice aborts. Next: training.py."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any, Self

STDERR = 2
STOPPING = b"\nstopping after this step; Ctrl-C again aborts at once\n"


class StopOnInterrupt:
    """Within it the first SIGINT makes calling it true. All files are written whole, so the second may end anything."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self) -> bool:
        return self._asked

    def __enter__(self) -> Self:
        self._before: Any = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            for child in multiprocessing.active_children():
                child.kill()  # they ignore SIGINT, and waiting for their steps would not be at once
            raise KeyboardInterrupt
        self._asked = True
        with suppress(OSError):
            os.write(STDERR, STOPPING)  # print may be what was interrupted
