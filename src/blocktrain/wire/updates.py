"""An update made small and back: named tensors <-> few bytes, checked. Pure: no sockets, no files, no merging.
Next: codecs.py, what makes it small; feedback.py, which keeps what it leaves out; tensors.py, the container;
../swarm/averaging.py, which merges updates.

An update is Δ = before - after of every tensor of a block. All tensors are laid out as one vector, the largest first
and equals by name, so that small ones share chunks, and the vector goes through a codec. With fp32 `after` itself
travels: the difference of two float32 is no float32, and one update must merge to exactly `after`.

A block goes on much as it went. An update may say that it is coded `from_course`: as what differs from half of the
block's last change, the step from the version before its base to its base, which both sides have. A codec that sends
a third of a bit a value then lags behind the training by half as many steps.

Downloads are the same bytes. The coordinator encodes the difference from the published version n to the merged block
and publishes what these bytes decode to as n + 1 (`encode_difference`). A decoded value is exactly a float32, and
applying it is one IEEE subtraction: every machine that takes the differences in turn holds the same bits as the
coordinator. `int6` is meant for this: five times smaller than fp32, off by about a thirtieth of the step, with no
state to keep beside the block.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from blocktrain.errors import ConfigError, TensorError
from blocktrain.wire.codecs.base import (
    MAX_MAGNITUDE,
    PIECE,
    SETTINGS,
    CodecSettings,
    Values,
    check_parts,
    damaged,
    decode_vector,
    encode_vector,
    parts_of,
    within,
)
from blocktrain.wire.safetensors import Array, Encoded, Floats, decode, encode

FORMAT = "1"
COURSE_SHARE = 0.5  # of a block's last change that the next one is taken to have; a power of two: the product is exact
MAX_HEADER_BYTES = 2048
MAX_METADATA = 64

Named: TypeAlias = Mapping[str, Array]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def encode_update(before: Named, after: Named, settings: CodecSettings, earlier: Named | None = None) -> bytes:
    """Δ = before - after in the container of tensors.py. Equal tensors and settings give equal bytes. With `earlier`,
    the version before `before`, it is coded from the block's course."""
    require_same_shapes(before, after)
    if earlier is not None:
        require_same_shapes(before, earlier)
    metadata = settings.describe() | ({"from_course": "1"} if earlier is not None and not settings.lossless else {})
    layout = _Layout(tensor_shapes(after))
    values = _Differences(layout, None if settings.lossless else before, after, earlier)
    coded = encode_vector(values, layout.size, settings)
    return encode(coded, {"update": FORMAT, "layout": layout.name, **metadata})


def course(earlier: Array, base: Array) -> Floats:
    """The change that a tensor is taken to make next, after that from the version before its base to its base."""
    return COURSE_SHARE * (plain(earlier) - plain(base))


def read_update(
    data: Encoded, shapes: Shapes, *, expected: CodecSettings | None = None, max_bytes: int | None = None
) -> EncodedUpdate:
    """Bytes from anyone, for a block of these shapes. With `expected`, no other codec or setting is accepted.

    Names, types and sizes of all parts are checked before anything is decoded; memory is bounded by the shapes."""
    limits = [max_update_bytes(expected or CodecSettings("fp32"), shapes), *([] if max_bytes is None else [max_bytes])]
    parts, metadata = decode(data, max_bytes=min(limits), in_place=True)
    from_course = metadata.pop("from_course", None)
    settings = _read_settings(metadata)
    if from_course not in (None, "1") or (from_course and settings.lossless):
        raise damaged(f'its metadata says from_course = "{from_course}", which only a lossy update may, as "1"')
    if expected is not None and not expected.covers(settings):
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
    check_parts(parts, parts_of(settings, layout.size))
    return EncodedUpdate(settings, layout, decode_vector(parts, settings, layout.size), from_course == "1")


def max_update_bytes(settings: CodecSettings, shapes: Shapes) -> int:
    """No update of a block of these shapes is larger: what to allow an upload before its first byte is read."""
    parts = parts_of(settings, sum(map(math.prod, shapes.values())))
    return MAX_HEADER_BYTES + sum(math.prod(shape) * dtype.itemsize for dtype, shape in parts.values())


