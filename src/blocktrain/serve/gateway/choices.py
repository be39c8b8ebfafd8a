"""Turns the bytes of one text into the choices of an answer: whole characters, nothing after a stop string, and the
log-probabilities of exactly the bytes shown. No model, no clock. Next: completion.py, which sends them."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from blocktrain.serve.decode.request import TextStream
from blocktrain.serve.gateway.openai import Choice, Logprobs


@dataclass(frozen=True)
class ByteLogprobs:
    """A byte, its log-probability, and those of the likeliest bytes in its place."""

    byte: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class ChoiceWriter:
    def __init__(self, index: int, stops: Sequence[str], logprobs: int | None) -> None:
        self.num_bytes = 0  # taken, up to and including a stop string
        self._index, self._logprobs = index, logprobs
        self._stream, self._offsets = TextStream(stops), _Offsets()
        self._num_characters = 0  # shown
        self._waiting: deque[tuple[int, ByteLogprobs]] = deque()  # with the index of the character it belongs to

    @property
    def stopped(self) -> bool:
        return self._stream.stopped_by is not None

    def echo(self, prompt: Sequence[ByteLogprobs]) -> Choice:
        """The prompt. Stop strings in it are ignored."""
        self._wait(prompt)
        return self._choice(bytes(each.byte for each in prompt).decode())

    def take(self, written: Iterable[ByteLogprobs]) -> Choice | None:
        """More bytes of the text; None if they complete no character that can be shown."""
        text = ""
        for each in written:
            self.num_bytes += 1
            self._wait([each])
            text += self._stream.feed([each.byte])
            if self.stopped:
                break
        return self._choice(text) if text else None

    def end(self) -> Choice:
        """The text that was held back, and the reason for the end."""
        text = self._stream.finish()
        return self._choice(text, "stop" if self.stopped else "length")

    def _wait(self, taken: Iterable[ByteLogprobs]) -> None:
        if self._logprobs is not None:
            self._waiting.extend((self._offsets.next(each.byte), each) for each in taken)

    def _choice(self, text: str, finish_reason: Literal["stop", "length"] | None = None) -> Choice:
        self._num_characters += len(text)
        shown = []
        while self._waiting and self._waiting[0][0] < self._num_characters:
            shown.append(self._waiting.popleft())
        table = logprob_table(shown, self._logprobs) if self._logprobs is not None else None
        return Choice(text=text, index=self._index, logprobs=table, finish_reason=finish_reason)


class _Offsets:
    """The index of the character that each byte belongs to."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._complete = 0

    def next(self, byte: int) -> int:
        self._complete += len(self._decoder.decode(bytes([byte])))
        pending, _ = self._decoder.getstate()
        return self._complete if pending else self._complete - 1


def token_name(byte: int) -> str:
    """OpenAI's notation for tokens that are not whole characters."""
    return chr(byte) if byte < 128 else f"bytes:\\x{byte:02x}"


def logprob_table(shown: Sequence[tuple[int, ByteLogprobs]], num_top: int) -> Logprobs:
    return Logprobs(
        tokens=[token_name(each.byte) for _, each in shown],
        token_logprobs=[each.logprob for _, each in shown],
        top_logprobs=[_top(each, num_top) for _, each in shown] if num_top else None,
        text_offset=[offset for offset, _ in shown],
    )


def _top(shown: ByteLogprobs, num_top: int) -> dict[str, float] | None:
    """The likeliest bytes, and the byte itself."""
    if shown.logprob is None:
        return None
    return {token_name(byte): logprob for byte, logprob in (*shown.top[:num_top], (shown.byte, shown.logprob))}


def join_choices(parts: Sequence[Choice]) -> Choice:
    """The whole choice, from the parts that a stream would send."""
    tables = [part.logprobs for part in parts if part.logprobs is not None]
    return Choice(
        text="".join(part.text for part in parts),
        index=parts[0].index,
        logprobs=_join_tables(tables) if tables else None,
        finish_reason=parts[-1].finish_reason,
    )


def _join_tables(tables: Sequence[Logprobs]) -> Logprobs:
    return Logprobs(
        tokens=[token for table in tables for token in table.tokens],
        token_logprobs=[logprob for table in tables for logprob in table.token_logprobs],
        top_logprobs=None
        if tables[0].top_logprobs is None
        else [top for table in tables for top in table.top_logprobs or ()],
        text_offset=[offset for table in tables for offset in table.text_offset],
    )
