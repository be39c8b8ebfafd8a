"""Named tensors to bytes in the safetensors format and back, checked before anything is built; never pickle. No files
and no sockets. Tensors are numpy arrays here and in the whole coordinator, which never loads torch.
Next: io/checkpoint.py, which stores these bytes on disk; io/arrays.py, the same tensors in torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from blocktrain.errors import TensorError

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": BFLOAT16,
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool),
}
# A header is kilobytes. That of the largest preset with its optimiser's state takes less than a tenth of these limits.
MAX_HEADER_BYTES = 2**20
MAX_TENSORS = 2**13
MAX_NAME = 200  # characters
MAX_AXES = 8
MAX_AXIS = 2**31 - 1
MAX_DIGITS = 19  # of a number
KNOWN_HEADERS, KNOWN_BYTES = 64, 2**14  # how many headers are remembered, and how long they are at most

Encoded: TypeAlias = bytes | memoryview
Array: TypeAlias = NDArray[Any]
Tensors: TypeAlias = dict[str, Array]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Floats: TypeAlias = NDArray[np.floating[Any]]
AnyTensor = TypeVar("AnyTensor")

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SPELLED = {dtype: str(dtype) for dtype in DTYPES.values()}  # numpy takes long to spell a name
_AS_JSON = json.JSONEncoder(separators=(",", ":"))
_LENGTH_BYTES = 8
_METADATA = "__metadata__"


@dataclass(frozen=True)
class _Header:
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> (dtype name, shape)
    offsets: dict[str, int]  # name -> its first byte, counted from the start of the data
    metadata: dict[str, str]


def flat(blocks: Mapping[int, Mapping[str, AnyTensor]]) -> dict[str, AnyTensor]:
    """The tensors of several blocks in one table, named like "1.readout"."""
    return {f"{block}.{name}": tensor for block, tensors in blocks.items() for name, tensor in tensors.items()}


def by_block(tensors: Mapping[str, AnyTensor]) -> dict[int, dict[str, AnyTensor]]:
    """The reverse of `flat`."""
    blocks: dict[int, dict[str, AnyTensor]] = {}
    for name, tensor in tensors.items():
        block, _, inner = name.partition(".")
        blocks.setdefault(int(block), {})[inner] = tensor
    return blocks


def continue_block(initial: Mapping[str, AnyTensor], before: Mapping[str, AnyTensor]) -> dict[str, AnyTensor]:
    """A stacked block starts where the trained block before it ended: an initial block is the identity, and with the
    read-out of the block before it gives the same logits."""
    return {**initial, **{name: tensor for name, tensor in before.items() if name in ("readout", "readout_down")}}


def encode(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    return b"".join(encode_chunks(tensors, metadata))


def encode_chunks(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> list[memoryview]:
    """The same without copying the tensors: the header, then a view of each tensor's bytes. Equal tensors and metadata
    give equal bytes, so that a hash can name them. (The safetensors package writes metadata in an order that changes
    from process to process, and copies every byte three times.)"""
    for name, tensor in tensors.items():
        if name == _METADATA or tensor.dtype not in _NAMES:
            raise TensorError(
                f'"{name}" of {tensor.dtype} cannot be stored: rename it, or use one of {", ".join(DTYPES)}'
            )
    if excess := _excess({name: tensor.ndim for name, tensor in tensors.items()}):
        raise TensorError(f"{excess}, so that no reader would accept these tensors: store fewer or simpler ones")
    header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    parts, end = list[memoryview](), 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, _SPELLED[item[1].dtype], item[0])):
        # A view, if the tensor is contiguous.
        parts.append(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
        begin, end = end, end + parts[-1].nbytes
        header[name] = _entry(tensor.dtype, tensor.shape, begin, end)
    return [memoryview(_encoded_header(header)), *parts]


def encode_joined(name: str, arrays: Sequence[Array], metadata: Mapping[str, str]) -> bytes:
    """One flat tensor of this name, which consists of these flat arrays of one type: the same bytes as those of their
    concatenation, copied once."""
    dtype, size = arrays[0].dtype, sum(array.size for array in arrays)
    header = {_METADATA: dict(sorted(metadata.items())), name: _entry(dtype, (size,), 0, size * dtype.itemsize)}
    return b"".join([_encoded_header(header), *(np.ascontiguousarray(array).view(np.uint8).data for array in arrays)])


def _entry(dtype: np.dtype[Any], shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}


def _encoded_header(header: Mapping[str, Any]) -> bytes:
    text = _AS_JSON.encode(header).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # the tensors start aligned
    return struct.pack("<Q", len(text)) + text


def decode(
    data: Encoded,
    *,
    expected: Mapping[str, tuple[int, ...]] | None = None,
    max_bytes: int | None = None,
    max_header_bytes: int = MAX_HEADER_BYTES,
    in_place: bool = False,
) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors and the metadata. If `expected` is given, no other names and shapes are accepted. With `in_place` the
    tensors are views of `data`: nothing is read before it is used, and nothing may write to them."""
    if max_bytes is not None and len(data) > max_bytes:
        raise TensorError(
            f"got {len(data)} bytes of tensors and at most {max_bytes} are accepted: send fewer or smaller ones"
        )
    header = _read_header(data, max_header_bytes)
    if expected is not None:
        _check_names_and_shapes(header, expected)
    whole = np.frombuffer(data, np.uint8)
    tensors = {name: _tensor(whole, header, name, in_place) for name in header.tensors}
    return tensors, dict(header.metadata)


