"""The quality experiment at its quick size, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "quality.py"
ROWS = "reference,scaffold,denoise-adaptive,one-block-swarm"


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> tuple[list[str], Path]:
    """The command and the folder it wrote to."""
    folder = tmp_path_factory.mktemp("quality")
    text = folder / "text.txt"
    text.write_bytes(b"".join(b"%d bottles of beer on the wall, %d bottles of beer. " % (n, n) for n in range(600)))
    options = ["--quick", "--steps", "6", "--rows", ROWS, "--seeds", "0", "--max-windows", "4", "--jobs", "2"]
    where = ["--corpus", str(text), "--out", str(folder), "--work", str(folder / "work")]
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *options, *where]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return command, folder


def test_every_row_is_scored_on_valid_and_test_beside_the_reference(result):
    lines = json.loads((result[1] / "quality.json").read_text())["summary"]
    assert [line["row"] for line in lines] == ROWS.split(",")
    assert all(line["valid"] > 0 and line["test"] > 0 for line in lines)
    assert lines[0]["test_gap"] == 0.0


def test_the_default_does_the_reference_s_work_with_its_parameters(result):
    reference, scaffold, *_ = json.loads((result[1] / "quality.json").read_text())["summary"]
    assert scaffold["parameters"] == reference["parameters"]
    assert scaffold["flops"] == pytest.approx(reference["flops"], rel=0.25)  # six steps leave much to rounding


def test_results_name_the_corpus_and_not_its_place(result):
    document = (result[1] / "quality.json").read_text()
    assert '"source": "text.txt"' in document
    assert str(result[1]) not in document


def test_what_is_done_is_not_done_again(result):
    command, folder = result
    before = json.loads((folder / "quality.json").read_text())["results"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.startswith("0 rows to run")
    assert json.loads((folder / "quality.json").read_text())["results"] == before
