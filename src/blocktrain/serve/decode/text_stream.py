"""Text: a stream of bytes as characters, never half of one, and nothing behind a stop string. No model.
Next: cli/commands/training/generate.py and gateway.py, which show it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


class TextStream:
    """Feed it bytes as they come; it gives back the characters that are certain. What may still become a stop string is
    held back; after a stop string nothing more comes. Bytes that are no UTF-8 become �."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped_by: str | None = None
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def feed(self, data: bytes | Iterable[int]) -> str:
        return self._take(self._decoder.decode(bytes(data)))

    def finish(self) -> str:
        """The rest, when no more bytes come: what was held back, and � for a character that stayed incomplete."""
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
        """How many of the held characters may be the beginning of a stop string."""
        longest = max(map(len, self._stop), default=0)
        starts = range(max(0, len(self._held) - longest + 1), len(self._held))
        return next((len(self._held) - at for at in starts if self._may_become_stop(self._held[at:])), 0)

    def _may_become_stop(self, ending: str) -> bool:
        return any(stop.startswith(ending) for stop in self._stop)
