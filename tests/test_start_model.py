"""The model that a run starts from: what does not fit is named, with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from blocktrain.errors import ConfigError
from blocktrain.spec import Denoise, EndToEnd, RunSpec, preset
from blocktrain.start_model import StartModel, require_start

OWN = preset("tiny")
TOKENS = {"corpus.tokenizer": "bpe:512", "corpus.tokenizer_sha256": "a" * 64, "model.vocabulary": 512}


def start(spec: RunSpec = OWN) -> StartModel:
    return StartModel(Path("model"), spec, "f" * 64)


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"model.width": 64}, "has model.width = 32 and this run has 64: give the model's value"),
        ({"model.heads": 4}, "has model.heads = 2 and this run has 4"),
        ({"model.blocks": 2}, "has model.blocks = 4 and this run has 2"),
        ({"model.layers": 8}, r"has model.layers = \[1, 1, 1, 1\] and this run has \[2, 2, 2, 2\]"),
        ({"model.table_rank": 8}, "has model.table_rank = None and this run has 8"),
        ({"objective": Denoise()}, "was trained as stacked and this run trains denoise, whose blocks differ"),
        (TOKENS, "reads bytes and this text is read as bpe:512: leave corpus.tokenizer out"),
    ],
)
def test_what_does_not_fit_the_model_is_named(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        start().fitted(OWN.with_(**changes))


@pytest.mark.parametrize(
    "changes",
    [{"model.context": 128}, {"model.layers": [1, 1, 1, 1]}, {"seed": 7}, {"objective": EndToEnd()}, {"name": "other"}],
)
def test_what_no_weight_depends_on_may_differ(changes):
    spec = OWN.with_(**changes)
    assert start().fitted(spec) == spec


def test_the_codes_of_denoise_follow_from_the_seed():
    model = start(OWN.with_(objective=Denoise(), seed=3))
    with pytest.raises(ConfigError, match="give --seed 3"):
        model.fitted(OWN.with_(objective=Denoise()))


def test_the_text_is_read_with_the_model_s_tokenizer_and_no_path_is_kept():
    model = start(OWN.with_(**TOKENS))
    begun = model.begin(OWN)
    assert (begun.corpus.tokenizer, begun.corpus.tokenizer_sha256) == ("model/tokenizer.json", "a" * 64)
    assert model.fitted(begun.with_(**{"model.vocabulary": 512})).corpus.tokenizer == "bpe:512"


def test_a_tokenizer_with_the_same_name_and_other_tokens_is_refused():
    other = OWN.with_(**{**TOKENS, "corpus.tokenizer_sha256": "b" * 64})
    with pytest.raises(ConfigError, match=r"bpe:512 \(aaaaaaaaaaaa… and bbbbbbbbbbbb…\): prepare the text with --tok"):
        start(OWN.with_(**TOKENS)).fitted(other)


def test_a_model_on_tokens_does_not_read_bytes():
    with pytest.raises(ConfigError, match=r"reads bpe:512 and this text is read as bytes: leave corpus.tokenizer out"):
        start(OWN.with_(**TOKENS)).begin(OWN.with_(**{"corpus.tokenizer": "bytes"}))


def test_frozen_blocks_need_a_model():
    spec = OWN.with_(**{"train.freeze": [0, 1]})
    require_start(spec, start())
    with pytest.raises(ConfigError, match=r"train.freeze = \[0, 1\] keeps .* give that model with --from"):
        require_start(spec, None)


def test_a_model_is_not_trained_in_its_own_directory():
    with pytest.raises(ConfigError, match="--from and --out are both model: name another --out"):
        start().require_elsewhere(Path("model"))
