"""blocktrain presets: every preset with what it takes, computed from its shape."""

from __future__ import annotations

import json

import pytest

from blocktrain.cli.commands.training.presets import COLUMNS, RATES, cells, cost_of
from blocktrain.cli.options import before_its_text
from blocktrain.model.block import physical_parameters, table_parameters
from blocktrain.presets import PRESETS
from blocktrain.spec import preset
from blocktrain.train.flops import run_flops

MILLION = 1_000_000


def test_every_preset_is_listed_within_80_columns(run):
    result = run("presets")
    lines = result.stdout.splitlines()
    assert (result.exit_code, [line.split()[0] for line in lines]) == (0, ["preset", *PRESETS])
    assert max(map(len, lines)) < 80
    assert "computed from the shapes, not measured" in result.stderr


def test_the_json_document_has_the_figures_themselves(run):
    costs = json.loads(run("presets", "--json").stdout)
    assert [cost["name"] for cost in costs] == list(PRESETS)
    assert costs[-1]["flops"] == run_flops(preset("paper"))
    assert costs[-1]["hours"]["gaming"] == costs[-1]["flops"] / RATES["gaming"] / 3600


@pytest.mark.parametrize("size", [name for name in PRESETS if name[0].isdecimal()])
def test_a_preset_named_by_its_size_has_about_so_many_parameters_and_reads_20_tokens_for_each(size):
    cost = cost_of(size, PRESETS[size])
    parameters = int(size.removesuffix("M")) * MILLION
    assert 0.93 * parameters < cost.parameters < 1.07 * parameters
    assert 18 < cost.text_bytes / cost.parameters < 22
    assert cost.least_memory_bytes < cost.memory_bytes


@pytest.mark.parametrize("name", [name for name, spec in PRESETS.items() if spec.corpus.tokenizer])
def test_a_preset_with_a_tokenizer_has_at_most_a_third_of_its_parameters_in_tables(name):
    spec = before_its_text(PRESETS[name])
    assert table_parameters(spec) / physical_parameters(spec) < 0.34


def test_a_row_has_short_cells():
    assert cells(cost_of("small", preset("small")))[: COLUMNS.index("up")] == ["small", "328k", "2.5M", "70M", "4.3M"]
