"""Error feedback: what lossy updates leave out stays at the worker and goes with the next one. Pure: no files, no
sockets. Next: deltas.py, the updates themselves; ../swarm/worker.py, which trains between them."""

from __future__ import annotations

from torch import Tensor

from blocktrain.wire.codecs import CodecSettings
from blocktrain.wire.deltas import (
    Named,
    difference,
    encode_update,
    plain,
    read_update,
    require_same_shapes,
    tensor_shapes,
)


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
        require_same_shapes(self._unsent, {name: published[name] for name in self._unsent})
        return {
            name: plain(tensor) - self._unsent[name] if name in self._unsent else plain(tensor)
            for name, tensor in published.items()
        }

    def compress(self, published: Named, after: Named, settings: CodecSettings, earlier: Named | None = None) -> bytes:
        """The update that leads from the published version towards `after`, which was trained from its `start`; from
        the block's course where `earlier`, the version before the published one, is at hand and the codec gains."""
        known = earlier if settings.gains_from_course else None
        data = encode_update(published, after, settings, known)
        if settings.lossless:
            self._unsent = {}
            return data
        sent = read_update(data, tensor_shapes(after), expected=settings)
        self._unsent = {
            name: delta.sub_(sent.change(name, published[name], known[name] if known else None))
            for name, delta in difference(published, after).items()
        }
        return data

    def state(self) -> dict[str, Tensor]:
        """What was not sent, by name; empty before the first update."""
        return dict(self._unsent)

    def load(self, state: Named) -> None:
        self._unsent = {name: plain(tensor) for name, tensor in state.items()}