def _tensor(whole: NDArray[np.uint8], header: _Header, name: str, in_place: bool) -> Array:
    (dtype_name, shape), begin = header.tensors[name], header.offsets[name]
    dtype = DTYPES[dtype_name]
    if in_place and begin % dtype.itemsize:
        raise _damaged(f'"{name}" starts at byte {begin}, where no {dtype_name} can be read in place')
    here = whole[begin : begin + math.prod(shape) * dtype.itemsize]
    return (here if in_place else here.copy()).view(dtype).reshape(shape)


def _read_header(data: Encoded, max_bytes: int) -> _Header:
    """What the header declares, checked against the bytes that follow it. Anyone may have sent it: every count and
    number is bounded before anything is computed with it. The versions of a block have equal headers: a short one that
    was just read is not parsed again."""
    text = _header_text(data, max_bytes)
    checked = _known_header if len(text) <= KNOWN_BYTES else _checked_header
    return checked(text, len(data) - _LENGTH_BYTES - len(text))


def _checked_header(text: bytes, tensor_bytes: int) -> _Header:
    entries, start = _parse(text), _LENGTH_BYTES + len(text)
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged("its metadata is not a table of strings")
    described = {name: _parse_entry(name, entry) for name, entry in entries.items()}
    if excess := _excess({name: len(shape) for name, (_, shape, *_) in described.items()}):
        raise _damaged(excess)
    spans, tensors, offsets = [], {}, {}
    for name, (dtype, shape, begin, end) in described.items():
        declared_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        if end - begin != declared_bytes:
            raise _damaged(f'"{name}" {dtype} {shape} takes {declared_bytes} bytes and {end - begin} are declared')
        spans.append((begin, end))
        tensors[name] = dtype, shape
        offsets[name] = start + begin
    _check_cover(sorted(spans), tensor_bytes)
    return _Header(tensors, offsets, metadata)


_known_header = lru_cache(KNOWN_HEADERS)(_checked_header)


def _excess(num_axes: Mapping[str, int]) -> str | None:
    """What is more than any reader accepts of these tensors: name -> number of axes."""
    if len(num_axes) > MAX_TENSORS:
        return f"there are {len(num_axes)} tensors and at most {MAX_TENSORS} are accepted"
    for name, axes in num_axes.items():
        if len(name) > MAX_NAME:
            return f"there is a name of {len(name)} characters and at most {MAX_NAME} are accepted"
        if axes > MAX_AXES:
            return f'"{name}" has {axes} axes and at most {MAX_AXES} are accepted'
    return None


def _header_text(data: Encoded, max_bytes: int) -> bytes:
    if len(data) < _LENGTH_BYTES:
        raise _damaged(f"{len(data)} bytes hold no header")
    header_bytes = struct.unpack_from("<Q", data)[0]
    if _LENGTH_BYTES + header_bytes > len(data):
        raise _damaged(f"a header of {header_bytes} bytes is declared and {len(data) - _LENGTH_BYTES} bytes follow")
    if header_bytes > max_bytes:
        raise _damaged(f"a header of {header_bytes} bytes is declared and at most {max_bytes} are accepted")
    return bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + header_bytes])


def _parse(text: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(text, object_pairs_hook=_table, parse_int=_whole_number, parse_float=_refuse_fraction)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"its header is not JSON: {error}") from None
    if not isinstance(entries, dict):
        raise _damaged("its header is not a table")
    return entries


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    for text in (text for pair in pairs for text in pair if isinstance(text, str)):
        text.encode()  # a lone surrogate is JSON, but an error message that quotes it could not be sent
    return table


def _whole_number(text: str) -> int:
    if (digits := len(text.removeprefix("-"))) > MAX_DIGITS:
        raise ValueError(f"it holds a number of {digits} digits and at most {MAX_DIGITS} are accepted")
    return int(text)


def _refuse_fraction(text: str) -> float:
    raise ValueError(f"it holds the fraction {text[:MAX_DIGITS]}")


def _parse_entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if dtype in DTYPES:
            axes_fit = all(type(axis) is int and 0 <= axis <= MAX_AXIS for axis in shape)
            if axes_fit and type(begin) is int and type(end) is int:
                return dtype, tuple(shape), begin, end
    raise _damaged(f'"{name[:MAX_NAME]}" is not described by a known dtype, a shape and two offsets')


def _check_cover(spans: list[tuple[int, int]], tensor_bytes: int) -> None:
    """The tensors follow each other without gap or overlap up to the last byte."""
    position = 0
    for begin, end in spans:
        if begin != position:
            raise _damaged(f"a tensor starts at byte {begin} where {position} was expected")
        position = end
    if position != tensor_bytes:
        raise _damaged(f"its header declares {position} bytes of tensors and {tensor_bytes} are there")


def _check_names_and_shapes(header: _Header, expected: Mapping[str, tuple[int, ...]]) -> None:
    if missing := sorted(expected.keys() - header.tensors.keys()):
        raise TensorError(f'tensor "{missing[0]}" is missing{_more(missing)}: {_OTHER_MODEL}')
    if extra := sorted(header.tensors.keys() - expected.keys()):
        raise TensorError(f'tensor "{extra[0]}" is not part of this model{_more(extra)}: {_OTHER_MODEL}')
    for name, (_, shape) in header.tensors.items():
        if shape != tuple(expected[name]):
            raise TensorError(
                f'tensor "{name}" has shape {shape} and {tuple(expected[name])} is expected: {_OTHER_MODEL}'
            )


_OTHER_MODEL = "use the tensors of a model with the same settings"


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _damaged(detail: str) -> TensorError:
    return TensorError(f"not whole safetensors bytes ({detail}): get them again from where they were made")
