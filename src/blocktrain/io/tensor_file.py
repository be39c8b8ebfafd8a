"""One file of named tensors: saved whole, loaded, or left in the file and mapped into memory.
Knows no model and no run. Next: checkpoint.py, the run directory; model/offload.py, which computes with mapped tensors.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from blocktrain.errors import CheckpointError, TensorError
from blocktrain.io.arrays import as_arrays, as_tensors
from blocktrain.io.files import mapped, written_whole
from blocktrain.wire.safetensors import Encoded, Shapes, decode, encode, encode_chunks

RESTORE = "check the path, or restore the file"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Writes one tensor after the other: they may wait on disk (shelf.py) and need not fit the memory."""
    with written_whole(path) as file:
        for chunk in encode_chunks(as_arrays(tensors), metadata):
            file.write(chunk)


def load_tensors(
    path: Path, expected: Shapes | None = None, remedy: str = "make it again, or restore it"
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata, read from the file when they are used. They must not be written to."""
    try:
        data = mapped(path)
    except OSError as error:
        raise unreadable(path, error, RESTORE) from None
    return from_bytes(data, path, expected, remedy, in_place=True)


def to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The contents of the file, in the format of wire/safetensors.py."""
    return encode(as_arrays(tensors), metadata)


def from_bytes(
    data: Encoded, path: Path, expected: Shapes | None, remedy: str, *, in_place: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata. An error names the file that the bytes were read from, and the remedy."""
    with damage_in(path, remedy):
        arrays, metadata = decode(data, expected=expected, in_place=in_place)
        return as_tensors(arrays), metadata


def stored_as(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors with tables and matrices in another precision. Vectors keep theirs, because they are small."""
    return {name: tensor.to(dtype) if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}


class MappedTensors:
    """The tensors of one safetensors file, left in the file and read when they are used. They stay valid when the file
    is deleted or replaced."""

    def __init__(self, path: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
        self.path = path
        data = mapped(path)
        if not isinstance(data.obj, mmap.mmap):
            raise TensorError(f"{path} is empty: get it again from its source")
        self._pages = data.obj
        self._begin = np.frombuffer(data, np.uint8).ctypes.data
        self.tensors = as_tensors(decode(data, expected=expected, in_place=True)[0])

    def expect(self, tensor: Tensor) -> None:
        """The tensor is used soon: the system may start to read it from the disk."""
        self._advise(tensor, "MADV_WILLNEED")

    def release(self, tensor: Tensor) -> None:
        """The tensor is not used for a while. It no longer counts as memory of this process; the system keeps its pages
        as long as it can."""
        self._advise(tensor, "MADV_DONTNEED")

    def _advise(self, tensor: Tensor, advice: str) -> None:
        if not hasattr(mmap, advice):  # Windows
            return
        begin = tensor.data_ptr() - self._begin
        end = begin + tensor.nbytes
        page_begin = begin - begin % mmap.PAGESIZE
        self._pages.madvise(getattr(mmap, advice), page_begin, end - page_begin)


def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error, RESTORE) from None


def unreadable(path: Path, error: OSError, remedy: str) -> CheckpointError:
    state = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    return CheckpointError(f"{path} {state}: {remedy}")


@contextmanager
def damage_in(path: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except TensorError as error:
        raise CheckpointError(f"{path}: {_without_remedy(error)}: {remedy}") from None


def _without_remedy(error: TensorError) -> str:
    return str(error).rpartition(": ")[0]
