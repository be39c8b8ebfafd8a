"""An update made small and back: named tensors <-> few bytes, checked. Pure: no sockets, no files, no merging.
Next: tensors.py, the container; ../swarm/averaging.py, which merges updates.

An update is Δ = before - after of every tensor of a block. All tensors are laid out as one vector, the largest first
and equals by name, so that small ones share chunks. What travels, by codec:

    fp32     after itself: the difference of two float32 is no float32, and one update must merge to exactly `after`
    fp16     Δ as float16, times a power of two for every 256 values
    int8     Δ as whole steps of a 127th of the largest of every 256 values; int6 and int4 with 31 and 7 steps
    sparse   the `kept` largest of every `chunk` values (SparseLoCo, arXiv 2603.08163): each a sign and one of a few
             levels fitted to the chunk; their places as Elias-Fano, two thirds of what plain 12-bit indices take

Sizes follow from the shapes and the settings alone, so bytes of another size are refused before they are decoded.
What a lossy codec leaves out stays at the sender, in `ErrorFeedback`, and goes with the next update.

Downloads are the same bytes. The coordinator encodes the difference from the published version n to the merged block
and publishes what these bytes decode to as n + 1 (`encode_difference`). A decoded value is a short number times a
bfloat16, exactly a float32, and applying it is one IEEE subtraction: every machine that takes the differences in turn
holds the same bits as the coordinator. `int6` is meant for this: five times smaller than fp32, off by about a
thirtieth of the step, with no state to keep beside the block.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blocktrain.errors import ConfigError, TensorError
from blocktrain.wire.tensors import decode, encode

CODECS = ("fp32", "fp16", "int8", "int6", "int4", "sparse")
FORMAT = "1"
BLOCK = 256  # values that share a scale
MAX_CHUNK = 2**16
MAX_MAGNITUDE = 2.0**126  # what is larger than this is no weight, and sums of it could overflow
MAX_HEADER_BYTES = 2048
MAX_METADATA = 64

_TINY_SCALE = 2.0**-120  # below this float32 loses digits; also keeps the scale of nothing but zeros above zero
_LLOYD_ROUNDS = 6

Named: TypeAlias = Mapping[str, Tensor]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Bytes: TypeAlias = NDArray[np.uint8]
_Part: TypeAlias = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class CodecSettings:
    """How updates are coded; chunk, kept and value_bits belong to `sparse`. The defaults are SparseLoCo's."""

    codec: str
    chunk: int = 4096
    kept: int = 64
    value_bits: int = 2

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ConfigError(f'codec = "{self.codec}" is unknown: use one of {", ".join(CODECS)}')
        _require_between("chunk", self.chunk, 1, MAX_CHUNK)
        _require_between("kept", self.kept, 1, self.chunk)
        _require_between("value_bits", self.value_bits, 2, 4)

    @property
    def lossless(self) -> bool:
        return self.codec == "fp32"

    @property
    def levels(self) -> int:
        return 1 << self.value_bits - 1

    @property
    def low_bits(self) -> int:
        """Elias-Fano: the bits of a place that are stored plainly; the rest is stored as a bitmap."""
        return min(8, (self.chunk // self.kept).bit_length() - 1)

    @property
    def high_bits(self) -> int:
        """The length of that bitmap: one bit a kept value, and one a step of the places' upper bits."""
        return self.kept + ((self.chunk - 1) >> self.low_bits)

    def describe(self) -> dict[str, str]:
        """What a reader must know, as metadata."""
        sparse = {"chunk": str(self.chunk), "kept": str(self.kept), "value_bits": str(self.value_bits)}
        return {"codec": self.codec, **(sparse if self.codec == "sparse" else {})}


def _require_between(key: str, value: int, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{key} = {value!r} must be a whole number from {low} to {high}")


def encode_update(before: Named, after: Named, settings: CodecSettings) -> bytes:
    """Δ = before - after in the container of tensors.py. Equal tensors and settings give equal bytes."""
    _require_same_shapes(before, after)
    return _encode(after if settings.lossless else _difference(before, after), settings)


def read_update(
    data: bytes, shapes: Shapes, *, expected: CodecSettings | None = None, max_bytes: int | None = None
) -> EncodedUpdate:
    """Bytes from anyone, for a block of these shapes. With `expected`, no other codec or setting is accepted.

    Names, types and sizes of all parts are checked before anything is decoded; memory is bounded by the shapes."""
    limits = [max_update_bytes(expected or CodecSettings("fp32"), shapes), *([] if max_bytes is None else [max_bytes])]
    parts, metadata = decode(data, max_bytes=min(limits))
    settings = _read_settings(metadata)
    if expected is not None and settings.describe() != expected.describe():
        raise TensorError(
            f"the update is coded as {_words(settings)} and {_words(expected)} is expected: "
            f"code it with the settings of the run"
        )
    layout = _Layout(shapes)
    if metadata["layout"] != layout.name:
        raise TensorError(
            f'the update is made for tensors of layout "{metadata["layout"]}" and this block of {len(shapes)} tensors '
            f'is of "{layout.name}": train the block that was leased, with the spec of the run',
            code="shapes",
        )
    _check_parts(parts, _parts(settings, layout.size))
    return EncodedUpdate(settings, layout, _decoded(parts, settings, layout.size))


def max_update_bytes(settings: CodecSettings, shapes: Shapes) -> int:
    """No update of a block of these shapes is larger: what to allow an upload before its first byte is read."""
    parts = _parts(settings, sum(map(math.prod, shapes.values())))
    return MAX_HEADER_BYTES + sum(math.prod(shape) * dtype.itemsize for dtype, shape in parts.values())


class EncodedUpdate:
    """A checked update, decoded tensor by tensor, so that a merge holds one tensor of it at a time."""

    def __init__(self, settings: CodecSettings, layout: _Layout, values: _Values) -> None:
        self.settings = settings
        self._layout = layout
        self._values = values

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._layout.spans)

    @property
    def needs_base(self) -> bool:
        """Whether Δ is known only together with the version that the update was built on."""
        return self.settings.lossless

    def delta(self, name: str, base: Tensor | None = None) -> Tensor:
        """Δ of one tensor in float64. `base`, which only fp32 needs, is the version that the update was built on.

        base - Δ in float64 is `after` of fp32 exactly, but for values that shrank 2^29-fold: there, use `after`."""
        values = self._slice(name).double()
        return self._base(name, base).double() - values if self.settings.lossless else values

    def after(self, name: str, base: Tensor | None = None) -> Tensor:
        """base - Δ of one tensor in float32, the same bits on every machine; of fp32 exactly what was sent."""
        values = self._slice(name)
        return values.clone() if self.settings.lossless else self._base(name, base) - values

    def squared_norm(self, base: Named | None = None) -> float:
        """‖Δ‖² over all tensors."""
        deltas = (self.delta(name, None if base is None else base.get(name)) for name in self.names)
        return sum(float(delta.square().sum()) for delta in deltas)

    def _slice(self, name: str) -> Tensor:
        begin, end = self._layout.spans[name]
        return self._values.slice(begin, end).view(self._layout.shapes[name])

    def _base(self, name: str, base: Tensor | None) -> Tensor:
        shape = self._layout.shapes[name]
        if base is None or tuple(base.shape) != shape:
            got = "none" if base is None else f"shape {tuple(base.shape)}"
            raise TensorError(
                f'a base of shape {shape} is needed for tensor "{name}" and {got} was given: '
                f"give the version that the update was built on"
            )
        return _plain(base)


def apply_update(base: Named, update: EncodedUpdate) -> dict[str, Tensor]:
    """base - Δ: what the sender had, as far as the codec tells."""
    return {name: update.after(name, base.get(name)) for name in update.names}


def encode_difference(old: Named, new: Named, settings: CodecSettings) -> tuple[bytes, dict[str, Tensor]]:
    """The bytes that lead from a published version to the next, and the next: what they decode to, near `new`."""
    data = encode_update(old, new, settings)
    return data, apply_update(old, read_update(data, _shapes(new), expected=settings))


class ErrorFeedback:
    """What lossy updates left out so far, at the worker: e ← β·e + Δ, send C(e), e ← e - C(e).

    With β = 1 all is sent in the end; SparseLoCo forgets slowly, with 0.95. A worker trains from `start` of a published
    version rather than from the version itself: what it has not sent yet stays in its weights, and it does not learn
    the same again while it waits. Another codec takes what is left over by `load`, such as int8 at the end of a phase.
    `compress` replaces tensors and never writes into them: a worker whose update was refused goes back by loading the
    state that it took before."""

    def __init__(self, settings: CodecSettings, beta: float = 1.0) -> None:
        if not 0.0 <= beta <= 1.0:
            raise ConfigError(f"beta = {beta} must be from 0 (forget what was not sent) to 1 (keep all of it)")
        self.settings = settings
        self.beta = beta
        self._residual: dict[str, Tensor] = {}

    def start(self, published: Named) -> dict[str, Tensor]:
        """Where to train from: the published version with β·e, the worker's own unsent progress, applied to it."""
        if self._residual:
            _require_same_shapes(self._residual, published)
        return {
            name: _plain(tensor) - self.beta * self._residual[name] if self._residual else _plain(tensor)
            for name, tensor in published.items()
        }

    def compress(self, before: Named, after: Named) -> bytes:
        """The update, with what earlier ones left out."""
        if self.settings.lossless:
            return encode_update(before, after, self.settings)
        total = _difference(before, after)
        if self._residual:
            _require_same_shapes(self._residual, total)
            total = {name: tensor + self.beta * self._residual[name] for name, tensor in total.items()}
        data = _encode(total, self.settings)
        sent = read_update(data, _shapes(total), expected=self.settings)
        self._residual = {name: tensor - sent.delta(name).float() for name, tensor in total.items()}
        return data

    def state(self) -> dict[str, Tensor]:
        """What was not sent, by name; empty before the first update."""
        return dict(self._residual)

    def load(self, state: Named) -> None:
        self._residual = {name: _plain(tensor) for name, tensor in state.items()}


class _Layout:
    """Where each tensor lies in the one vector of a block."""

    def __init__(self, shapes: Shapes) -> None:
        order = sorted(shapes, key=lambda name: (-math.prod(shapes[name]), name))
        self.shapes = {name: tuple(shapes[name]) for name in order}
        ends = [0, *accumulate(math.prod(shape) for shape in self.shapes.values())]
        self.spans = dict(zip(order, pairwise(ends), strict=True))
        self.size = ends[-1]

    @property
    def name(self) -> str:
        """Other names or shapes have another one."""
        return hashlib.sha256(json.dumps(list(self.shapes.items())).encode()).hexdigest()[:16]


def _encode(tensors: Named, settings: CodecSettings) -> bytes:
    layout = _Layout(_shapes(tensors))
    vector = torch.cat([torch.empty(0), *(_sane(name, tensors[name]).flatten() for name in layout.spans)])
    metadata = {"update": FORMAT, "layout": layout.name, **settings.describe()}
    return encode(_encoded(vector, settings), metadata)


def _difference(before: Named, after: Named) -> dict[str, Tensor]:
    _require_same_shapes(before, after)
    return {name: _plain(before[name]) - _plain(tensor) for name, tensor in after.items()}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32)


def _sane(name: str, tensor: Tensor) -> Tensor:
    plain = _plain(tensor)
    if not _within(plain, MAX_MAGNITUDE):
        raise TensorError(
            f'tensor "{name}" holds NaN, Inf or more than {MAX_MAGNITUDE:.0e}, which no update may: '
            f"train again from the last version, with a smaller learning rate"
        )
    return plain


def _within(tensor: Tensor, limit: float) -> bool:
    """Whether all values are numbers of at most this magnitude."""
    return not tensor.numel() or bool(torch.stack(tensor.aminmax()).abs().max() <= limit)  # NaN compares false


def _shapes(tensors: Named) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _require_same_shapes(before: Named, after: Named) -> None:
    """Two states of one block."""
    if _shapes(before) != _shapes(after):
        name = min(dict(set(_shapes(before).items()) ^ set(_shapes(after).items())))
        raise TensorError(
            f'tensor "{name}" is not the same in the two sets of tensors that an update is made of: '
            f"give two states of the same block"
        )


def _parts(settings: CodecSettings, size: int) -> dict[str, _Part]:
    """The parts of an update of so many values: name -> dtype and shape."""
    if settings.codec == "fp32":
        return {"values": (torch.float32, (size,))}
    if settings.codec == "sparse":
        rows, groups = _ceil(size, settings.chunk), _ceil(settings.kept, 8)
        return {
            "codes": (torch.uint8, (rows, groups * settings.value_bits)),
            "high": (torch.uint8, (rows, _ceil(settings.high_bits, 8))),
            "levels": (torch.bfloat16, (rows, settings.levels)),
            "low": (torch.uint8, (rows, groups * settings.low_bits)),
        }
    rows, bits = _ceil(size, BLOCK), _bits(settings.codec)
    codes = (torch.float16, (rows, BLOCK)) if bits is None else (torch.uint8, (rows, BLOCK * bits // 8))
    return {"codes": codes, "scale": (torch.bfloat16, (rows, 1))}


def _bits(codec: str) -> int | None:
    return int(codec.removeprefix("int")) if codec.startswith("int") else None


def _top(bits: int) -> int:
    """The largest code, as a number of steps; the smallest is its negative."""
    return (1 << bits - 1) - 1


def _encoded(vector: Tensor, settings: CodecSettings) -> dict[str, Tensor]:
    match settings.codec:
        case "fp32":
            return {"values": vector}
        case "fp16":
            return _as_half(_rows(vector, BLOCK))
        case "sparse":
            return _as_sparse(_rows(vector, settings.chunk), settings)
    bits = _bits(settings.codec)
    assert bits is not None
    return _as_steps(_rows(vector, BLOCK), bits)


class _Values(Protocol):
    def slice(self, begin: int, end: int) -> Tensor:
        """These values of the vector in float32, each exactly what was sent."""


def _decoded(parts: Named, settings: CodecSettings, size: int) -> _Values:
    """Parts of the right types and sizes, their contents checked."""
    if settings.codec == "fp32":
        _require_within(parts["values"], MAX_MAGNITUDE, "values")
        return _Plain(parts["values"])
    if settings.codec == "sparse":
        _require_within(parts["levels"], MAX_MAGNITUDE, "levels")
        return _read_sparse(parts, settings, size)
    bits = _bits(settings.codec)
    if bits is None:
        _require_within(parts["codes"], torch.finfo(torch.float16).max, "codes")
    _require_within(parts["scale"], MAX_MAGNITUDE / (2**15 if bits is None else _top(bits)), "scale")
    return _Blocks(parts["codes"], parts["scale"], bits)


@dataclass(frozen=True)
class _Plain:
    values: Tensor

    def slice(self, begin: int, end: int) -> Tensor:
        return self.values[begin:end]


@dataclass(frozen=True)
class _Blocks:
    codes: Tensor
    scale: Tensor
    bits: int | None  # of an integer code

    def slice(self, begin: int, end: int) -> Tensor:
        first, last = begin // BLOCK, _ceil(end, BLOCK)
        values = self._steps(self.codes[first:last]) * self.scale[first:last].float()
        return values.flatten()[begin - first * BLOCK : end - first * BLOCK]

    def _steps(self, codes: Tensor) -> Tensor:
        if self.bits is None:
            return codes.float()
        return torch.from_numpy(_unpack(codes.numpy(), self.bits, BLOCK)).float() - _top(self.bits)


@dataclass(frozen=True)
class _Sparse:
    places: Tensor  # in the vector, rising
    values: Tensor

    def slice(self, begin: int, end: int) -> Tensor:
        first, last = torch.searchsorted(self.places, torch.tensor([begin, end])).tolist()
        return torch.zeros(end - begin).index_copy_(0, self.places[first:last] - begin, self.values[first:last])


def _rows(vector: Tensor, length: int) -> Tensor:
    """The vector as rows; zeros fill the last one."""
    return torch.nn.functional.pad(vector, (0, -len(vector) % length)).view(_ceil(len(vector), length), length)


def _as_half(rows: Tensor) -> dict[str, Tensor]:
    """float16 of at most 2^15 times a power of two: neither too large for the type nor, below the peak, too small."""
    exponent = _peak(rows).view(torch.int32) & 0x7F800000  # the mantissa gone: the power of two at or below
    scale = (exponent.view(torch.float32) * 2.0**-14).clamp(min=_TINY_SCALE)
    return {"codes": (rows / scale).half(), "scale": scale.bfloat16()}


def _as_steps(rows: Tensor, bits: int) -> dict[str, Tensor]:
    """Whole steps of peak / (2^(bits-1) - 1). The scale is rounded up, so no code is out of range and no value is
    off by more than half a step."""
    top = _top(bits)
    scale = ((_peak(rows) / top).view(torch.int32) + 0xFFFF & ~0xFFFF).view(torch.float32).clamp(min=_TINY_SCALE)
    codes = (rows / scale).round_().add_(top).to(torch.uint8)
    return {"codes": torch.from_numpy(_pack(codes.numpy(), bits)), "scale": scale.bfloat16()}


def _peak(rows: Tensor) -> Tensor:
    return rows.abs().amax(dim=1, keepdim=True)


def _as_sparse(rows: Tensor, settings: CodecSettings) -> dict[str, Tensor]:
    places = rows.abs().topk(settings.kept, dim=1, sorted=False).indices.sort(dim=1).values
    kept = rows.gather(1, places)
    levels = _fit_levels(kept.abs(), settings.levels).bfloat16()
    nearest = _nearest(kept.abs(), levels.float())
    codes = (nearest + settings.levels * (kept < 0)).to(torch.uint8)
    low, high = _elias_fano(places.numpy(), settings)
    return {
        "codes": torch.from_numpy(_pack(codes.numpy(), settings.value_bits)),
        "high": torch.from_numpy(high),
        "levels": levels,
        "low": torch.from_numpy(low),
    }


def _read_sparse(parts: Named, settings: CodecSettings, size: int) -> _Sparse:
    places = _from_elias_fano(parts["low"].numpy(), parts["high"].numpy(), settings)
    codes = torch.from_numpy(_unpack(parts["codes"].numpy(), settings.value_bits, settings.kept)).long()
    magnitude = parts["levels"].float().gather(1, codes % settings.levels)
    values = torch.where(codes < settings.levels, magnitude, -magnitude).flatten()
    within = int(np.searchsorted(places, size))  # the rest lies in the zeros that filled the last chunk
    return _Sparse(torch.from_numpy(places[:within]), values[:within])


def _fit_levels(magnitude: Tensor, count: int) -> Tensor:
    """The levels of each row that lie nearest to its values in the mean square: Lloyd (1982), from the quantiles."""
    quantiles = [(2 * i + 1) * magnitude.shape[1] // (2 * count) for i in range(count)]
    levels = magnitude.sort(dim=1).values[:, quantiles]
    for _ in range(_LLOYD_ROUNDS):
        nearest = _nearest(magnitude, levels)
        totals = torch.zeros_like(levels).scatter_add_(1, nearest, magnitude)
        members = torch.zeros_like(levels).scatter_add_(1, nearest, torch.ones_like(magnitude))
        levels = torch.where(members > 0, totals / members.clamp(min=1), levels)
    return levels


def _nearest(magnitude: Tensor, levels: Tensor) -> Tensor:
    return (magnitude.unsqueeze(2) - levels.unsqueeze(1)).abs().argmin(dim=2)


def _elias_fano(places: NDArray[np.int64], settings: CodecSettings) -> tuple[Bytes, Bytes]:
    """Rising places of each row (Elias 1974, Fano 1971): the low bits as they are; the high bits in a bitmap, where
    the i-th place sets bit (place >> low_bits) + i."""
    low = (places & (2**settings.low_bits - 1)).astype(np.uint8)
    bitmap = np.zeros((len(places), settings.high_bits), np.uint8)
    np.put_along_axis(bitmap, (places >> settings.low_bits) + np.arange(settings.kept), 1, axis=1)
    return _pack(low, settings.low_bits), np.packbits(bitmap, axis=1, bitorder="little")


def _from_elias_fano(low: Bytes, high: Bytes, settings: CodecSettings) -> NDArray[np.int64]:
    """The places in the vector, of all rows; each row has `kept` different ones or the bytes are refused."""
    bitmap = np.unpackbits(high, axis=1, bitorder="little")
    counts = bitmap.sum(axis=1, dtype=np.int64)
    if (wrong := counts != settings.kept).any():
        raise _damaged(f"a chunk holds {counts[wrong][0]} places and {settings.kept} are expected")
    upper = np.nonzero(bitmap)[1].reshape(len(low), settings.kept) - np.arange(settings.kept)
    places = (upper << settings.low_bits) | _unpack(low, settings.low_bits, settings.kept)
    if (places >= settings.chunk).any():
        raise _damaged(f"a place is {places.max()} in a chunk of {settings.chunk} values")
    if (np.diff(places, axis=1) <= 0).any():
        raise _damaged("the places of a chunk repeat or do not rise")
    flat: NDArray[np.int64] = (places + settings.chunk * np.arange(len(places))[:, None]).ravel()
    return flat


def _pack(codes: Bytes, bits: int) -> Bytes:
    """Codes of up to eight bits each: every eight of a row, the last filled with zeros, become `bits` whole bytes."""
    rows, groups = len(codes), _ceil(codes.shape[1], 8)
    eights = np.pad(codes, ((0, 0), (0, groups * 8 - codes.shape[1]))).reshape(rows, groups, 8)
    words = np.zeros((rows, groups, 1), "<u8")
    for i in range(8):
        words[..., 0] |= eights[..., i].astype(np.uint64) << np.uint64(i * bits)
    return words.view(np.uint8)[..., :bits].reshape(rows, groups * bits)


def _unpack(packed: Bytes, bits: int, count: int) -> Bytes:
    """The first `count` codes of each row."""
    rows, groups = len(packed), _ceil(count, 8)
    padded = np.zeros((rows, groups, 8), np.uint8)
    padded[..., :bits] = packed.reshape(rows, groups, bits)
    words = padded.view("<u8")[..., 0]
    codes = np.empty((rows, groups, 8), np.uint8)
    for i in range(8):
        codes[..., i] = words >> np.uint64(i * bits) & np.uint64(2**bits - 1)
    return codes.reshape(rows, groups * 8)[:, :count]


def _ceil(count: int, size: int) -> int:
    return -(-count // size)


def _read_settings(metadata: Mapping[str, str]) -> CodecSettings:
    fields = dict(metadata)
    if any(len(key) + len(value) > MAX_METADATA for key, value in fields.items()):
        raise _damaged(f"its metadata holds more than {MAX_METADATA} characters under one key")
    version, layout, codec = (fields.pop(key, None) for key in ("update", "layout", "codec"))
    if version != FORMAT:
        raise TensorError(
            f'got an update of format "{version}" and "{FORMAT}" is read here: '
            f"run the version of blocktrain that the coordinator runs"
        )
    if layout is None or codec is None:
        raise _damaged(f"its metadata names no {'layout' if layout is None else 'codec'}")
    try:
        settings = CodecSettings(codec, **{key: _whole(fields[key]) for key in sorted(fields) if key in _SPARSE_KEYS})
    except ConfigError as error:
        raise _damaged(str(error)) from None
    if settings.describe() != {"codec": codec, **fields}:
        raise _damaged(f"its metadata is not exactly what codec {codec} takes: {', '.join(settings.describe())}")
    return settings


_SPARSE_KEYS = ("chunk", "kept", "value_bits")


def _whole(text: str) -> int:
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else -1


def _words(settings: CodecSettings) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings.describe().items())


def _check_parts(parts: Named, expected: Mapping[str, _Part]) -> None:
    if parts.keys() != expected.keys():
        raise _damaged(f"it has {len(parts)} parts, not exactly {', '.join(expected)}")
    for name, (dtype, shape) in expected.items():
        if (parts[name].dtype, tuple(parts[name].shape)) != (dtype, shape):
            raise _damaged(
                f'part "{name}" is {parts[name].dtype} {tuple(parts[name].shape)} and {dtype} {shape} is expected'
            )


def _require_within(part: Tensor, limit: float, name: str) -> None:
    if not _within(part.float(), limit):
        raise _damaged(f'part "{name}" holds NaN, Inf or more than {limit:.0e}', code="finite")


def _damaged(detail: str, code: str = "tensors") -> TensorError:
    return TensorError(f"not a whole update ({detail}): make it again with blocktrain, from the same block", code)
