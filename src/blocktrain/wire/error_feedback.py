"""Error feedback: what lossy updates leave out stays at the worker and goes with the next one. Pure: no files, no
sockets. Next: deltas.py, the updates themselves; ../swarm/worker.py, which trains between them."""

from __future__ import annotations

import numpy as np

from blocktrain.wire.codecs.base import CodecSettings
from blocktrain.wire.safetensors import Floats
from blocktrain.wire.updates import (
    Named,
    difference,
    encode_update,
    plain,
    read_update,
    tensor_shapes,
)


class ErrorFeedback:
    """What lossy updates left out so far, at the worker: e = published - after, send C(e), keep e - C(e).

    A worker trains from `start` of a published version rather than from the version itself: what it has not sent yet
    stays in its weights, and it does not learn the same again while it waits. Only an update that was `accepted`
    changes what is unsent."""

    def __init__(self) -> None:
        self.unsent: dict[str, Floats] = {}

    def start(self, published: Named) -> dict[str, Floats]:
        """Where to train from: the published version with the worker's own unsent progress applied to it. Of what is
        not in this version, such as a block of an earlier phase, the unsent part is forgotten."""
        self.unsent = {name: self.unsent[name] for name in published if name in self.unsent}
        started = difference({name: published[name] for name in self.unsent}, self.unsent)
        return {name: started.get(name, plain(tensor)) for name, tensor in published.items()}

    def compress(self, published: Named, after: Named, settings: CodecSettings, earlier: Named | None = None) -> bytes:
        """The update that leads from the published version towards `after`, which was trained from its `start`; from
        the block's course where `earlier`, the version before the published one, is at hand and the codec gains."""
        return encode_update(published, after, settings, earlier if settings.gains_from_course else None)

    def accepted(self, data: bytes, published: Named, after: Named, earlier: Named | None = None) -> None:
        """The update that `compress` made of the same tensors will be merged: what it left out is unsent now."""
        sent = read_update(data, tensor_shapes(after))
        for name in after:
            self.unsent.pop(name, None)  # one tensor at a time is there twice
            if not sent.settings.lossless:
                change = sent.change(name, published[name], earlier[name] if sent.from_course and earlier else None)
                self.unsent[name] = np.asarray(plain(published[name]) - plain(after[name]) - change)
