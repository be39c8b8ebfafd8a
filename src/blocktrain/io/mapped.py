"""Tensors left in their file: mapped into memory, read by the page when they are used, given back afterwards.
Next: model/offload.py computes with them; checkpoint.py, which checks and opens them."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from blocktrain.errors import TensorError
from blocktrain.io.arrays import as_tensors
from blocktrain.io.files import mapped
from blocktrain.wire.safetensors import decode


class MappedTensors:
    """The named tensors of one safetensors file. They stay whole when the file is deleted or replaced."""

    def __init__(self, path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
        self.path = path
        data = mapped(path)
        if not isinstance(data.obj, mmap.mmap):
            raise TensorError(f"{path} is empty: get it again from where it was made")
        self._pages = data.obj
        self._begin = np.frombuffer(data, np.uint8).ctypes.data
        self.tensors = as_tensors(decode(data, expected=expected, in_place=True)[0])

    def expect(self, tensor: Tensor) -> None:
        """It is used soon: the system may read it from the disk meanwhile."""
        self._advise(tensor, "MADV_WILLNEED")

    def release(self, tensor: Tensor) -> None:
        """It is not used for a while: it stops counting as our memory; the system keeps its pages as long as it can."""
        self._advise(tensor, "MADV_DONTNEED")

    def _advise(self, tensor: Tensor, advice: str) -> None:
        if not hasattr(mmap, advice):  # Windows
            return
        begin = tensor.data_ptr() - self._begin
        end = begin + tensor.nbytes
        page_begin = begin - begin % mmap.PAGESIZE
        self._pages.madvise(getattr(mmap, advice), page_begin, end - page_begin)
