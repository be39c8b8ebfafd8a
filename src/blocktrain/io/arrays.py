"""Converts between numpy arrays, which are stored and sent, and torch tensors, which are trained. On the CPU both share
the same memory. Next: wire/safetensors.py, arrays as bytes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from blocktrain.wire.safetensors import BFLOAT16, Array

with warnings.catch_warnings():  # torch warns once per process about a read-only array: here, unseen
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"read only", np.uint8))


def as_arrays(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    return {name: _as_array(tensor) for name, tensor in tensors.items()}


def as_tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """Tensors of read-only arrays must not be written to."""
    return {name: _as_tensor(array) for name, array in arrays.items()}


def _as_array(tensor: Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:  # which numpy itself does not know
        return tensor.view(torch.uint16).numpy(force=True).view(BFLOAT16)
    return tensor.numpy(force=True)  # also of another device, or of a parameter


def _as_tensor(array: Array) -> Tensor:
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view("uint16")).view(torch.bfloat16)
    return torch.from_numpy(array)
