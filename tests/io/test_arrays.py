"""Conversions between torch and numpy keep the numbers, the type and the memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from blocktrain.io.arrays import as_arrays, as_tensors
from blocktrain.wire.safetensors import DTYPES, decode, encode

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
two_dtypes = pytest.mark.parametrize("dtype", ["F32", "BF16"])


def numbers(dtype: str) -> torch.Tensor:
    return torch.tensor([[0.0, 1.0, 2.5], [3.0, 100.0, 1.0]]).to(TORCH_DTYPES[dtype])


@every_dtype
def test_tensors_cross_with_their_type_and_values_and_come_back(dtype):
    tensor = numbers(dtype)
    array = as_arrays({"x": tensor})["x"]
    assert array.dtype == DTYPES[dtype]
    assert array.tolist() == tensor.tolist()
    back = as_tensors({"x": array})["x"]
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


@every_dtype
def test_arrays_cross_with_their_type_and_values_and_come_back(dtype):
    array = np.array(numbers(dtype).tolist()).astype(DTYPES[dtype])
    tensor = as_tensors({"x": array})["x"]
    assert tensor.dtype == TORCH_DTYPES[dtype]
    assert tensor.tolist() == array.tolist()
    back = as_arrays({"x": tensor})["x"]
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


@two_dtypes
@pytest.mark.parametrize("shape", [(), (0, 4), (1,)])
def test_shapes_of_next_to_nothing_cross(dtype, shape):
    array = as_arrays({"x": torch.ones(shape, dtype=TORCH_DTYPES[dtype])})["x"]
    assert isinstance(array, np.ndarray)
    assert array.shape == shape
    assert as_tensors({"x": array})["x"].shape == shape


@two_dtypes
def test_any_layout_crosses_as_its_values(dtype):
    tensor = numbers(dtype).T
    array = as_arrays({"x": tensor})["x"]
    assert array.tolist() == tensor.tolist()
    assert as_tensors({"x": array.T[:, ::2]})["x"].tolist() == numbers(dtype)[:, ::2].tolist()


@two_dtypes
def test_what_crosses_lies_where_it_lay(dtype):
    tensor = numbers(dtype)
    array = as_arrays({"x": tensor})["x"]
    assert array.ctypes.data == tensor.data_ptr()
    back = as_tensors({"x": array})["x"]
    assert back.data_ptr() == tensor.data_ptr()
    array[0, 0] = 7
    assert tensor[0, 0] == back[0, 0] == 7


@two_dtypes
def test_a_parameter_with_a_gradient_crosses_without_it(dtype):
    parameter = torch.nn.Parameter(numbers(dtype))
    parameter.sum().backward()
    array = as_arrays({"x": parameter})["x"]
    assert array.tolist() == parameter.tolist()
    assert not as_tensors({"x": array})["x"].requires_grad


@two_dtypes
def test_arrays_that_may_only_be_read_cross_where_they_lie(dtype):
    array = decode(encode(as_arrays({"x": numbers(dtype)})), in_place=True)[0]["x"]
    assert not array.flags.writeable
    tensor = as_tensors({"x": array})["x"]
    assert torch.equal(tensor, numbers(dtype))
    assert tensor.data_ptr() == array.ctypes.data


@pytest.mark.parametrize("imported, warned", [("blocktrain.io.arrays", False), ("torch", True)])
def test_nothing_warns_of_arrays_that_may_only_be_read(imported, warned):
    code = f"import {imported}, numpy, torch; torch.from_numpy(numpy.frombuffer(b'x', numpy.uint8))"
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert ("not writable" in ended.stderr) == warned == bool(ended.returncode)


def test_all_of_a_table_crosses_under_its_names():
    table = {"gain": torch.ones(3), "scale": torch.zeros(2).bfloat16()}
    assert list(as_arrays(table)) == list(as_tensors(as_arrays(table))) == ["gain", "scale"]
