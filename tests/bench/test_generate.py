"""Writing in one process at its quick size: ours, the export and GPT-2 of the same shape."""

from __future__ import annotations

import json

import pytest
import torch

from blocktrain.spec import preset


@pytest.fixture(scope="module")
def document(bench, tmp_path_factory):
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("generate")
    bench("generate").main(["--quick", "--out", str(out)])
    return json.loads((out / "generate.json").read_text())


def test_all_three_are_timed_in_one_run(bench, document):
    (shape,) = document["shapes"]
    assert shape["tokens"] == 8
    assert set(shape["tokens_per_cpu_second"]) == {"ours", "export", "gpt2"}
    assert min(shape["tokens_per_cpu_second"].values()) > 0
    assert "4 layers, width 32" in bench("generate").section(document)


def test_a_goal_is_reached_by_the_ratio_to_gpt2(bench, document):
    (shape,) = document["shapes"]
    slower = document | {"shapes": [shape | {"times_gpt2": {"ours": 1.9, "export": 1.1}}]}
    assert [verdict.reached for verdict in bench("generate").verdicts(slower)] == [False, True]


def test_gpt2_has_the_shape_of_ours(bench):
    pytest.importorskip("transformers")
    shape = preset("tiny").model
    theirs = bench("generate").gpt2(shape)
    assert (theirs.config.n_layer, theirs.config.n_embd, theirs.config.n_head) == (4, 32, 2)
    assert theirs(torch.zeros(1, 3, dtype=torch.long)).logits.shape == (1, 3, shape.vocabulary)
