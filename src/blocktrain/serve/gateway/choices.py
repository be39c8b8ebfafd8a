"""Turns the tokens of one text into the choices of an answer: whole characters, nothing after a stop string, and the
log-probabilities of exactly the tokens shown. No model, no clock. Next: completion.py, which sends them."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer
from blocktrain.serve.decode.request import TextStream
from blocktrain.serve.gateway.openai import Choice, Logprobs


@dataclass(frozen=True)
class TokenLogprobs:
    """A token, its log-probability, and those of the likeliest tokens in its place. Tokens are bytes, unless the model
    has a tokenizer."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class ChoiceWriter:
    def __init__(
        self, index: int, stops: Sequence[str], logprobs: int | None, tokenizer: Tokenizer | None = None
    ) -> None:
        self.num_tokens = self.num_bytes = 0  # taken, up to and including the token that completes a stop string
        self._index, self._logprobs, self._tokenizer = index, logprobs, tokenizer or ByteTokenizer()
        self._stops, self._stream, self._offsets = tuple(stops), TextStream(stops), _Offsets()
        self._num_characters = 0  # shown
        self._waiting: deque[tuple[int, TokenLogprobs]] = deque()  # with the index of the character it belongs to

    @property
    def stopped(self) -> bool:
        return self._stream.stopped_by is not None

    def echo(self, prompt: Sequence[TokenLogprobs]) -> Choice:
        """The prompt. Stop strings in it are ignored."""
        self._wait(prompt)
        return self._choice(self._tokenizer.decode(each.token for each in prompt).decode())

    def take(self, written: Iterable[TokenLogprobs]) -> Choice | None:
        """More tokens of the text; None if they complete no character that can be shown."""
        text = ""
        for each in written:
            data = self._tokenizer.decode([each.token])
            self.num_tokens, self.num_bytes = self.num_tokens + 1, self.num_bytes + len(data)
            self._wait([each])
            text += self._stream.feed(data)
            if self.stopped:
                break
        return self._choice(text) if text else None

    def take_plain(self, tokens: Sequence[int]) -> Choice | None:
        """The same for tokens of which no log-probabilities are shown: at once, if there are no stop strings."""
        if self._stops:
            return self.take(map(TokenLogprobs, tokens))
        data = self._tokenizer.decode(tokens)
        self.num_tokens, self.num_bytes = self.num_tokens + len(tokens), self.num_bytes + len(data)
        text = self._stream.feed(data)
        return self._choice(text) if text else None

    def end(self) -> Choice:
        """The text that was held back, and the reason for the end."""
        text = self._stream.finish()
        return self._choice(text, "stop" if self.stopped else "length")

    def _wait(self, taken: Iterable[TokenLogprobs]) -> None:
        if self._logprobs is not None:
            for each in taken:
                self._waiting.append((self._offsets.next(self._tokenizer.decode([each.token])), each))

    def _choice(self, text: str, finish_reason: Literal["stop", "length"] | None = None) -> Choice:
        self._num_characters += len(text)
        shown = []
        while self._waiting and self._waiting[0][0] < self._num_characters:
            shown.append(self._waiting.popleft())
        table = logprob_table(shown, self._logprobs, self._tokenizer) if self._logprobs is not None else None
        return Choice(text=text, index=self._index, logprobs=table, finish_reason=finish_reason)


class _Offsets:
    """The index of the character in which each token begins."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._complete = 0

    def next(self, token: bytes) -> int:
        """An invalid byte before it may end a character only now: so its first byte decides."""
        begins = self._after(token[:1])
        self._after(token[1:])
        return begins

    def _after(self, data: bytes) -> int:
        self._complete += len(self._decoder.decode(data))
        pending, _ = self._decoder.getstate()
        return self._complete if pending or not data else self._complete - 1


def token_name(token: bytes) -> str:
    """The text of a token; OpenAI's notation if it is not whole characters."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def logprob_table(shown: Sequence[tuple[int, TokenLogprobs]], num_top: int, tokenizer: Tokenizer) -> Logprobs:
    def name(token: int) -> str:
        return token_name(tokenizer.decode([token]))

    def top(each: TokenLogprobs) -> dict[str, float] | None:
        """The likeliest tokens, and the token itself."""
        if each.logprob is None:
            return None
        return {name(token): logprob for token, logprob in (*each.top[:num_top], (each.token, each.logprob))}

    return Logprobs(
        tokens=[name(each.token) for _, each in shown],
        token_logprobs=[each.logprob for _, each in shown],
        top_logprobs=[top(each) for _, each in shown] if num_top else None,
        text_offset=[offset for offset, _ in shown],
    )


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