class EncodedUpdate:
    """A checked update, decoded tensor by tensor, so that a merge holds one tensor of it at a time."""

    def __init__(self, settings: CodecSettings, layout: _Layout, values: Values, from_course: bool) -> None:
        self.settings, self.from_course = settings, from_course
        self._layout, self._values = layout, values

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._layout.spans)

    @property
    def needs_base(self) -> bool:
        """Whether Δ is known only together with the version that the update was built on; where it is coded from the
        block's course, also with the one before that, `earlier`."""
        return self.settings.lossless or self.from_course

    def delta(self, name: str, base: Array | None = None, earlier: Array | None = None) -> Floats:
        """Δ of one tensor in float64.

        base - Δ in float64 is `after` of fp32 exactly, but for values that shrank 2^29-fold: there, use `after`."""
        pieces = self.pieces(name, base, earlier)
        return np.concatenate([np.empty(0), *pieces]).reshape(self._layout.shapes[name])

    def pieces(self, name: str, base: Array | None = None, earlier: Array | None = None) -> Iterator[Floats]:
        """The same, flat, in pieces that stay in a processor's cache while somebody works on them. None is held here
        while the next is waited for."""
        begin, end = self._layout.spans[name]
        before = self._known(name, base, "base").reshape(-1) if self.settings.lossless else None
        ahead = self._ahead(name, base, earlier).reshape(-1) if self.from_course else None

        def piece(start: int) -> Floats:
            stop = min(start + PIECE, end)
            values, here = self._values.slice(start, stop).astype(np.float64), slice(start - begin, stop - begin)
            if before is not None:
                np.subtract(before[here], values, out=values)
            if ahead is not None:
                values += ahead[here]
            return values

        return map(piece, range(begin, end, PIECE))

    def change(self, name: str, base: Array | None = None, earlier: Array | None = None) -> Floats:
        """Δ of one tensor of a lossy update in float32, the same bits on every machine."""
        return self._filled(name, earlier, base, lambda change, _: change)

    def after(self, name: str, base: Array | None = None, earlier: Array | None = None) -> Floats:
        """base - Δ of one tensor in float32, the same bits on every machine; of fp32 exactly what was sent."""
        if self.settings.lossless:
            return self._filled(name, None, None, lambda sent, _: sent)
        return self._filled(name, earlier, self._known(name, base, "base"), lambda change, before: before - change)

    def _filled(
        self, name: str, earlier: Array | None, base: Array | None, result: Callable[[Floats, Floats], Floats]
    ) -> Floats:
        """The results of each piece of Δ in float32 and of the base, as one tensor."""
        begin, end = self._layout.spans[name]
        ahead = self._ahead(name, base, earlier).reshape(-1) if self.from_course else None
        whole = np.empty(end - begin, np.float32)
        before = whole if base is None else plain(base).reshape(-1)
        for start in range(begin, end, PIECE):
            stop = min(start + PIECE, end)
            here, values = slice(start - begin, stop - begin), self._values.slice(start, stop)
            whole[here] = result(values if ahead is None else values + ahead[here], before[here])
        return whole.reshape(self._layout.shapes[name])

    def squared_norm(self, base: Named | None = None, earlier: Named | None = None) -> float:
        """‖Δ‖² over all tensors."""
        bases, earliers = base or {}, earlier or {}
        return sum(
            energy(piece) for name in self.names for piece in self.pieces(name, bases.get(name), earliers.get(name))
        )

    def _ahead(self, name: str, base: Array | None, earlier: Array | None) -> Floats:
        return course(self._known(name, earlier, "version before its base"), self._known(name, base, "base"))

    def _known(self, name: str, tensor: Array | None, what: str) -> Floats:
        shape = self._layout.shapes[name]
        if tensor is None or tuple(tensor.shape) != shape:
            got = "none" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise TensorError(
                f'a {what} of shape {shape} is needed for tensor "{name}" and {got} was given: '
                f"give the version that the update was built on and, where it is coded from the course, the one before"
            )
        return plain(tensor)


