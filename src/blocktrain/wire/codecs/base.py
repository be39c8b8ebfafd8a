"""What every codec is: a class that turns one vector of float32 into a few small arrays, its parts, and back. Here are
the base class, the checks of what others send, and what several codecs share. Knows no tensor names and no updates.
Next: table.py, all codecs by name; floats.py, integers.py, sparse.py, vector.py, one codec each; docs/protocol.md,
"Codecs", the same byte by byte.

The sizes of all parts follow from the length of the vector and the codec's settings, so parts of another size are
refused before they are decoded. A decoded value is a short number times a bfloat16, which float32 holds exactly. With
`vector` it is a sum of such products, always added in the same order. Every machine therefore decodes the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import numpy as np

from blocktrain.errors import ConfigError, TensorError
from blocktrain.wire.codecs.packing import ceil_div
from blocktrain.wire.safetensors import BFLOAT16, Array, Floats

PIECE = 1 << 16  # values that are coded at once: they stay in a processor's cache
LARGE_PIECE = 1 << 18  # for codecs of many short steps, where numpy's own work for each call would be most of the time
BLOCK = 256  # values that share a scale
MAX_MAGNITUDE = 2.0**126  # a larger value is not a weight, and sums of such values could overflow
TINY_SCALE = 2.0**-120  # float32 loses digits below this; also the scale of a block that is all zeros

UINT8: np.dtype[Any] = np.dtype(np.uint8)

PartType: TypeAlias = tuple[np.dtype[Any], tuple[int, ...]]  # dtype and shape


class Values(Protocol):
    """A vector that can be read piece by piece."""

    def slice(self, begin: int, end: int) -> Floats:
        """These values in float32."""


@dataclass(frozen=True)
class Codec(ABC):
    """A subclass is a frozen dataclass. Its fields are whole numbers, the settings that an update names beside the
    codec."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = False  # it sends the trained weights themselves, not a difference
    uses_course: ClassVar[bool] = False  # it sends little: updates are coded from the block's course (wire/updates.py)

    @abstractmethod
    def parts(self, size: int) -> dict[str, PartType]:
        """The parts that a vector of `size` values becomes."""

    @abstractmethod
    def encode(self, values: Values, size: int) -> dict[str, Array]:
        """The parts of these values."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Array], size: int) -> Values:
        """The values of parts that have the right types and shapes. TensorError if their contents are wrong."""

    @classmethod
    def for_budget(cls, bits_per_value: float) -> Self:
        """The codec with the settings that spend this much. A codec without settings always takes the same."""
        return cls()

    def covers(self, other: Codec) -> bool:
        """Whether a run that uses this codec accepts updates of the other one: equal or, with some codecs, smaller."""
        return self == other

    def num_bytes(self, size: int) -> int:
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.parts(size).values())

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    def describe(self) -> dict[str, str]:
        """The name and the settings as metadata: all that a reader needs."""
        return {"codec": self.name, **{key: str(getattr(self, key)) for key in self.setting_names()}}


# What codecs share


def require_between(key: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{key} = {value!r} must be a whole number from {low} to {high}")


def as_rows(vector: Floats, length: int) -> Floats:
    """The vector as rows of this length; zeros fill the last one."""
    if missing := -len(vector) % length:
        vector = np.concatenate([vector, np.zeros(missing, vector.dtype)])
    return vector.reshape(-1, length)


def encode_pieces(
    codec: Codec,
    values: Values,
    size: int,
    row: int,
    encode_piece: Callable[[Floats], Mapping[str, Array]],
    piece: int = PIECE,
) -> dict[str, Array]:
    """Encodes pieces of whole rows and joins their parts."""
    length = row * max(1, piece // row)
    coded = [encode_piece(values.slice(start, min(start + length, size))) for start in range(0, size, length)]
    empty = {name: np.empty((0, *shape[1:]), dtype) for name, (dtype, shape) in codec.parts(0).items()}
    return {name: np.concatenate([none, *(piece[name] for piece in coded)]) for name, none in empty.items()}


def peaks(rows: Floats) -> Floats:
    """The largest magnitude of each row."""
    peak: Floats = np.maximum(rows.max(axis=1, keepdims=True), -rows.min(axis=1, keepdims=True))
    return peak


class ScaledCodec(Codec):
    """256 values at a time: one code per value, times one bfloat16 scale per block of 256."""

    code_dtype: ClassVar[np.dtype[Any]]
    codes_per_block: ClassVar[int]
    max_code: ClassVar[float]

    @abstractmethod
    def encode_rows(self, rows: Floats) -> tuple[Array, Floats]:
        """The codes and the scales of some blocks; the scales are bfloat16 numbers in float32."""

    @abstractmethod
    def decode_codes(self, codes: Array) -> Floats:
        """The values of some blocks before they are multiplied by their scales, in a new array."""

    def parts(self, size: int) -> dict[str, PartType]:
        rows = ceil_div(size, BLOCK)
        return {"codes": (self.code_dtype, (rows, self.codes_per_block)), "scale": (BFLOAT16, (rows, 1))}

    def encode(self, values: Values, size: int) -> dict[str, Array]:
        def encode_piece(piece: Floats) -> dict[str, Array]:
            codes, scale = self.encode_rows(as_rows(piece, BLOCK))
            return {"codes": codes, "scale": scale.astype(BFLOAT16)}

        return encode_pieces(self, values, size, BLOCK, encode_piece)

    def decode(self, parts: Mapping[str, Array], size: int) -> Values:
        require_within(parts["scale"], MAX_MAGNITUDE / self.max_code, "scale")
        return _ScaledValues(self, parts["codes"], parts["scale"])


@dataclass(frozen=True)
class _ScaledValues:
    codec: ScaledCodec
    codes: Array
    scale: Array

    def slice(self, begin: int, end: int) -> Floats:
        first, last = begin // BLOCK, ceil_div(end, BLOCK)
        values = self.codec.decode_codes(self.codes[first:last])
        values *= self.scale[first:last].astype(np.float32)
        return values.reshape(-1)[begin - first * BLOCK : end - first * BLOCK]


# Checks of what others send


def within(tensor: Floats, limit: float) -> bool:
    """Whether all values are numbers of at most this magnitude."""
    return not tensor.size or bool(tensor.max() <= limit and tensor.min() >= -limit)  # NaN compares false


def require_within(part: Array, limit: float, name: str) -> None:
    if not within(part.astype(np.float32, copy=False), limit):
        raise damaged(f'part "{name}" holds NaN, Inf or more than {limit:.0e}', code="finite")


def check_parts(parts: Mapping[str, Array], expected: Mapping[str, PartType]) -> None:
    if parts.keys() != expected.keys():
        raise damaged(f"it has {len(parts)} parts, not exactly {', '.join(expected)}")
    for name, (dtype, shape) in expected.items():
        if (parts[name].dtype, tuple(parts[name].shape)) != (dtype, shape):
            raise damaged(
                f'part "{name}" is {parts[name].dtype} {tuple(parts[name].shape)} and {dtype} {shape} is expected'
            )


def damaged(detail: str, code: str = "tensors") -> TensorError:
    return TensorError(f"not a whole update ({detail}): make it again with blocktrain, from the same block", code)
