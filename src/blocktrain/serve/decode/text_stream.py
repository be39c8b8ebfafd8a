"""TextStream: a stream of bytes as whole characters, up to a stop string. No model. Next: the gateway's choices.py and
the command generate show it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


class TextStream:
    """Takes bytes as they come and returns the characters that are certain. It holds back what may still become a stop
    string; after a stop string it returns nothing more. Bytes that are not UTF-8 become �."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped_by: str | None = None
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def feed(self, data: bytes | Iterable[int]) -> str:
        return self._take(self._decoder.decode(bytes(data)))

    def finish(self) -> str:
        """The rest, when no more bytes come: what was held back, and � for an incomplete character."""
        certain = self._take(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return certain + rest

    def _take(self, characters: str) -> str:
        if self.stopped_by is not None:
            return ""
        certain = []
        for character in characters:
            self._held += character
            if found := self._completed():
                self.stopped_by = found
                certain.append(self._held[: -len(found)])
                self._held = ""
                break
            safe = len(self._held) - self._open()
            certain.append(self._held[:safe])
            self._held = self._held[safe:]
        return "".join(certain)

    def _completed(self) -> str | None:
        """The longest stop string that ends here."""
        return max((stop for stop in self._stop if stop and self._held.endswith(stop)), key=len, default=None)

    def _open(self) -> int:
        """How many of the held characters may begin a stop string."""
        longest = max(map(len, self._stop), default=0)
        starts = range(max(0, len(self._held) - longest + 1), len(self._held))
        return next((len(self._held) - at for at in starts if self._may_become_stop(self._held[at:])), 0)

    def _may_become_stop(self, ending: str) -> bool:
        return any(stop.startswith(ending) for stop in self._stop)