def apply_update(base: Named, update: EncodedUpdate, earlier: Named | None = None) -> dict[str, Floats]:
    """base - Δ: what the sender had, as far as the codec tells."""
    return {name: update.after(name, base.get(name), (earlier or {}).get(name)) for name in update.names}


def encode_difference(old: Named, new: Named, settings: CodecSettings) -> tuple[bytes, dict[str, Floats]]:
    """The bytes that lead from a published version to the next, and the next: what they decode to, near `new`."""
    data = encode_update(old, new, settings)
    return data, apply_update(old, read_update(data, tensor_shapes(new), expected=settings))


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


class _Differences:
    """The one vector of an update, made piece by piece: before - after and, from the course, less what was to come; or
    `after` itself, without `before`."""

    def __init__(self, layout: _Layout, before: Named | None, after: Named, earlier: Named | None) -> None:
        def flattened(state: Named) -> dict[str, Floats]:
            return {name: plain(state[name]).reshape(-1) for name in layout.spans}

        self._spans, self._after = list(layout.spans.items()), flattened(after)
        self._before = None if before is None else flattened(before)
        self._earlier = None if earlier is None else flattened(earlier)

    def slice(self, begin: int, end: int) -> Floats:
        parts, position = [np.empty(0, np.float32)], begin
        for name, (first, last) in self._spans[bisect_right(self._spans, begin, key=lambda span: span[1][1]) :]:
            if position >= end:
                break
            until = min(end, last)
            parts.append(_sane(name, self._piece(name, position - first, until - first)))
            position = until
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def _piece(self, name: str, begin: int, end: int) -> Floats:
        after = self._after[name][begin:end]
        if self._before is None:
            return after
        before = self._before[name][begin:end]
        return (
            before - after if self._earlier is None else before - after - course(self._earlier[name][begin:end], before)
        )


def difference(before: Named, after: Named) -> dict[str, Floats]:
    require_same_shapes(before, after)
    return {name: np.asarray(plain(before[name]) - plain(tensor)) for name, tensor in after.items()}


def energy(values: Floats) -> float:
    """The sum of their squares, in float64. Not by a library of matrices, which would begin threads for it."""
    return float(np.einsum("i,i->", values, values, dtype=np.float64))


def plain(tensor: Array) -> Floats:
    return tensor.astype(np.float32, copy=False)


def _sane(name: str, values: Array) -> Floats:
    if not within(values, MAX_MAGNITUDE):
        raise TensorError(
            f'tensor "{name}" holds NaN, Inf or more than {MAX_MAGNITUDE:.0e}, which no update may: '
            f"train again from the last version, with a smaller learning rate"
        )
    return values


def tensor_shapes(tensors: Named) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def require_same_shapes(before: Named, after: Named) -> None:
    """Two states of one block."""
    if tensor_shapes(before) != tensor_shapes(after):
        name = min(dict(set(tensor_shapes(before).items()) ^ set(tensor_shapes(after).items())))
        raise TensorError(
            f'tensor "{name}" is not the same in the two sets of tensors that an update is made of: '
            f"give two states of the same block"
        )


def _read_settings(metadata: Mapping[str, str]) -> CodecSettings:
    fields = dict(metadata)
    if any(len(key) + len(value) > MAX_METADATA for key, value in fields.items()):
        raise damaged(f"its metadata holds more than {MAX_METADATA} characters under one key")
    version, layout, codec = (fields.pop(key, None) for key in ("update", "layout", "codec"))
    if version != FORMAT:
        raise TensorError(
            f'got an update of format "{version}" and "{FORMAT}" is read here: '
            f"run the version of blocktrain that the coordinator runs"
        )
    if layout is None or codec is None:
        raise damaged(f"its metadata names no {'layout' if layout is None else 'codec'}")
    try:
        given = {key: _whole(fields[key]) for key in SETTINGS.get(codec, ()) if key in fields}
        settings = CodecSettings(codec, **given)
    except ConfigError as error:
        raise damaged(str(error)) from None
    if settings.describe() != {"codec": codec, **fields}:
        raise damaged(f"its metadata is not exactly what codec {codec} takes: {', '.join(settings.describe())}")
    return settings


def _whole(text: str) -> int:
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else -1


def _words(settings: CodecSettings) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings.describe().items())
