"""Codecs: one vector of float32 <-> a few parts of few bytes, checked. Pure: knows no tensors' names and no updates.
Next: deltas.py, which makes updates with it; packing.py, sparse.py and vectors.py, its parts; docs/protocol.md,
"Codecs", the same byte by byte.

    fp32     the values themselves
    fp16     float16, times a power of two for every 256 values
    int8     whole steps of a 127th of the largest of every 256 values; int6 and int4 with 31 and 7 steps
    sparse   the `kept` largest of every `chunk` values (as SparseLoCo, arXiv 2603.08163): each a sign and, where there
             is more than one, one of a few levels fitted to the chunk; their places as Elias-Fano
    vector   for every 32 values one of 1024 sign vectors, in stages: `spent` thousandths of one a row of 1024 values

Sizes follow from the length and the settings alone, so bytes of another size are refused before they are decoded.
A decoded value is a short number times a bfloat16, exactly a float32; of vector a sum of such, always in one order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import numpy as np

from blocktrain.errors import ConfigError, TensorError
from blocktrain.spec import SwarmSpec
from blocktrain.wire.codecs.packing import EliasFano, ceil, pack, unpack
from blocktrain.wire.codecs.sparse import Largest, largest, scattered
from blocktrain.wire.codecs.vectors import (
    BOOK_BYTES,
    HIGH_BYTES,
    LOW_BYTES,
    MAX_STAGES,
    ROW,
    STAGE_BITS,
    Stages,
    decode_rows,
    encode_rows,
)
from blocktrain.wire.safetensors import BFLOAT16, Array, Floats

CODECS = ("fp32", "fp16", "int8", "int6", "int4", "sparse", "vector")
BLOCK = 256  # values that share a scale
CHUNK = 4096  # values that `sparse` chooses among
PIECE = 1 << 16  # values that are coded at once: they stay in a processor's cache
KEPT_PIECES = 8
MAX_CHUNK = 2**16
LAST_FACTOR, MOST_LAST = 4, 3
SPENT_SHARE = 0.97  # of the bytes that an update may have; the rest is for its header
MAX_MAGNITUDE = 2.0**126  # what is larger than this is no weight, and sums of it could overflow

_TINY_SCALE = 2.0**-120  # below this float32 loses digits; also keeps the scale of nothing but zeros above zero

_FLOAT32, _FLOAT16, _UINT8 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint8)

SETTINGS = {"sparse": ("chunk", "kept", "value_bits"), "vector": ("spent",)}

Part: TypeAlias = tuple[np.dtype[Any], tuple[int, ...]]


@dataclass(frozen=True)
class CodecSettings:
    """How a vector is coded; chunk, kept and value_bits belong to `sparse`, spent to `vector`."""

    codec: str
    chunk: int = CHUNK
    kept: int = 64
    value_bits: int = 1
    spent: int = 1000

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ConfigError(f'codec = "{self.codec}" is unknown: use one of {", ".join(CODECS)}')
        _require_between("chunk", self.chunk, 1, MAX_CHUNK)
        _require_between("kept", self.kept, 1, self.chunk)
        _require_between("value_bits", self.value_bits, 1, 4)
        _require_between("spent", self.spent, 1, 500 * MAX_STAGES)

    @property
    def lossless(self) -> bool:
        return self.codec == "fp32"

    @property
    def gains_from_course(self) -> bool:
        """Whether it sends so little that it lags behind a block's course where it is not told of it."""
        return self.codec in SETTINGS

    @property
    def levels(self) -> int:
        return 1 << self.value_bits - 1

    @property
    def places(self) -> EliasFano:
        return EliasFano(self.kept, self.chunk)

    def num_stages(self, size: int) -> int:
        """That an update of so many values has."""
        return ceil(ceil(size, ROW) * self.spent, 1000)

    def covers(self, other: CodecSettings) -> bool:
        """Whether a run of these settings takes updates of those: equal, or smaller."""
        same = replace(other, kept=self.kept, spent=self.spent).describe() == self.describe()
        return same and other.kept <= self.kept and other.spent <= self.spent

    def describe(self) -> dict[str, str]:
        """What a reader must know, as metadata."""
        return {"codec": self.codec, **{key: str(getattr(self, key)) for key in SETTINGS.get(self.codec, ())}}


def update_settings(swarm: SwarmSpec, phase_steps: int, steps_done: int) -> CodecSettings:
    """How an update is coded that brings a phase of so many steps to `steps_done`.

    `sparse` and `vector` spend what `update_ratio` leaves them evenly over the rounds, but for the last tenth of them,
    one to MOST_LAST: these get LAST_FACTOR times as much, since what is not sent in the end is lost."""
    if swarm.update not in SETTINGS:
        return CodecSettings(swarm.update)
    num_rounds = ceil(phase_steps, swarm.round_steps)
    num_last = min(ceil(num_rounds, 10), MOST_LAST)
    mean = (num_rounds + (LAST_FACTOR - 1) * num_last) / num_rounds
    is_last = ceil(steps_done, swarm.round_steps) > num_rounds - num_last
    value_bits = (LAST_FACTOR if is_last else 1) / mean * SPENT_SHARE * 32 / swarm.update_ratio
    if swarm.update == "sparse":
        return CodecSettings("sparse", kept=_most_kept(value_bits * CHUNK))
    return CodecSettings("vector", spent=max(1, int(1000 * (value_bits * ROW - 8) / STAGE_BITS)))


