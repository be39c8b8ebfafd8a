"""An update made small and back: named tensors <-> few bytes, checked. Pure: no sockets, no files, no merging.
Next: codecs.py, what makes it small; tensors.py, the container; ../swarm/averaging.py, which merges updates.

An update is Δ = before - after of every tensor of a block. All tensors are laid out as one vector, the largest first
and equals by name, so that small ones share chunks, and the vector goes through a codec. With fp32 `after` itself
travels: the difference of two float32 is no float32, and one update must merge to exactly `after`.
What a lossy codec leaves out stays at the sender, in `ErrorFeedback`, and goes with the next update.

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
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from blocktrain.errors import ConfigError, TensorError
from blocktrain.wire.codecs import (
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
from blocktrain.wire.tensors import decode, encode

FORMAT = "1"
MAX_HEADER_BYTES = 2048
MAX_METADATA = 64

Named: TypeAlias = Mapping[str, Tensor]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


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
    parts, metadata = decode(data, max_bytes=min(limits), in_place=True)
    settings = _read_settings(metadata)
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
    return EncodedUpdate(settings, layout, decode_vector(parts, settings, layout.size))


def max_update_bytes(settings: CodecSettings, shapes: Shapes) -> int:
    """No update of a block of these shapes is larger: what to allow an upload before its first byte is read."""
    parts = parts_of(settings, sum(map(math.prod, shapes.values())))
    return MAX_HEADER_BYTES + sum(math.prod(shape) * dtype.itemsize for dtype, shape in parts.values())


class EncodedUpdate:
    """A checked update, decoded tensor by tensor, so that a merge holds one tensor of it at a time."""

    def __init__(self, settings: CodecSettings, layout: _Layout, values: Values) -> None:
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
        return torch.cat([torch.empty(0).double(), *self.pieces(name, base)]).view(self._layout.shapes[name])

    def pieces(self, name: str, base: Tensor | None = None) -> Iterator[Tensor]:
        """The same, flat, in pieces that stay in a processor's cache while somebody works on them."""
        begin, end = self._layout.spans[name]
        before = self._base(name, base).flatten() if self.settings.lossless else None
        for start in range(begin, end, PIECE):
            values = self._values.slice(start, stop := min(start + PIECE, end)).double()
            yield values if before is None else values.neg_().add_(before[start - begin : stop - begin])

    def after(self, name: str, base: Tensor | None = None) -> Tensor:
        """base - Δ of one tensor in float32, the same bits on every machine; of fp32 exactly what was sent."""
        values = self._slice(name)
        return values.clone() if self.settings.lossless else self._base(name, base) - values

    def squared_norm(self, base: Named | None = None) -> float:
        """‖Δ‖² over all tensors."""
        known = base or {}
        pieces = (piece for name in self.names for piece in self.pieces(name, known.get(name)))
        return sum(float(piece.dot(piece)) for piece in pieces)

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
    """What lossy updates left out so far, at the worker: e = published - after, send C(e), keep e - C(e).

    A worker trains from `start` of a published version rather than from the version itself: what it has not sent yet
    stays in its weights, and it does not learn the same again while it waits. `compress` replaces tensors and never
    writes into them: a worker whose update was refused goes back by loading the state that it took before."""

    def __init__(self) -> None:
        self._unsent: dict[str, Tensor] = {}

    def start(self, published: Named) -> dict[str, Tensor]:
        """Where to train from: the published version with the worker's own unsent progress applied to it. Of what is
        not in this version, such as a block of an earlier phase, the unsent part is forgotten."""
        self._unsent = {name: self._unsent[name] for name in published if name in self._unsent}
        _require_same_shapes(self._unsent, {name: published[name] for name in self._unsent})
        return {
            name: _plain(tensor) - self._unsent[name] if name in self._unsent else _plain(tensor)
            for name, tensor in published.items()
        }

    def compress(self, published: Named, after: Named, settings: CodecSettings) -> bytes:
        """The update that leads from the published version towards `after`, which was trained from its `start`."""
        if settings.lossless:
            self._unsent = {}
            return encode_update(published, after, settings)
        total = _difference(published, after)
        data = _encode(total, settings)
        sent = read_update(data, _shapes(total), expected=settings)
        self._unsent = {name: tensor - sent.delta(name).float() for name, tensor in total.items()}
        return data

    def state(self) -> dict[str, Tensor]:
        """What was not sent, by name; empty before the first update."""
        return dict(self._unsent)

    def load(self, state: Named) -> None:
        self._unsent = {name: _plain(tensor) for name, tensor in state.items()}


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
    return encode(encode_vector(vector, settings), metadata)


def _difference(before: Named, after: Named) -> dict[str, Tensor]:
    _require_same_shapes(before, after)
    return {name: _plain(before[name]) - _plain(tensor) for name, tensor in after.items()}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32)


def _sane(name: str, tensor: Tensor) -> Tensor:
    plain = _plain(tensor)
    if not within(plain, MAX_MAGNITUDE):
        raise TensorError(
            f'tensor "{name}" holds NaN, Inf or more than {MAX_MAGNITUDE:.0e}, which no update may: '
            f"train again from the last version, with a smaller learning rate"
        )
    return plain


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
