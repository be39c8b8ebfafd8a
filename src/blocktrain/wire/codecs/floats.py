"""fp32 sends the values themselves; fp16 sends float16 times one power of two per 256 values.
Next: base.py, what a codec is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from blocktrain.wire.codecs.base import (
    BLOCK,
    MAX_MAGNITUDE,
    TINY_SCALE,
    Codec,
    PartType,
    ScaledCodec,
    Values,
    peaks,
    require_within,
)
from blocktrain.wire.safetensors import Array, Floats


class Float32(Codec):
    name, lossless = "fp32", True
    part: ClassVar[str] = "values"

    def parts(self, size: int) -> dict[str, PartType]:
        return {self.part: (np.dtype(np.float32), (size,))}

    def encode(self, values: Values, size: int) -> dict[str, Array]:
        return {self.part: values.slice(0, size)}

    def decode(self, parts: Mapping[str, Array], size: int) -> Values:
        require_within(parts[self.part], MAX_MAGNITUDE, self.part)
        return _PlainValues(parts[self.part])


@dataclass(frozen=True)
class _PlainValues:
    values: Floats

    def slice(self, begin: int, end: int) -> Floats:
        return self.values[begin:end]


class Float16(ScaledCodec):
    """Every code is at most 2^15: never too large for float16 and, near the largest of its block, never too small."""

    name, code_dtype, codes_per_block, max_code = "fp16", np.dtype(np.float16), BLOCK, 2.0**15

    def encode_rows(self, rows: Floats) -> tuple[Array, Floats]:
        # Without the mantissa: the power of two at or below the peak.
        exponent = peaks(rows).view(np.int32) & 0x7F800000
        scale = np.maximum(exponent.view(np.float32) * np.float32(2.0**-14), np.float32(TINY_SCALE))
        return (rows / scale).astype(np.float16), scale

    def decode(self, parts: Mapping[str, Array], size: int) -> Values:
        require_within(parts["codes"], float(np.finfo(np.float16).max), "codes")
        return super().decode(parts, size)

    def decode_codes(self, codes: Array) -> Floats:
        return codes.astype(np.float32)