def _most_kept(chunk_bits: float) -> int:
    """The most values, a multiple of eight, that so many bits of a chunk hold; at least eight, at most half of it."""
    fits = [
        kept for kept in range(8, CHUNK // 2 + 1, 8) if _chunk_bits(CodecSettings("sparse", CHUNK, kept)) <= chunk_bits
    ]
    return max(fits, default=8)


def _chunk_bits(settings: CodecSettings) -> int:
    parts = parts_of(settings, settings.chunk)
    return sum(8 * dtype.itemsize * math.prod(shape) for dtype, shape in parts.values())


def _require_between(key: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{key} = {value!r} must be a whole number from {low} to {high}")


def within(tensor: Floats, limit: float) -> bool:
    """Whether all values are numbers of at most this magnitude."""
    return not tensor.size or bool(tensor.max() <= limit and tensor.min() >= -limit)  # NaN compares false


def parts_of(settings: CodecSettings, size: int) -> dict[str, Part]:
    """The parts of an update of so many values: name -> dtype and shape."""
    if settings.codec == "fp32":
        return {"values": (_FLOAT32, (size,))}
    if settings.codec == "sparse":
        rows, places = ceil(size, settings.chunk), settings.places
        return {
            "codes": (_UINT8, (rows, ceil(settings.kept, 8) * settings.value_bits)),
            "high": (_UINT8, (rows, places.high_bytes)),
            "levels": (BFLOAT16, (rows, settings.levels)),
            "low": (_UINT8, (rows, places.low_bytes)),
        }
    if settings.codec == "vector":
        stages = settings.num_stages(size)
        return {
            "book": (_UINT8, (BOOK_BYTES,)),
            "gains": (BFLOAT16, (stages, 1)),
            "high": (_UINT8, (stages, HIGH_BYTES)),
            "low": (_UINT8, (stages, LOW_BYTES)),
            "counts": (_UINT8, (ceil(size, ROW),)),
        }
    rows, half = ceil(size, BLOCK), settings.codec == "fp16"
    codes = (_FLOAT16, (rows, BLOCK)) if half else (_UINT8, (rows, BLOCK * _bits(settings.codec) // 8))
    return {"codes": codes, "scale": (BFLOAT16, (rows, 1))}


def _bits(codec: str) -> int:
    return int(codec.removeprefix("int"))


def _top(bits: int) -> int:
    """The largest code, as a number of steps; the smallest is its negative."""
    return (1 << bits - 1) - 1


class Values(Protocol):
    def slice(self, begin: int, end: int) -> Floats:
        """These values of the vector in float32, each exactly what was sent."""


def encode_vector(values: Values, size: int, settings: CodecSettings) -> dict[str, Array]:
    """Piece by piece: what is small enough to stay in a processor's cache is read from memory once."""
    match settings.codec:
        case "fp32":
            return {"values": values.slice(0, size)}
        case "vector":
            return vars(encode_rows(_rows(values.slice(0, size), ROW), settings.num_stages(size)))
        case "sparse":
            length, places, bits = settings.chunk, settings.places, settings.value_bits
            coded = [vars(largest(_rows(x, length), len(x), places, bits)) for x in _pieces(values, size, length)]
        case "fp16":
            coded = [_as_half(_rows(x, BLOCK)) for x in _pieces(values, size, BLOCK)]
        case codec:
            coded = [_as_steps(_rows(x, BLOCK), _bits(codec)) for x in _pieces(values, size, BLOCK)]
    empty = {name: np.empty((0, *shape[1:]), dtype) for name, (dtype, shape) in parts_of(settings, 0).items()}
    return {name: np.concatenate([none, *(piece[name] for piece in coded)]) for name, none in empty.items()}


def _pieces(values: Values, size: int, row: int) -> Iterator[Floats]:
    """Of whole rows, but for the last."""
    length = row * max(1, PIECE // row)
    return (values.slice(start, min(start + length, size)) for start in range(0, size, length))


def decode_vector(parts: Mapping[str, Array], settings: CodecSettings, size: int) -> Values:
    """Parts of the right types and sizes, their contents checked."""
    if settings.codec == "fp32":
        _require_within(parts["values"], MAX_MAGNITUDE, "values")
        return _Plain(parts["values"])
    if settings.codec == "sparse":
        _require_within(parts["levels"], MAX_MAGNITUDE, "levels")
        try:
            return scattered(Largest(**parts), size, settings.places, settings.value_bits)
        except ValueError as error:
            raise damaged(str(error)) from None
    if settings.codec == "vector":
        return _read_stages(parts)
    if settings.codec == "fp16":
        _require_within(parts["codes"], float(np.finfo(np.float16).max), "codes")
    bits = None if settings.codec == "fp16" else _bits(settings.codec)
    _require_within(parts["scale"], MAX_MAGNITUDE / (2**15 if bits is None else _top(bits)), "scale")
    return _Blocks(parts["codes"], parts["scale"], bits)


@dataclass(frozen=True)
class _Plain:
    values: Floats

    def slice(self, begin: int, end: int) -> Floats:
        return self.values[begin:end]


@dataclass(frozen=True)
class _Blocks:
    codes: Array
    scale: Array
    bits: int | None  # of an integer code

    def slice(self, begin: int, end: int) -> Floats:
        first, last = begin // BLOCK, ceil(end, BLOCK)
        values = self._steps(self.codes[first:last])
        values *= self.scale[first:last].astype(np.float32)
        return values.reshape(-1)[begin - first * BLOCK : end - first * BLOCK]

    def _steps(self, codes: Array) -> Floats:
        if self.bits is None:
            return codes.astype(np.float32)
        steps = unpack(codes, self.bits, BLOCK).astype(np.float32)
        steps -= _top(self.bits)
        return steps


class _Staged:
    """Decoded a piece at a time, and the last few are kept: tensors smaller than a piece share it."""

    def __init__(self, stages: Stages) -> None:
        rows, num_rows = PIECE // ROW, len(stages.counts)
        self._piece = lru_cache(KEPT_PIECES)(
            lambda number: decode_rows(stages, number * rows, min((number + 1) * rows, num_rows)).reshape(-1)
        )

    def slice(self, begin: int, end: int) -> Floats:
        first, last = begin // PIECE, ceil(end, PIECE)
        pieces = [self._piece(number) for number in range(first, last)]
        whole = pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, np.float32), *pieces])
        return whole[begin - first * PIECE : end - first * PIECE]


def _rows(vector: Floats, length: int) -> Floats:
    """The vector as rows; zeros fill the last one."""
    if missing := -len(vector) % length:
        vector = np.concatenate([vector, np.zeros(missing, vector.dtype)])
    return vector.reshape(-1, length)


def _as_half(rows: Floats) -> dict[str, Array]:
    """float16 of at most 2^15 times a power of two: neither too large for the type nor, below the peak, too small."""
    exponent = _peak(rows).view(np.int32) & 0x7F800000  # the mantissa gone: the power of two at or below
    scale = np.maximum(exponent.view(np.float32) * np.float32(2.0**-14), np.float32(_TINY_SCALE))
    return {"codes": (rows / scale).astype(np.float16), "scale": scale.astype(BFLOAT16)}


def _as_steps(rows: Floats, bits: int) -> dict[str, Array]:
    """Whole steps of peak / (2^(bits-1) - 1). The scale is rounded up, so no code is out of range and no value is
    off by more than half a step."""
    top = _top(bits)
    rounded_up = ((_peak(rows) / np.float32(top)).view(np.int32) + 0xFFFF & ~0xFFFF).view(np.float32)
    scale = np.maximum(rounded_up, np.float32(_TINY_SCALE))
    codes = rows / scale
    np.rint(codes, out=codes)
    codes += top
    return {"codes": pack(codes.astype(np.uint8), bits), "scale": scale.astype(BFLOAT16)}


def _peak(rows: Floats) -> Floats:
    peak: Floats = np.maximum(rows.max(axis=1, keepdims=True), -rows.min(axis=1, keepdims=True))
    return peak


def _read_stages(parts: Mapping[str, Array]) -> _Staged:
    """No sum of a row's stages is too large either."""
    _require_within(parts["gains"], MAX_MAGNITUDE / (MAX_STAGES * ROW), "gains")
    counts = parts["counts"]
    if (named := int(counts.sum(dtype=np.int64))) != len(parts["gains"]) or (counts > MAX_STAGES).any():
        raise damaged(
            f"its rows name {named} stages where {len(parts['gains'])} are expected, and at most {MAX_STAGES} a row"
        )
    return _Staged(Stages(**parts))


def check_parts(parts: Mapping[str, Array], expected: Mapping[str, Part]) -> None:
    if parts.keys() != expected.keys():
        raise damaged(f"it has {len(parts)} parts, not exactly {', '.join(expected)}")
    for name, (dtype, shape) in expected.items():
        if (parts[name].dtype, tuple(parts[name].shape)) != (dtype, shape):
            raise damaged(
                f'part "{name}" is {parts[name].dtype} {tuple(parts[name].shape)} and {dtype} {shape} is expected'
            )


def _require_within(part: Array, limit: float, name: str) -> None:
    if not within(part.astype(np.float32, copy=False), limit):
        raise damaged(f'part "{name}" holds NaN, Inf or more than {limit:.0e}', code="finite")


def damaged(detail: str, code: str = "tensors") -> TensorError:
    return TensorError(f"not a whole update ({detail}): make it again with blocktrain, from the same block", code)
