"""Updates: the change of a block's named tensors as a few bytes, and back, checked. Pure: no sockets, no files, no
merging.
Next: codecs/table.py, the codecs that make it small; error_feedback.py, which keeps what they leave out;
safetensors.py, the container; swarm/policy/averaging/table.py, which merges updates.

An update is Δ = before - after of every tensor of a block. All tensors are laid out as one vector, the largest first
and equal sizes by name, so that small tensors share chunks. The vector goes through a codec. With fp32, `after` itself
is sent: the difference of two float32 numbers is not always a float32 number, and one update must merge to exactly
`after`.

A block tends to change as it changed before: this is its course. An update that is coded `from_course` holds only what
differs from half of the block's last change, the step from the version before its base to its base. Both sides know
that step. A codec that sends a third of a bit per value then lags behind the training by half as many steps.

Downloads use the same bytes. The coordinator encodes the difference from the published version n to the merged block,
and publishes what these bytes decode to as version n + 1 (`encode_difference`). A decoded value is exactly a float32
number and applying it is one IEEE subtraction. Every machine that applies the differences in turn therefore holds the
same bits as the coordinator. `int6` is meant for downloads: five times smaller than fp32, off by about a thirtieth of
the step, and without a state to keep beside the block."""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from blocktrain.errors import ConfigError, TensorError
from blocktrain.wire.codecs.base import MAX_MAGNITUDE, PIECE, Codec, Values, check_parts, damaged, within
from blocktrain.wire.codecs.floats import Float32
from blocktrain.wire.codecs.table import codec_type
from blocktrain.wire.safetensors import Array, Encoded, Floats, Shapes, decode, encode, encode_joined

FORMAT = "1"
COURSE_SHARE = 0.5  # of a block's last change, expected of the next one; a power of two, so that the product is exact
MAX_HEADER_BYTES = 2048
MAX_METADATA = 64
KNOWN_LAYOUTS = 64

Named: TypeAlias = Mapping[str, Array]


def encode_update(before: Named, after: Named, codec: Codec, earlier: Named | None = None) -> bytes:
    """Δ = before - after as safetensors bytes. Equal tensors and codecs give equal bytes. With `earlier`, the version
    before `before`, the update is coded from the block's course."""
    require_same_shapes(before, after)
    if earlier is not None:
        require_same_shapes(before, earlier)
    metadata = codec.describe() | ({"from_course": "1"} if earlier is not None and not codec.lossless else {})
    layout = _layout_of(tensor_shapes(after))
    metadata |= {"update": FORMAT, "layout": layout.name}
    values = _Differences(layout, None if codec.lossless else before, after, earlier)
    if codec.lossless:
        return encode_joined(Float32.part, values.arrays(0, layout.size), metadata)
    return encode(codec.encode(values, layout.size), metadata)


def course(earlier: Array, base: Array) -> Floats:
    """The change that is expected of a tensor next, from its change between the version before its base and its
    base."""
    return COURSE_SHARE * (as_float32(earlier) - as_float32(base))


def course_helps(earlier: Named, base: Named, after: Named) -> bool:
    """Whether less is left to send if the update is coded from the course. After a step that was far too large it is
    not: every later update would be as large as that step, and refused."""
    gained = 0.0
    for name, tensor in after.items():
        here, there, before = (as_float32(each).reshape(-1) for each in (tensor, base[name], earlier[name]))
        for start in range(0, len(here), PIECE):
            piece = slice(start, start + PIECE)
            expected = course(before[piece], there[piece])
            change = np.subtract(there[piece], here[piece])
            change *= 2
            change -= expected
            gained += float(np.einsum("i,i->", change, expected, dtype=np.float64))  # |change|² - |change - expected|²
    return gained > 0


