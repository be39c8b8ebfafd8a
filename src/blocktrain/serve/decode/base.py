"""Writer: what the decoders share: the text so far, what the stages remember of it, the counts.
Next: decode.py and sweep.py, the ways to continue it."""

from __future__ import annotations

from typing import Any

from blocktrain.model.kv_cache import common_prefix
from blocktrain.model.stack import window_start
from blocktrain.serve.decode.request import DecodeStats, Request, WrittenByte
from blocktrain.serve.traversal import ModelInfo, Traversal


class Writer:
    def __init__(self, request: Request, info: ModelInfo, session: str) -> None:
        self.request, self.info, self.stats = request, info, DecodeStats()
        self._session = session
        self._text = bytearray(request.prompt or b"\n")  # an empty prompt starts a new line
        self._remembered = b""

    @property
    def _left(self) -> int:
        return self.request.max_bytes - self.stats.written

    def _window(self) -> bytes:
        """The part of the text that the next byte is read from."""
        return bytes(self._text[window_start(len(self._text), self.info.context) :])

    def _traversal(self, prompt: bytes, **what: Any) -> Traversal:
        start = min(common_prefix(self._remembered, prompt), len(prompt) - 1)
        return Traversal(self._session, prompt, start=start, **what)

    def _told(self, reply: Traversal, seconds: float) -> None:
        self.stats.traversals += 1
        self.stats.seconds += seconds
        self.stats.draft_s += sum(hop.drafted_s for hop in reply.trace)
        self.stats.degraded |= reply.degraded
        single = reply.tails is not None and reply.tails.size(0) == 1 and reply.shares is None  # else one of several
        self._remembered = reply.prompt + (
            bytes(reply.tails[0].tolist()) if single and reply.tails is not None else b""
        )

    def _write(self, written: list[WrittenByte]) -> list[WrittenByte]:
        written = written[: self._left]
        self._text += bytes(byte.value for byte in written)
        self.stats.written += len(written)
        return written
