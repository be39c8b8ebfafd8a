"""Continue a prompt or score a text with a trained model, for notebooks: strings in, strings out.
Next: model/stack.py, which computes the logits; train/evaluate.py, which scores whole splits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_of_run
from blocktrain.errors import ConfigError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.stack import EMPTY_PROMPT, BlockModel
from blocktrain.sampling_settings import check_sampling


@dataclass(frozen=True)
class TextScore:
    """How well a model predicts a text: −ln p of every token, given the tokens before it. Tokens are bytes, unless the
    model has a tokenizer."""

    nats: tuple[float, ...]
    num_bytes: int

    @property
    def nats_per_byte(self) -> float:
        return sum(self.nats) / self.num_bytes

    @property
    def bits_per_byte(self) -> float:
        return self.nats_per_byte / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_byte)


@torch.no_grad()
def score_text(model: BlockModel, text: str | bytes, *, tokenizer: Tokenizer | None = None) -> TextScore:
    """Predict every token once. A text longer than the model's context is read in consecutive windows, as in
    evaluation, so the first tokens of a window are predicted from few tokens."""
    data = _bytes(text)
    if not data:
        raise ConfigError("an empty text has no score: give at least one byte")
    tokenizer = _fitting(model, tokenizer)
    device, context = next(model.parameters()).device, model.spec.model.context
    before, tokens = tokenizer.encode(EMPTY_PROMPT), tokenizer.encode(data)
    whole = torch.tensor([*before[-1:].tolist(), *tokens.tolist()], device=device)
    nats: list[float] = []
    for start in range(0, len(tokens), context):
        window = whole[start : start + context + 1]
        logits = model.logits(window[None, :-1])[0].float()
        nats += F.cross_entropy(logits, window[1:], reduction="none").tolist()
    return TextScore(tuple(nats), len(data))


def generate(
    model: BlockModel,
    prompt: str | bytes = "",
    max_bytes: int = 200,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    tokenizer: Tokenizer | None = None,
) -> str:
    """The continuation of the prompt, whose end is read if it is longer than the model's context. Bytes that are not
    UTF-8 become �."""
    check_sampling(max_bytes, temperature, top_p, seed)
    pieces = generate_pieces(model, _fitting(model, tokenizer), _bytes(prompt), max_bytes, seed, temperature, top_p)
    return b"".join(pieces).decode("utf-8", "replace")


def generate_pieces(
    model: BlockModel,
    tokenizer: Tokenizer,
    prompt: bytes,
    max_bytes: int,
    seed: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> Iterator[bytes]:
    """The bytes of one token after the other; the last one is cut at max_bytes. Drawn autoregressively."""
    generator, left = torch.Generator().manual_seed(seed), max_bytes
    start = tokenizer.encode(prompt or EMPTY_PROMPT).tolist()
    for token in model.generate(start, max_bytes, generator, temperature, top_p):
        piece = tokenizer.decode([token])[:left]
        left -= len(piece)
        yield piece
        if not left:
            return


def load_run_tokenizer(run: RunDirectory) -> Tokenizer:
    """The tokenizer of a run: that of its tokenizer.json, or bytes."""
    return tokenizer_of_run(run.spec.corpus.tokenizer, run.tokenizer_file())


def _fitting(model: BlockModel, tokenizer: Tokenizer | None) -> Tokenizer:
    chosen = tokenizer or ByteTokenizer()
    if chosen.vocabulary != model.spec.model.vocabulary:
        raise ConfigError(
            f"the model has {model.spec.model.vocabulary} tokens and the tokenizer {chosen.name} has "
            f"{chosen.vocabulary}: give the model's, blocktrain.text.load_run_tokenizer(run)"
        )
    return chosen


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()
