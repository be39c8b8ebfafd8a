"""Scribe: the bytes of one text as the choices of an answer: whole characters, nothing behind a stop string, and beside
them the log-probabilities of exactly the bytes shown. No model, no clock. Next: completion.py."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from blocktrain.serve.decode.text_stream import TextStream
from blocktrain.serve.gateway.openai import Choice, Logprobs


@dataclass(frozen=True)
class Score:
    """A byte, with the log-probabilities of it and of the likeliest bytes in its place."""

    byte: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Scribe:
    def __init__(self, index: int, stops: Sequence[str], logprobs: int | None) -> None:
        self.num_bytes = 0  # taken, up to the end of a stop string
        self._index, self._logprobs = index, logprobs
        self._stream, self._offsets = TextStream(stops), _Offsets()
        self._num_characters = 0  # shown
        self._waiting: deque[tuple[int, Score]] = deque()  # with the character each belongs to

    @property
    def stopped(self) -> bool:
        return self._stream.stopped_by is not None

    def echo(self, scores: Sequence[Score]) -> Choice:
        """The prompt, in which no stop string is looked for."""
        self._wait(scores)
        return self._choice(bytes(score.byte for score in scores).decode())

    def take(self, scores: Iterable[Score]) -> Choice | None:
        """More bytes of the text; None while no character is certain."""
        text = ""
        for score in scores:
            self.num_bytes += 1
            self._wait([score])
            text += self._stream.feed([score.byte])
            if self.stopped:
                break
        return self._choice(text) if text else None

    def end(self) -> Choice:
        """What was held back, and why it ends."""
        text = self._stream.finish()
        return self._choice(text, "stop" if self.stopped else "length")

    def _wait(self, scores: Iterable[Score]) -> None:
        if self._logprobs is not None:
            self._waiting.extend((self._offsets.next(score.byte), score) for score in scores)

    def _choice(self, text: str, finish_reason: Literal["stop", "length"] | None = None) -> Choice:
        self._num_characters += len(text)
        shown = []
        while self._waiting and self._waiting[0][0] < self._num_characters:
            shown.append(self._waiting.popleft())
        table = logprob_table(shown, self._logprobs) if self._logprobs is not None else None
        return Choice(text=text, index=self._index, logprobs=table, finish_reason=finish_reason)


class _Offsets:
    """Which character each byte belongs to, counted from the beginning of the text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._complete = 0

    def next(self, byte: int) -> int:
        self._complete += len(self._decoder.decode(bytes([byte])))
        pending, _ = self._decoder.getstate()
        return self._complete if pending else self._complete - 1


def token_name(byte: int) -> str:
    """As OpenAI names tokens that are no whole characters."""
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"


def logprob_table(shown: Sequence[tuple[int, Score]], num_top: int) -> Logprobs:
    return Logprobs(
        tokens=[token_name(score.byte) for _, score in shown],
        token_logprobs=[score.logprob for _, score in shown],
        top_logprobs=[_top(score, num_top) for _, score in shown] if num_top else None,
        text_offset=[offset for offset, _ in shown],
    )


def _top(score: Score, num_top: int) -> dict[str, float] | None:
    """The likeliest, and the byte itself where it is not among them."""
    if score.logprob is None:
        return None
    return {token_name(byte): logprob for byte, logprob in (*score.top[:num_top], (score.byte, score.logprob))}


def joined(parts: Sequence[Choice]) -> Choice:
    """The whole choice of its parts."""
    tables = [part.logprobs for part in parts if part.logprobs is not None]
    return Choice(
        text="".join(part.text for part in parts),
        index=parts[0].index,
        logprobs=_joined_tables(tables) if tables else None,
        finish_reason=parts[-1].finish_reason,
    )


def _joined_tables(tables: Sequence[Logprobs]) -> Logprobs:
    return Logprobs(
        tokens=[token for table in tables for token in table.tokens],
        token_logprobs=[logprob for table in tables for logprob in table.token_logprobs],
        top_logprobs=None
        if tables[0].top_logprobs is None
        else [top for table in tables for top in table.top_logprobs or ()],
        text_offset=[offset for table in tables for offset in table.text_offset],
    )
