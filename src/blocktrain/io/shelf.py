"""Shelf: named tensors that wait on disk while they are not used, in files without a name, which disappear with the
process. Nothing here is durable: checkpoint.py is.
Next: train/streamed.py, which trains blocks that wait on a shelf."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

import torch
from torch import Tensor

from blocktrain.io.arrays import as_arrays, as_tensors
from blocktrain.io.files import make_folder, storage_errors
from blocktrain.wire.safetensors import Array

ALIGNMENT_BYTES = 64  # of torch's own tensors
ZEROS = bytes(2**20)
_Layout = dict[str, tuple[torch.Size, torch.dtype]]


class Shelf:
    """Keeps groups of named tensors in a folder. Between uses they do not count as memory of this process."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        self._folder = folder
        self._places: dict[Hashable, _Place] = {}

    def keys(self) -> list[Hashable]:
        return list(self._places)

    def remove(self, key: Hashable) -> None:
        del self._places[key]

    def put(self, key: Hashable, tensors: Mapping[str, Tensor]) -> None:
        """Copies the tensors to the disk, in place of an older group of that key."""
        layout = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        place = self._places.get(key)
        if place is None or place.layout != layout:
            place = self._places[key] = _Place(self._folder, layout)
        for name, tensor in tensors.items():
            place.tensors[name].copy_(tensor.detach())
        place.release()

    @contextmanager
    def taken(self, key: Hashable) -> Iterator[dict[str, Tensor]]:
        """The tensors of a group, to be copied from here; an unknown key has none."""
        place = self._places.get(key)
        yield dict(place.tensors) if place else {}
        if place:
            place.release()

    def lying(self, key: Hashable) -> dict[str, Tensor]:
        """The tensors as they lie on the disk, not copied; an unknown key has none. The next `put` changes them."""
        return dict(self._places[key].tensors) if key in self._places else {}


class ShelvedArrays(MutableMapping[str, Array]):
    """A table of numpy arrays on a shelf. An array that was read changes when its name is assigned again."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def __setitem__(self, name: str, array: Array) -> None:
        self._shelf.put(name, as_tensors({name: array}))

    def __getitem__(self, name: str) -> Array:
        return as_arrays({name: self._shelf.lying(name)[name]})[name]

    def __delitem__(self, name: str) -> None:
        self._shelf.remove(name)

    def __iter__(self) -> Iterator[str]:
        return map(str, self._shelf.keys())

    def __len__(self) -> int:
        return len(self._shelf.keys())


class _Place:
    """The file of one group, mapped into memory."""

    def __init__(self, folder: Path, layout: _Layout) -> None:
        self.layout = layout
        sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in layout.items()}
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        with storage_errors(folder, end), TemporaryFile(dir=folder) as file:
            _reserve(file, max(end, 1))
            self._pages = mmap.mmap(file.fileno(), max(end, 1))
        whole = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.tensors = {
            name: whole[offsets[name] : offsets[name] + sizes[name]].view(dtype).view(shape)
            for name, (shape, dtype) in layout.items()
        }

    def release(self) -> None:
        """The system writes changed pages to the disk when it needs their memory."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._pages.madvise(mmap.MADV_DONTNEED)


def _reserve(file: BinaryIO, num_bytes: int) -> None:
    """Takes the space now: a disk that fills later would end the process at a write into the mapped file."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return
    for start in range(0, num_bytes, len(ZEROS)):  # macOS, Windows
        file.write(ZEROS[: num_bytes - start])
    file.flush()
