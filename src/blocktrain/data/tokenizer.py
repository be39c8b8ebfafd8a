"""Tokenizers: text to numbers and back, without losing a byte. `bytes` needs no file; every other tokenizer is a
byte-level BPE in a tokenizer.json of the `tokenizers` library. No torch. Next: prepare.py, which tokenizes a corpus."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from blocktrain.errors import ConfigError
from blocktrain.settings import BYTES, MAX_VOCABULARY, NUM_SYMBOLS, TOKENIZER_FILE

Ids: TypeAlias = NDArray[np.int32]

LEARNED, NAMED = "bpe:", "hf:"
LONGEST_TOKEN_BYTES = 32  # of a learned tokenizer: keeps lines of ===== from filling the vocabulary
PROBE = " Hello\tworld,  don't\r\n\n  Ünïcödé e\u0301 \ufb01 \u2460 你好 👋🏽 ½ 1234567 \x00\x7f <|end|> \n"
CHOICES = '"bytes", "bpe:N", the path of a tokenizer.json, or "hf:NAME"'


class Tokenizer(Protocol):
    """Text to ids and back. Decoding the ids of any bytes gives the same bytes."""

    name: str  # as in corpus.tokenizer
    vocabulary: int  # ids are 0 to vocabulary - 1
    file: bytes | None  # the tokenizer.json; None for bytes
    token_lengths: NDArray[np.int64]  # bytes of text of each id

    @property
    def sha256(self) -> str | None:
        """Of the file."""
        ...

    def encode(self, data: bytes) -> Ids: ...

    def encode_texts(self, texts: Sequence[str]) -> list[Ids]:
        """Many texts at once, on all cores."""
        ...

    def decode(self, ids: Iterable[int]) -> bytes: ...


class ByteTokenizer:
    """One token per byte."""

    name, vocabulary, sha256 = BYTES, NUM_SYMBOLS, None
    file: bytes | None = None
    token_lengths = np.ones(NUM_SYMBOLS, dtype=np.int64)

    def encode(self, data: bytes) -> Ids:
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)

    def encode_texts(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text.encode()) for text in texts]

    def decode(self, ids: Iterable[int]) -> bytes:
        return bytes(ids)


class BpeTokenizer:
    """A byte-level BPE. `file` is its tokenizer.json, without the parts that would change the text or add tokens."""

    def __init__(self, name: str, file: bytes, origin: str) -> None:
        import tokenizers  # not above: who trains on bytes does not need it

        self.name, self.origin = name, origin
        settings = _lossless(_read_json(file, origin), origin)
        self.file: bytes | None = json.dumps(settings, ensure_ascii=False, separators=(",", ":")).encode()
        try:
            self._inner = tokenizers.Tokenizer.from_str(self.file.decode())
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(f"{origin} is not a tokenizer.json ({str(error)[:120]}): give another file") from None
        self._inner.encode_special_tokens = True  # text that looks like a special token is text
        self._tokens = self._token_bytes()
        self.vocabulary = len(self._tokens)
        self.token_lengths = np.array([len(token) for token in self._tokens], dtype=np.int64)
        self._of_byte = self._require_byte_complete()
        if self.decode(self.encode(PROBE.encode())) != PROBE.encode():
            raise ConfigError(
                f"the tokenizer {origin} changes some texts, so that they cannot be restored: give a byte-level BPE "
                f"that keeps every byte, such as bpe:4096"
            )

    @property
    def sha256(self) -> str:
        assert self.file is not None
        return hashlib.sha256(self.file).hexdigest()

    def encode(self, data: bytes) -> Ids:
        """Bytes that are not UTF-8 become the tokens of single bytes."""
        parts = []
        while data:
            try:
                text, strange, data = data.decode(), b"", b""
            except UnicodeDecodeError as error:
                text, strange = data[: error.start].decode(), data[error.start : error.end]
                data = data[error.end :]
            parts += [*self.encode_texts([text]), self._of_byte[list(strange)]]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

    def encode_texts(self, texts: Sequence[str]) -> list[Ids]:
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in encoded]

    def decode(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._tokens[each] for each in ids)

    def _token_bytes(self) -> list[bytes]:
        """The bytes of each id. An id that the file leaves out has none."""
        added = {index: token.content for index, token in self._inner.get_added_tokens_decoder().items()}
        vocabulary = {index: token for token, index in self._inner.get_vocab(with_added_tokens=True).items()}
        size = max(vocabulary, default=-1) + 1
        if not 2 <= size <= MAX_VOCABULARY:
            raise ConfigError(
                f"the tokenizer {self.origin} has {size} tokens and 2 to {MAX_VOCABULARY} are possible: give another"
            )
        found = [b""] * size
        for index, token in vocabulary.items():
            found[index] = added[index].encode() if index in added else self._plain(token)
        return found

    def _plain(self, token: str) -> bytes:
        alphabet = _byte_of_character()
        try:
            return bytes(alphabet[character] for character in token)
        except KeyError as error:
            raise ConfigError(
                f"the tokenizer {self.origin} is not byte-level: its token {token!r} has the character "
                f"{error.args[0]!r}, which stands for no byte: give a byte-level BPE, such as bpe:4096"
            ) from None

    def _require_byte_complete(self) -> Ids:
        """The id of each byte value."""
        ids = {token: index for index, token in enumerate(self._tokens) if len(token) == 1}
        missing = [byte for byte in range(NUM_SYMBOLS) if bytes([byte]) not in ids]
        if missing:
            raise ConfigError(
                f"the tokenizer {self.origin} is not byte-complete: it has no token for {len(missing)} of 256 bytes, "
                f"the first is 0x{missing[0]:02x}: give one that can write every text, such as bpe:4096"
            )
        return np.array([ids[bytes([byte])] for byte in range(NUM_SYMBOLS)], dtype=np.int32)


def learned_size(choice: str) -> int | None:
    """The N of bpe:N, which must be learned from a corpus. None for other tokenizers."""
    if not choice.startswith(LEARNED):
        return None
    number = choice.removeprefix(LEARNED)
    if not re.fullmatch(r"[0-9]{1,9}", number) or not NUM_SYMBOLS < int(number) <= MAX_VOCABULARY:
        raise ConfigError(
            f'tokenizer "{choice}" has no usable size: write bpe:N with N from {NUM_SYMBOLS + 1} to {MAX_VOCABULARY}'
        )
    return int(number)


def learn_tokenizer(texts: Iterator[str], size: int) -> BpeTokenizer:
    """A BPE with `size` tokens, or fewer if the texts have not enough pairs. Equal texts give an equal file."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=LONGEST_TOKEN_BYTES,
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return BpeTokenizer(f"{LEARNED}{size}", inner.to_str().encode(), f"{LEARNED}{size}")