def read_update(
    data: Encoded, shapes: Shapes, *, expected: Codec | None = None, max_bytes: int | None = None
) -> EncodedUpdate:
    """Reads bytes that anyone may have sent, for a block of these shapes. With `expected`, no other codec or setting is
    accepted.

    Names, types and sizes of all parts are checked before anything is decoded. The shapes bound the memory."""
    limits = [max_update_bytes(expected or Float32(), shapes), *([] if max_bytes is None else [max_bytes])]
    parts, metadata = decode(data, max_bytes=min(limits), max_header_bytes=MAX_HEADER_BYTES, in_place=True)
    from_course = metadata.pop("from_course", None)
    codec = _read_codec(metadata)
    if from_course not in (None, "1") or (from_course and codec.lossless):
        raise damaged(
            f'its metadata says from_course = "{from_course}": only a lossy update may have it, and only as "1"'
        )
    if expected is not None and not expected.covers(codec):
        raise TensorError(
            f"the update is coded as {_in_words(codec)} and {_in_words(expected)} is expected: "
            f"code it with the settings of the run"
        )
    layout = _layout_of(shapes)
    if metadata["layout"] != layout.name:
        raise TensorError(
            f'the update is made for tensors of layout "{metadata["layout"]}" and this block of {len(shapes)} tensors '
            f'has layout "{layout.name}": train the block that was leased, with the spec of the run',
            code="shapes",
        )
    check_parts(parts, codec.parts(layout.size))
    return EncodedUpdate(codec, layout, codec.decode(parts, layout.size), from_course == "1")


def max_update_bytes(codec: Codec, shapes: Shapes) -> int:
    """The largest size of an update of a block of these shapes: the limit of an upload before its first byte is
    read."""
    return MAX_HEADER_BYTES + codec.num_bytes(sum(map(math.prod, shapes.values())))


class EncodedUpdate:
    """A checked update. It is decoded tensor by tensor, so that a merge holds one tensor of it at a time."""

    def __init__(self, codec: Codec, layout: _Layout, values: Values, from_course: bool) -> None:
        self.codec, self.from_course = codec, from_course
        self._layout, self._values = layout, values

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._layout.spans)

    @property
    def needs_base(self) -> bool:
        """Whether computing Δ needs `base`, the version that the update was built on. An update that is coded from the
        course also needs `earlier`, the version before that."""
        return self.codec.lossless or self.from_course

    def delta(self, name: str, base: Array | None = None, earlier: Array | None = None) -> Floats:
        """Δ of one tensor in float64.

        With fp32, base - Δ in float64 is exactly `after`, except for values that shrank 2^29-fold: use `after`
        there."""
        pieces = self.pieces(name, base, earlier)
        return np.concatenate([np.empty(0), *pieces]).reshape(self._layout.shapes[name])

    def pieces(self, name: str, base: Array | None = None, earlier: Array | None = None) -> Iterator[Floats]:
        """The same, flat, in pieces that fit a processor's cache. No piece is held here after it was handed out."""
        begin, end = self._layout.spans[name]
        before = self._known(name, base, "base").reshape(-1) if self.codec.lossless else None
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
        """base - Δ of one tensor in float32, the same bits on every machine. With fp32, exactly what was sent."""
        if self.codec.lossless:
            return self._filled(name, None, None, lambda sent, _: sent)
        return self._filled(name, earlier, self._known(name, base, "base"), lambda change, before: before - change)

    def _filled(
        self, name: str, earlier: Array | None, base: Array | None, result: Callable[[Floats, Floats], Floats]
    ) -> Floats:
        """`result` of each piece of Δ in float32 and of the same piece of the base, as one tensor."""
        begin, end = self._layout.spans[name]
        ahead = self._ahead(name, base, earlier).reshape(-1) if self.from_course else None
        whole = np.empty(end - begin, np.float32)
        before = whole if base is None else as_float32(base).reshape(-1)
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
        return as_float32(tensor)


def apply_update(base: Named, update: EncodedUpdate, earlier: Named | None = None) -> dict[str, Floats]:
    """base - Δ: the sender's weights, as precisely as the codec sent them."""
    return {name: update.after(name, base.get(name), (earlier or {}).get(name)) for name in update.names}


def encode_difference(old: Named, new: Named, codec: Codec) -> tuple[bytes, dict[str, Floats]]:
    """The bytes that lead from a published version to the next one, and the next version: what they decode to, near
    `new`."""
    data = encode_update(old, new, codec)
    return data, apply_update(old, read_update(data, tensor_shapes(new), expected=codec))


def in_order(shapes: Shapes) -> list[str]:
    """The tensors as they lie in an update. Whoever reads them in this order decodes every piece of it once."""
    return sorted(shapes, key=lambda name: (-math.prod(shapes[name]), name))


class _Layout:
    """Where each tensor lies in the one vector of a block."""

    def __init__(self, shapes: Shapes) -> None:
        order = in_order(shapes)
        self.shapes = {name: tuple(shapes[name]) for name in order}
        ends = [0, *accumulate(math.prod(shape) for shape in self.shapes.values())]
        self.spans = dict(zip(order, pairwise(ends), strict=True))
        self.size = ends[-1]

    @cached_property
    def name(self) -> str:
        """Differs for other tensor names or shapes."""
        return hashlib.sha256(json.dumps(list(self.shapes.items())).encode()).hexdigest()[:16]


