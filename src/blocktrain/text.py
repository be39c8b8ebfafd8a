"""Continue a prompt or score a text with a trained model, for notebooks: strings in, strings out.
Next: model/stack.py, which computes the logits; train/evaluate.py, which scores whole splits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from blocktrain.errors import ConfigError
from blocktrain.model.stack import BlockModel

BEFORE_THE_TEXT = b"\n"  # an empty prompt means the start of a line


@dataclass(frozen=True)
class TextScore:
    """How well a model predicts a text: −ln p of every byte, given the bytes before it."""

    nats: tuple[float, ...]

    @property
    def nats_per_byte(self) -> float:
        return sum(self.nats) / len(self.nats)

    @property
    def bits_per_byte(self) -> float:
        return self.nats_per_byte / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_byte)


@torch.no_grad()
def score_text(model: BlockModel, text: str | bytes) -> TextScore:
    """Predict every byte once. A text longer than the model's context is read in consecutive windows, as in evaluation,
    so the first bytes of a window are predicted from few bytes."""
    data = _bytes(text)
    if not data:
        raise ConfigError("an empty text has no score: give at least one byte")
    device, context = next(model.parameters()).device, model.spec.model.context
    whole = torch.frombuffer(bytearray(BEFORE_THE_TEXT + data), dtype=torch.uint8).long().to(device)
    nats: list[float] = []
    for start in range(0, len(data), context):
        window = whole[start : start + context + 1]
        logits = model.logits(window[None, :-1])[0].float()
        nats += F.cross_entropy(logits, window[1:], reduction="none").tolist()
    return TextScore(tuple(nats))


def generate(
    model: BlockModel,
    prompt: str | bytes = "",
    max_bytes: int = 200,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> str:
    """The continuation of the prompt. Bytes that are not UTF-8 become �."""
    if max_bytes < 1:
        raise ConfigError(f"max_bytes = {max_bytes} is too small: give 1 or more")
    generator = torch.Generator().manual_seed(seed)
    drawn = model.generate(_bytes(prompt), max_bytes, generator, temperature, top_p)
    return bytes(drawn).decode("utf-8", "replace")


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()
