"""Arrays that a codec uses again for every piece. Memory that is new to a process is cleared by the system first, which
takes longer than the arithmetic on it.
Next: vector.py, which codes pieces with them."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from blocktrain.wire.safetensors import Array


class Scratch(threading.local):
    """Each thread has its own arrays, one per name. What was in an array is lost when its name is asked for again."""

    def __init__(self) -> None:
        self._bytes: dict[str, Array] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: Any) -> Array:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if name not in self._bytes or len(self._bytes[name]) < size:
            self._bytes[name] = np.empty(size, np.uint8)
        array: Array = self._bytes[name][:size].view(dtype).reshape(shape)
        return array
