"""The experiment with small updates at its quick size, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "updates.py"
ROWS = "fp32,sparse,int8"


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> tuple[list[str], Path]:
    """The command and the folder it wrote to."""
    folder = tmp_path_factory.mktemp("updates")
    text = folder / "text.txt"
    text.write_bytes(b"".join(b"%d bottles of beer on the wall, %d bottles of beer. " % (n, n) for n in range(600)))
    options = ["--quick", "--rows", ROWS, "--max-windows", "4", "--corpus", str(text), "--out", str(folder)]
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *options]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return command, folder


def lines(folder):
    return {line["row"]: line for line in json.loads((folder / "updates.json").read_text())["summary"]}


def test_every_row_is_scored_beside_fp32_with_its_bytes(result):
    by_row = lines(result[1])
    assert list(by_row) == ROWS.split(",")
    assert by_row["fp32"]["lost"] == 0.0
    assert by_row["fp32"]["upload_ratio"] < 1 < by_row["int8"]["upload_ratio"] < by_row["sparse"]["upload_ratio"]
    assert by_row["sparse"]["upload_bytes_a_run"] == by_row["sparse"]["upload_bytes_a_round"] * 5


def test_a_download_is_four_times_smaller_than_fp32(result):
    assert lines(result[1])["sparse"]["download_ratio"] > 4


def test_results_name_the_corpus_and_not_its_place(result):
    document = (result[1] / "updates.json").read_text()
    assert '"source": "text.txt"' in document
    assert str(result[1]) not in document


def test_what_is_done_is_not_done_again(result):
    command, folder = result
    before = json.loads((folder / "updates.json").read_text())["results"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert output.startswith("0 rows to run")
    assert json.loads((folder / "updates.json").read_text())["results"] == before