def load_tokenizer(choice: str) -> Tokenizer:
    """Every tokenizer that need not be learned."""
    if choice == BYTES:
        return ByteTokenizer()
    if choice.startswith(NAMED):
        return BpeTokenizer(choice, _named_file(choice.removeprefix(NAMED)), f'"{choice}"')
    path = Path(choice).expanduser()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f'tokenizer "{choice}" is not a name and not a readable file ({error.strerror}): choose {CHOICES}'
        ) from None
    return BpeTokenizer(choice, data, str(path))


def tokenizer_of_run(name: str | None, file: bytes | None) -> Tokenizer:
    """From the tokenizer.json of a run directory; None for a run on bytes."""
    return ByteTokenizer() if file is None else BpeTokenizer(name or TOKENIZER_FILE, file, TOKENIZER_FILE)


def _named_file(name: str) -> bytes:
    """Of a folder, or of the hub."""
    folder = Path(name).expanduser()
    if folder.is_dir() and (folder / TOKENIZER_FILE).is_file():
        return (folder / TOKENIZER_FILE).read_bytes()
    import tokenizers

    try:
        file: str = tokenizers.Tokenizer.from_pretrained(name).to_str()
        return file.encode()
    except Exception as error:  # of the hub and the network: they have no common class
        detail = " ".join(str(error).split())[:120]
        raise ConfigError(
            f'tokenizer "hf:{name}" cannot be fetched ({detail}): check its name and the network, '
            f"or give the path of a tokenizer.json"
        ) from None


def _read_json(file: bytes, origin: str) -> dict[str, Any]:
    try:
        settings = json.loads(file)
        assert isinstance(settings["model"], dict)
        return dict(settings)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise ConfigError(f"{origin} is not a tokenizer.json: give a file that the tokenizers library wrote") from None


def _lossless(settings: dict[str, Any], origin: str) -> dict[str, Any]:
    """Without what changes the text, adds tokens or draws random numbers: normaliser, post-processor, padding,
    truncation, dropout and the space before the first word."""
    kind = settings["model"].get("type")
    steps = _steps(settings.get("pre_tokenizer"))
    if kind != "BPE" or not any(step.get("type") == "ByteLevel" for step in steps):
        raise ConfigError(
            f"the tokenizer {origin} is of the kind {kind} and not a byte-level BPE, so it cannot write every text: "
            f"give a byte-level BPE, such as bpe:4096"
        )
    for step in steps:
        if step.get("type") == "ByteLevel":
            step["add_prefix_space"] = False
    settings["model"]["dropout"] = None
    return settings | dict.fromkeys(("normalizer", "post_processor", "padding", "truncation"))


def _steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    if not isinstance(pre_tokenizer, dict):
        return []
    return pre_tokenizer.get("pretokenizers", []) if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]


@cache
def _byte_of_character() -> dict[str, int]:
    """How GPT-2 writes bytes as characters: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(NUM_SYMBOLS) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(NUM_SYMBOLS + n): byte for n, byte in enumerate(others)}
