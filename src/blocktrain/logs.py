"""Log lines that strangers can cause: their words are escaped, and a flood of them is one line. No exceptions here.
Next: errors.py, whose guard writes one when a parser overlooked something."""

from __future__ import annotations

import logging
import threading
import time
import unicodedata
from collections.abc import Callable

UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control and formatting characters, surrogates, line separators
LOG_EVERY_S = 60.0


def visible(text: str) -> str:
    """Foreign text as one line that cannot control the terminal: control characters are shown as their escapes."""
    return "".join(ascii(each)[1:-1] if unicodedata.category(each) in UNSEEN else each for each in text)


class SparingLog:
    """At most one line per LOG_EVERY_S, with the number of those left out before it. Thread-safe."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock, self._lock = logging.getLogger(name), clock, threading.Lock()
        self._next_s, self._left_out = float("-inf"), 0

    def warning(self, text: str) -> None:
        with self._lock:
            if self._clock() < self._next_s:
                self._left_out += 1
                return
            left_out, self._left_out, self._next_s = self._left_out, 0, self._clock() + LOG_EVERY_S
        self._log.warning("%s%s", visible(text), f" ({left_out} more since the last such line)" if left_out else "")
