"""Continuing prompts and scoring texts with a model."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from blocktrain.errors import ConfigError
from blocktrain.model.stack import BlockModel
from blocktrain.spec import preset
from blocktrain.text import generate, score_text


@pytest.fixture(scope="module")
def model() -> BlockModel:
    """A model that is not trained, with weights that are not zero."""
    made = BlockModel(preset("tiny")).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return made


def test_every_byte_is_scored_by_what_stands_before_it(model):
    whole = torch.tensor([list(b"\nhello")])
    logits = model.logits(whole[:, :-1])[0]
    by_hand = F.cross_entropy(logits, whole[0, 1:], reduction="none")
    assert score_text(model, "hello").nats == pytest.approx(by_hand.tolist())


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_a_text_of_any_length_is_scored_byte_for_byte(model, length):
    assert len(score_text(model, b"x" * length).nats) == length


def test_the_units_of_a_score_agree(model):
    score = score_text(model, "units")
    assert score.bits_per_byte == pytest.approx(score.nats_per_byte / math.log(2))
    assert score.perplexity == pytest.approx(2**score.bits_per_byte)


def test_a_continuation_is_the_model_s_own(model):
    drawn = model.generate(b"to be", 20, torch.Generator().manual_seed(3), 0.9, 0.8)
    text = bytes(drawn).decode("utf-8", "replace")
    assert generate(model, "to be", 20, seed=3, temperature=0.9, top_p=0.8) == text


@pytest.mark.parametrize("call", [lambda m: score_text(m, ""), lambda m: generate(m, "x", 0)])
def test_nothing_to_do_is_refused(model, call):
    with pytest.raises(ConfigError, match="give"):
        call(model)


@pytest.mark.parametrize(
    "settings, complaint",
    [
        ({"temperature": -0.1}, "temperature = -0.1 is out of range: give 0 or more"),
        ({"temperature": math.nan}, "temperature = nan is out of range"),
        ({"top_p": 0.0}, "top_p = 0.0 is out of range: give more than 0 and at most 1"),
        ({"top_p": 1.1}, "top_p = 1.1 is out of range"),
        ({"seed": -1}, "seed = -1 is out of range"),
    ],
)
def test_sampling_settings_are_checked(model, settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        generate(model, "x", 3, **settings)