def _layout_of(shapes: Shapes) -> _Layout:
    """Every update of a block has the same: it is made once."""
    return _known_layout(tuple((name, tuple(shape)) for name, shape in shapes.items()))


@lru_cache(KNOWN_LAYOUTS)
def _known_layout(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> _Layout:
    return _Layout(dict(shapes))


class _Differences:
    """The vector of an update, computed piece by piece: before - after, minus the course if `earlier` is given; without
    `before`, `after` itself."""

    def __init__(self, layout: _Layout, before: Named | None, after: Named, earlier: Named | None) -> None:
        def flattened(state: Named) -> dict[str, Floats]:
            return {name: as_float32(state[name]).reshape(-1) for name in layout.spans}

        self._spans, self._after = list(layout.spans.items()), flattened(after)
        self._before = None if before is None else flattened(before)
        self._earlier = None if earlier is None else flattened(earlier)

    def slice(self, begin: int, end: int) -> Floats:
        parts = self.arrays(begin, end)
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def arrays(self, begin: int, end: int) -> list[Floats]:
        """An empty array, and the slice tensor by tensor."""
        parts, position = [np.empty(0, np.float32)], begin
        for name, (first, last) in self._spans[bisect_right(self._spans, begin, key=lambda span: span[1][1]) :]:
            if position >= end:
                break
            until = min(end, last)
            parts.append(_require_sane(name, self._piece(name, position - first, until - first)))
            position = until
        return parts

    def _piece(self, name: str, begin: int, end: int) -> Floats:
        after = self._after[name][begin:end]
        if self._before is None:
            return after
        before = self._before[name][begin:end]
        if self._earlier is None:
            return before - after
        return before - after - course(self._earlier[name][begin:end], before)


def difference(before: Named, after: Named) -> dict[str, Floats]:
    require_same_shapes(before, after)
    return {name: np.asarray(as_float32(before[name]) - as_float32(tensor)) for name, tensor in after.items()}


def energy(values: Floats) -> float:
    """The sum of their squares in float64. Not computed by BLAS, which would start threads for it."""
    return float(np.einsum("i,i->", values, values, dtype=np.float64))


def as_float32(tensor: Array) -> Floats:
    return tensor.astype(np.float32, copy=False)


def _require_sane(name: str, values: Array) -> Floats:
    if not within(values, MAX_MAGNITUDE):
        raise TensorError(
            f'tensor "{name}" holds NaN, Inf or more than {MAX_MAGNITUDE:.0e}, which no update may hold: '
            f"train again from the last version, with a smaller learning rate"
        )
    return values


def tensor_shapes(tensors: Named) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def require_same_shapes(before: Named, after: Named) -> None:
    if tensor_shapes(before) != tensor_shapes(after):
        name = min(dict(set(tensor_shapes(before).items()) ^ set(tensor_shapes(after).items())))
        raise TensorError(
            f'tensor "{name}" is not the same in the two sets of tensors that an update is made of: '
            f"give two states of the same block"
        )


def _read_codec(metadata: Mapping[str, str]) -> Codec:
    given = dict(metadata)
    if any(len(key) + len(value) > MAX_METADATA for key, value in given.items()):
        raise damaged(f"its metadata holds more than {MAX_METADATA} characters under one key")
    version, layout, name = (given.pop(key, None) for key in ("update", "layout", "codec"))
    if version != FORMAT:
        raise TensorError(
            f'got an update of format "{version}" and "{FORMAT}" is read here: '
            f"run the version of blocktrain that the coordinator runs"
        )
    if layout is None or name is None:
        raise damaged(f"its metadata names no {'layout' if layout is None else 'codec'}")
    try:
        kind = codec_type(name)
        codec = kind(**{key: _whole_number(given[key]) for key in kind.setting_names() if key in given})
    except ConfigError as error:
        raise damaged(str(error)) from None
    if codec.describe() != {"codec": name, **given}:
        raise damaged(f"its metadata is not exactly what codec {name} takes: {', '.join(codec.describe())}")
    return codec


def _whole_number(text: str) -> int:
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else -1


def _in_words(codec: Codec) -> str:
    return ", ".join(f"{key} = {value}" for key, value in codec.describe().items())
