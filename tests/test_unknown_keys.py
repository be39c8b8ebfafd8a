"""Settings that do not exist get the name of the one that does."""

from __future__ import annotations

import re

import pytest

from blocktrain.errors import ConfigError
from blocktrain.spec import known_keys, preset
from blocktrain.unknown_keys import NOT_HERE, OTHER_NAMES, advice


@pytest.mark.parametrize(
    "key, answer",
    [
        ("train.lr", "here it is optim.muon_lr (for the layers' matrices) and optim.adam_lr (for everything else)"),
        ("train.batch_size", "here it is train.windows (windows per step)"),
        ("batch_size", "here it is train.windows (windows per step)"),
        ("model.n_layer", "here it is model.layers (in total, of all blocks)"),
        ("model.d_model", "here it is model.width"),
        ("epochs", "here it is train.steps (steps instead of epochs)"),
        ("optim.weight_decay", "there is no weight decay: remove it"),
        ("blocks", "did you mean model.blocks?"),
        ("swarm.round_step", "did you mean swarm.round_steps?"),
    ],
)
def test_a_name_known_from_elsewhere_gets_ours(key, answer):
    with pytest.raises(ConfigError, match=re.escape(f"unknown key {key}: {answer}")):
        preset("tiny").with_(**{key: 1})


def test_every_name_that_is_advised_exists():
    for text in OTHER_NAMES.values():
        named = re.findall(r"\b[a-z]+\.[a-z_]+\b|^seed$", text)
        assert named, text
        assert set(named) <= known_keys()


def test_no_name_from_elsewhere_hides_one_of_ours():
    ours = {key.split(".")[-1] for key in known_keys()}
    assert not ours & {*OTHER_NAMES, *NOT_HERE}


def test_a_key_of_several_tables_is_named_with_all_of_them():
    assert advice(["kind"], ["a.kind", "b.kind", "c.name"]) == "did you mean a.kind or b.kind?"
