"""Error feedback: what lossy updates leave out stays at the worker and is sent with later updates. Pure: no files, no
sockets. Next: updates.py, the updates themselves; swarm/worker/worker.py, which trains between them."""

from __future__ import annotations

from collections.abc import MutableMapping

import numpy as np

from blocktrain.wire.codecs.base import Codec
from blocktrain.wire.safetensors import Floats
from blocktrain.wire.updates import (
    Named,
    as_float32,
    course_helps,
    difference,
    encode_update,
    read_update,
    tensor_shapes,
)


class ErrorFeedback:
    """What lossy updates have left out so far. With e = published - after and the codec C: send C(e), keep e - C(e).

    A worker trains from `start` of a published version instead of the version itself. Its weights then include what it
    has not sent yet, and it does not learn the same again. Only an `accepted` update changes what is unsent, which may
    be kept on disk (`unsent`)."""

    def __init__(self, unsent: MutableMapping[str, Floats] | None = None) -> None:
        self.unsent: MutableMapping[str, Floats] = {} if unsent is None else unsent

    def forget_others(self, published: Named) -> None:
        """Forgets the unsent part of tensors that are not in this version, such as those of an earlier phase."""
        for name in self.unsent.keys() - published.keys():
            del self.unsent[name]

    def start(self, published: Named) -> dict[str, Floats]:
        """The weights to train from: published tensors plus the worker's own unsent progress."""
        unsent = {name: self.unsent[name] for name in published if name in self.unsent}
        started = difference({name: published[name] for name in unsent}, unsent)
        return {name: started.get(name, as_float32(tensor)) for name, tensor in published.items()}

    def compress(self, published: Named, after: Named, codec: Codec, earlier: Named | None = None) -> bytes:
        """The update from the published version towards `after`, which was trained from `start` of that version. If the
        codec gains from the block's course and `earlier`, the version before the published one, is known, the update is
        coded from the course, unless that would leave more to send."""
        by_course = earlier is not None and codec.uses_course and course_helps(earlier, published, after)
        return encode_update(published, after, codec, earlier if by_course else None)

    def accepted(self, data: bytes, published: Named, after: Named, earlier: Named | None = None) -> None:
        """The update that `compress` made of the same tensors will be merged: what it left out is now unsent."""
        sent = read_update(data, tensor_shapes(after))
        for name in sent.names:
            self.unsent.pop(name, None)  # so that at most one tensor is held twice
            if not sent.codec.lossless:
                change = sent.change(name, published[name], earlier[name] if sent.from_course and earlier else None)
                self.unsent[name] = np.asarray(as_float32(published[name]) - as_float32(after[name]) - change)
