"""The experiment with small updates at its quick size."""

import json

import pytest

ROWS = "fp32,sparse,int8"


@pytest.fixture(scope="module")
def updates(bench):
    return bench("updates")


@pytest.fixture(scope="module")
def result(updates, tmp_path_factory, small_text):
    """Its arguments and the folder it wrote to."""
    folder = tmp_path_factory.mktemp("updates")
    options = ["--quick", "--rows", ROWS, "--max-windows", "4", "--corpus", str(small_text), "--out", str(folder)]
    updates.main(options)
    assert (folder / "updates.html").is_file()
    return options, folder


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


def test_results_name_the_corpus_and_not_its_place(result, small_text):
    document = (result[1] / "updates.json").read_text()
    assert '"source": "text.txt"' in document
    assert str(small_text.parent) not in document


def test_what_is_done_is_not_done_again(updates, result, capsys):
    options, folder = result
    before = json.loads((folder / "updates.json").read_text())["results"]
    updates.main(options)
    assert capsys.readouterr().out.startswith("0 rows to run")
    assert json.loads((folder / "updates.json").read_text())["results"] == before


def test_only_updates_that_lose_little_count_as_small(updates, result):
    document = json.loads((result[1] / "updates.json").read_text())
    document["results"]["sparse/0"]["valid"] = document["results"]["fp32/0"]["valid"] + 0.02
    document["results"]["int8/0"]["valid"] = document["results"]["fp32/0"]["valid"]
    up, down = updates.verdicts(document)
    assert up.ours.endswith("(int8 (default), +0.0000 nats/byte)")
    assert (up.reached, down.reached) == (False, True)
    assert f"- goal: {up.what} ≥ 100: not reached ({up.ours})" in updates.section(document)
