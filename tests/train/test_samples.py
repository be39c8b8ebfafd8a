"""The same prompts, continued while a model is trained."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from blocktrain.data.prepare import Plan, prepare
from blocktrain.model.stack import BlockModel
from blocktrain.spec import Denoise, Stacked, preset
from blocktrain.train.samples import NUM_PROMPTS, PROMPT_BYTES, SAMPLE_BYTES, sample_prompts, write_samples

TEXT = np.frombuffer(b"the quick brown fox jumps over a lazy dog\n" * 40, dtype=np.uint8)


def test_prompts_begin_with_words_and_are_always_the_same():
    prompts = sample_prompts(TEXT, context=64)
    assert prompts == sample_prompts(TEXT, context=64)
    assert [len(prompt) for prompt in prompts] == [PROMPT_BYTES] * NUM_PROMPTS
    assert all(b" " + prompt[:4] in b" " + TEXT.tobytes().replace(b"\n", b" ") for prompt in prompts)


def test_prompts_of_tokens_begin_with_words_too(tmp_path):
    rows = [
        json.dumps({"text": f"the {n} people of the country number {n} were of one mind. " * 3}) for n in range(200)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    shards = prepare(Plan((str(tmp_path / "rows.jsonl"),), "bpe:300", 0.2, 0.2), tmp_path / "corpus").split("valid")
    prompts = [shards.tokenizer.decode(prompt) for prompt in sample_prompts(shards, context=64)]
    assert len(prompts) == NUM_PROMPTS
    assert all(prompt.startswith(b" ") for prompt in prompts)


@pytest.mark.parametrize("data, context", [(b"x" * 400, 64), (b"abcdefghi", 8), (b"ab", 1)])
def test_a_text_without_words_or_a_short_one_has_prompts_too(data, context):
    prompts = sample_prompts(np.frombuffer(data, dtype=np.uint8), context)
    assert {len(prompt) for prompt in prompts} == {max(1, min(PROMPT_BYTES, context // 2))}


@pytest.mark.parametrize("objective", [Stacked(), Denoise()])
def test_the_same_weights_write_the_same_bounded_samples(objective):
    model, prompts = BlockModel(preset("tiny").with_(objective=objective)).eval(), sample_prompts(TEXT, 64)
    samples = write_samples(model, prompts)
    assert samples == write_samples(model, prompts)
    assert [sample.prompt.encode() for sample in samples] == prompts
    assert all(0 < len(sample.text) <= SAMPLE_BYTES for sample in samples)


def test_blocks_that_do_not_exist_yet_are_not_asked():
    model = BlockModel(preset("tiny")).eval()
    before = write_samples(model, sample_prompts(TEXT, 64), missing={2, 3})
    for block in model.blocks[2:]:
        block.readout.data += torch.randn(block.readout.shape)
    assert write_samples(model, sample_prompts(TEXT, 64), missing={2, 3}) == before


def test_a_model_that_diverged_still_writes_something():
    model = BlockModel(preset("tiny")).eval()
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    assert len(write_samples(model, sample_prompts(TEXT, 64), num_bytes=3)) == NUM_PROMPTS
