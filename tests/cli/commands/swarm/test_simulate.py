"""blocktrain simulate: a plan as tables, as JSON and as a page; bad input is refused in one sentence."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from blocktrain.cli.main import app
from blocktrain.sim import plan_report

SMALL = ["simulate", "--preset", "tiny", "--workers", "10", "--churn", "0.5", "--liars", "0.1", "--rounds", "2"]


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(plan_report, "SWEEP_WORKERS", 5)
    monkeypatch.setattr(plan_report, "SWEEP_ROUNDS", 1)


def test_a_plan_is_printed_as_tables_of_at_most_80_columns():
    found = CliRunner().invoke(app, [*SMALL, "--price-hour", "0.5"])
    assert found.exit_code == 0, found.output
    assert max(map(len, found.stdout.splitlines())) <= 80
    for text in ("rounds per hour", "goodput", "each node costs        0.5 per hour", "deadline_ceiling_s = 3600"):
        assert text in found.stdout


def test_a_plan_is_printed_as_json_and_drawn_on_a_page(tmp_path):
    found = CliRunner().invoke(app, [*SMALL, "--json", "--plot", str(tmp_path / "plan.html")])
    document = json.loads(found.stdout)
    assert document["plan"]["conditions"]["workers"] == 10
    assert [row["churn"] for row in document["by_churn"]] == [0.0, 0.25, 0.5, 1.0, 2.0]
    assert 0 < document["plan"]["goodput"] <= 1
    assert "Goodput and failures" in (tmp_path / "plan.html").read_text()


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--workers", "0"], "workers = 0 is out of range: give 1 to 100000"),
        (["--liars", "1.5"], "liars = 1.5 is out of range: give 0 to 0.99"),
        (["--steps-per-s", "nan"], "steps_per_s = nan is out of range: give a number above 0"),
        (["--price-gb", "-1"], "--price-gb -1 is not a price: give 0 or more"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(arguments, sentence):
    found = CliRunner().invoke(app, [*SMALL, *arguments])
    assert found.exit_code == 2
    assert f"error: {sentence}" in found.output.replace("\n", " ")
