"""Samples while training: the same few prompts, continued by the model of the moment, so that people see it learn. The
prompts come from held-out text. Short and bounded; the same weights write the same samples.
Next: swarm/worker/worker.py and cli/shared/training.py, which show them; model/stack.py, which computes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from blocktrain.data.shards import TokenShards
from blocktrain.data.tokenizer import ByteTokenizer, Tokenizer
from blocktrain.data.windows import Tokens
from blocktrain.model.stack import BlockModel, draw
from blocktrain.wire.messages import Sample

NUM_PROMPTS = 2
PROMPT_BYTES, SAMPLE_BYTES = 24, 52
BYTES_PER_TOKEN = 4  # roughly, if the model has a tokenizer
TEMPERATURE = 0.7
SEED = 7
BREAKS = b" \n"


def sample_prompts(held_out: Tokens, context: int) -> list[Sequence[int]]:
    """From equal distances of the text, beginning with a word where there are words."""
    if isinstance(held_out, TokenShards):
        length = max(1, min(PROMPT_BYTES // BYTES_PER_TOKEN, context // 2))
        starts = [(len(held_out) - length) * number // (NUM_PROMPTS + 1) for number in range(1, NUM_PROMPTS + 1)]
        return [_tokens_from_a_word(held_out, start, length) for start in starts]
    data, length = held_out.tobytes(), max(1, min(PROMPT_BYTES, context // 2))
    prompts: list[Sequence[int]] = []
    for number in range(1, NUM_PROMPTS + 1):
        start = len(data) * number // (NUM_PROMPTS + 1)
        word = next((at + 1 for at in range(start, start + length) if data[at : at + 1] in BREAKS), start)
        prompts.append(data[min(word, len(data) - length) :][:length])
    return prompts


def _tokens_from_a_word(held_out: TokenShards, start: int, length: int) -> list[int]:
    """The token of a word that follows a space begins with the space."""
    tokens: list[int] = held_out.take(np.arange(start, min(start + 2 * length, len(held_out)))).tolist()
    starts = [at for at in range(len(tokens) - length + 1) if held_out.tokenizer.decode([tokens[at]])[:1] == b" "]
    word = starts[0] if starts else 0
    return tokens[word : word + length]


@torch.no_grad()
def write_samples(
    model: BlockModel,
    prompts: Sequence[Sequence[int]],
    missing: Collection[int] = (),
    num_bytes: int = SAMPLE_BYTES,
    tokenizer: Tokenizer | None = None,
) -> tuple[Sample, ...]:
    """Continues all prompts, which have one length, token by token in one batch. `missing` blocks do not exist yet."""
    tokenizer = tokenizer or ByteTokenizer()
    device, context, path = next(model.parameters()).device, model.spec.model.context, model.paths[0]
    rows = torch.tensor([list(prompt) for prompt in prompts], device=device)
    generators = [torch.Generator().manual_seed(SEED + number) for number in range(len(prompts))]
    for _ in range(num_bytes if tokenizer.sha256 is None else num_bytes // BYTES_PER_TOKEN):
        readings = model.readings(rows[:, -context:], path, missing=missing)
        logits = model.combined(readings, path)[:, -1].float().cpu().nan_to_num()  # also of a model that diverged
        drawn = [draw(row, generator, TEMPERATURE, 1.0) for row, generator in zip(logits, generators, strict=True)]
        rows = torch.cat([rows, torch.tensor(drawn, device=device)[:, None]], dim=1)
    written = [tokenizer.decode(row.tolist()[len(prompts[0]) :]) for row in rows]
    return tuple(
        Sample(prompt=_text(tokenizer.decode(prompt)), text=_text(text))
        for prompt, text in zip(prompts, written, strict=True)
    )


def _text(data: bytes) -> str:
    """No byte 0, which not every database stores."""
    return data.decode("utf-8", "replace").replace("\x00", "�")
