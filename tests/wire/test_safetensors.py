"""Named tensors <-> bytes: what goes in comes out, and nothing else is let in."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.errors import TensorError
from blocktrain.io.arrays import as_arrays
from blocktrain.model.block import block_shapes
from blocktrain.spec import preset
from blocktrain.wire.safetensors import (
    DTYPES,
    MAX_AXES,
    MAX_HEADER_BYTES,
    MAX_NAME,
    MAX_TENSORS,
    decode,
    encode,
)

names = st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__" and name.isprintable())
tensors = st.builds(
    lambda dtype, shape, seed: np.asarray(np.random.default_rng(seed).integers(0, 2, shape)).astype(dtype),
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 99),
)
WHOLE = encode({"a": np.ones((2, 3), np.float32), "b": np.arange(4, dtype=np.int64)}, {"block": "1", "steps": "9"})


def raw(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(shape: object, begin: object, end: object, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@given(st.dictionaries(names, tensors, max_size=4), st.dictionaries(names, names, max_size=3))
def test_tensors_and_metadata_come_back_as_they_went(table, metadata):
    back, back_metadata = decode(encode(table, metadata))
    assert back_metadata == metadata
    assert back.keys() == table.keys()
    for name, tensor in table.items():
        assert back[name].dtype == tensor.dtype
        assert np.array_equal(back[name], tensor)


def test_the_bytes_are_those_that_safetensors_writes():
    table = {
        "b": np.arange(4, dtype=np.float32),
        "a": np.ones((2, 3), np.float32),
        "half": np.ones(3, np.float16),
        "codes": np.ones(5, np.uint8),
    }
    assert encode(table) == safetensors.numpy.save(table)


def test_the_bytes_of_bfloat16_are_those_that_safetensors_writes():
    table = {"half": torch.ones(3).half(), "scale": torch.arange(4.0).bfloat16(), "a": torch.ones(2, 3)}
    assert encode(as_arrays(table)) == safetensors.torch.save(table)


def test_equal_tensors_give_equal_bytes_in_another_process():
    code = (
        "import sys, numpy as np; from blocktrain.wire.safetensors import encode;"
        "table = {'b': np.arange(4, dtype=np.int64), 'a': np.ones((2, 3), np.float32)};"
        "sys.stdout.buffer.write(encode(table, {'steps': '9', 'block': '1'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == WHOLE


@pytest.mark.parametrize(
    "tensor",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.arange(6, dtype=np.float32)[::2],
        np.broadcast_to(np.ones(3, np.float32), (2, 3)),
    ],
    ids=["transposed", "strided", "expanded"],
)
def test_any_layout_is_stored_as_its_values(tensor):
    back = decode(encode({"x": tensor}))[0]["x"]
    assert back.dtype == tensor.dtype
    assert np.array_equal(back, tensor)


def test_tensors_that_share_memory_are_stored_twice():
    tied = np.ones(3, np.float32)
    assert decode(encode({"a": tied, "b": tied[1:]}))[0]["b"].tolist() == [1, 1]


@pytest.mark.parametrize("name, tensor", [("__metadata__", np.ones(1, np.float32)), ("z", np.ones(1, np.complex64))])
def test_what_the_format_cannot_hold_is_refused(name, tensor):
    with pytest.raises(TensorError, match=f'"{name}" of .* cannot be stored: rename it, or use one of F64'):
        encode({name: tensor})


@pytest.mark.parametrize(
    "expected, complaint",
    [
        ({"a": (2, 3), "b": (4,), "c": (1,)}, r'tensor "c" is missing: use the tensors of a model with the same'),
        ({"a": (2, 3), "b": (4,), "c": (1,), "d": ()}, r'tensor "c" is missing \(and 1 more\)'),
        ({"a": (2, 3)}, r'tensor "b" is not part of this model'),
        ({"a": (3, 2), "b": (4,)}, r'tensor "a" has shape \(2, 3\) and \(3, 2\) is expected'),
    ],
)
def test_other_names_or_shapes_are_refused(expected, complaint):
    with pytest.raises(TensorError, match=complaint):
        decode(WHOLE, expected=expected)


def test_the_expected_names_and_shapes_are_accepted():
    assert decode(WHOLE, expected={"b": (4,), "a": (2, 3)})[0].keys() == {"a", "b"}


def test_more_bytes_than_allowed_are_refused():
    assert decode(WHOLE, max_bytes=len(WHOLE))
    with pytest.raises(TensorError, match=rf"got {len(WHOLE)} bytes of tensors and at most {len(WHOLE) - 1}"):
        decode(WHOLE, max_bytes=len(WHOLE) - 1)


@pytest.mark.parametrize("num_bytes", range(0, len(WHOLE), 7))
def test_cut_short_anywhere_is_refused(num_bytes):
    with pytest.raises(TensorError, match=r"not whole safetensors bytes .*: get them again"):
        decode(WHOLE[:num_bytes])


@pytest.mark.parametrize(
    "data, complaint",
    [
        (WHOLE + b"x", "declares 56 bytes of tensors and 57 are there"),
        (struct.pack("<Q", 2**60) + b"{}", "a header of 1152921504606846976 bytes is declared and 2 bytes follow"),
        (raw(b"{oops"), "its header is not JSON"),
        (raw(b"\xff\xfe{}"), "its header is not JSON"),
        (raw(b"[" * 100_000), "its header is not JSON"),
        (raw([]), "its header is not a table"),
        (raw(b'{"a":1,"a":2}'), "a name occurs twice"),
        (raw({"__metadata__": {"steps": 3}}), "its metadata is not a table of strings"),
        (raw({"a": entry([2], 0, 8, "PICKLE")}, bytes(8)), '"a" is not described by a known dtype'),
        (raw({"a": entry([-2, -1], 0, 8)}, bytes(8)), '"a" is not described'),
        (raw({"a": entry([True], 0, 4)}, bytes(4)), '"a" is not described'),
        (raw({"a": entry([0, 2**63], 0, 0)}), '"a" is not described'),
        (raw({"a": entry([2], 0, "8")}, bytes(8)), '"a" is not described'),
        (raw({"a": entry([2**31 - 1] * 3, 0, 8)}, bytes(8)), "takes .* bytes and 8 are declared"),
        (raw({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)), "starts at byte 4 where 8 was expected"),
        (raw({"a": entry([2], 4, 12)}, bytes(12)), "starts at byte 4 where 0 was expected"),
        (pickle.dumps({"a": [1.0]}), "header"),
        (raw({"a": entry([1] * 65, 0, 4)}, bytes(4)), f"65 axes and at most {MAX_AXES} are accepted"),
        (raw({"a": entry([2**31 - 1] * 60_000, 0, 4)}, bytes(4)), "60000 axes and at most"),
        (raw({"a": entry([1], -(10**4299), 10**4299)}, bytes(4)), "a number of 4300 digits"),
        (raw({"a": entry([1], 0, int("9" * 20))}, bytes(4)), "a number of 20 digits"),
        (raw({"a": entry([1], 0, 4.0)}, bytes(4)), "its header is not JSON: it holds the fraction 4.0"),
        (raw(b'{"a":' + b"9" * 100_000 + b"}"), "a number of 100000 digits"),
        (raw({"a" * (MAX_NAME + 1): entry([1], 0, 4)}, bytes(4)), f"a name of {MAX_NAME + 1} characters"),
        (raw({f"{n}": entry([0], 0, 0) for n in range(MAX_TENSORS + 1)}), f"{MAX_TENSORS + 1} tensors"),
        (raw(b" " * (MAX_HEADER_BYTES + 1)), f"at most {MAX_HEADER_BYTES} are accepted"),
        (raw(b'{"\\ud800": 1}'), "its header is not JSON"),
    ],
    ids=lambda value: None if isinstance(value, str) else f"{len(value)} bytes",
)
def test_a_header_that_lies_is_refused_before_any_tensor_is_made(data, complaint):
    with pytest.raises(TensorError, match=complaint):
        decode(data)


def test_no_header_takes_long_to_refuse():
    huge = [raw({"a": entry([2**31 - 1] * axes, 0, 4)}, bytes(4)) for axes in (16, 80_000, 800_000)]
    huge += [raw(b'{"a":[' + b",".join([b"9" * 4000] * 200) + b"]}")]
    began_s = time.process_time()
    for data in huge:
        with pytest.raises(TensorError):
            decode(data)
    assert time.process_time() - began_s < 0.5  # it was many seconds


def test_a_reader_may_accept_fewer_bytes_of_header():
    (header_bytes,) = struct.unpack_from("<Q", WHOLE)
    assert decode(WHOLE, max_header_bytes=header_bytes)
    with pytest.raises(TensorError, match=f"a header of {header_bytes} bytes is declared .*at most {header_bytes - 1}"):
        decode(WHOLE, max_header_bytes=header_bytes - 1)


def test_the_largest_preset_needs_a_tenth_of_the_limits():
    """With the state of the optimiser beside every tensor of every block, as one file."""
    spec = preset("paper")
    names = [f"{block}.{name}" for block in range(spec.model.blocks) for name in block_shapes(spec, block)]
    states = [name + suffix for name in names for suffix in ("", ".exp_avg", ".exp_avg_sq")]
    header = {name: entry([2**31 - 1] * 2, 10**12, 10**12) for name in states}
    assert len(json.dumps(header)) < MAX_HEADER_BYTES / 10
    assert len(states) < MAX_TENSORS / 10


@pytest.mark.parametrize(
    "table, complaint",
    [
        ({"a": np.ones([1] * 64, np.float32)}, f"64 axes and at most {MAX_AXES}"),
        ({"a" * (MAX_NAME + 1): np.ones(1, np.float32)}, f"a name of {MAX_NAME + 1} characters"),
        ({f"{n}": np.ones(0, np.float32) for n in range(MAX_TENSORS + 1)}, f"{MAX_TENSORS + 1} tensors"),
    ],
    ids=["axes", "name", "tensors"],
)
def test_what_no_reader_accepts_is_not_written(table, complaint):
    with pytest.raises(TensorError, match=complaint):
        encode(table)


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_a_changed_byte_gives_tensors_or_our_error_and_nothing_else(position, change):
    data = bytearray(WHOLE)
    data[position] ^= change
    with suppress(TensorError):
        decode(bytes(data))
