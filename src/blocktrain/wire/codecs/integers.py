"""int8, int6 and int4: whole steps of a 127th, a 31st or a 7th of the largest of every 256 values.
Next: base.py, what a codec is; packing.py, how codes of a few bits become bytes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from blocktrain.wire.codecs.base import BLOCK, TINY_SCALE, UINT8, ScaledCodec, peaks
from blocktrain.wire.codecs.packing import pack, unpack
from blocktrain.wire.safetensors import Array, Floats


class IntegerCodec(ScaledCodec):
    """A code is a number of steps plus `max_code`, so that it is never negative. The scale is rounded up to a bfloat16:
    no code is out of range, and no value is off by more than half a step."""

    bits: ClassVar[int]
    code_dtype = UINT8

    def encode_rows(self, rows: Floats) -> tuple[Array, Floats]:
        rounded_up = ((peaks(rows) / np.float32(self.max_code)).view(np.int32) + 0xFFFF & ~0xFFFF).view(np.float32)
        scale = np.maximum(rounded_up, np.float32(TINY_SCALE))
        codes = rows / scale
        np.rint(codes, out=codes)
        codes += self.max_code
        return pack(codes.astype(np.uint8), self.bits), scale

    def decode_codes(self, codes: Array) -> Floats:
        steps = unpack(codes, self.bits, BLOCK).astype(np.float32)
        steps -= self.max_code
        return steps


class Int8(IntegerCodec):
    name, bits, codes_per_block, max_code = "int8", 8, BLOCK, 127


class Int6(IntegerCodec):
    name, bits, codes_per_block, max_code = "int6", 6, BLOCK * 6 // 8, 31


class Int4(IntegerCodec):
    name, bits, codes_per_block, max_code = "int4", 4, BLOCK * 4 // 8, 7
