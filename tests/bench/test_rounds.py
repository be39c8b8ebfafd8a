"""What one round costs, at its quick size."""

import json

import pytest


@pytest.fixture(scope="module")
def document(bench, tmp_path_factory):
    out = tmp_path_factory.mktemp("rounds")
    bench("rounds").main(["--quick", "--codecs", "int8", "--out", str(out)])
    return json.loads((out / "rounds.json").read_text())


def test_a_round_of_small_updates_takes_three_requests_of_every_worker(document):
    (row,) = document["rows"].values()
    assert row["requests"] <= 2 * 3  # a lease, one download, and the update with its notice
    assert row["hashed"] > row["update_bytes"]


def test_a_round_writes_to_the_ledger_at_least_once_per_update_and_once_per_merge(document):
    (row,) = document["rows"].values()
    assert 2 + 1 <= row["commits"] <= row["transactions"] <= row["statements"]
    assert row["syncs"] >= 2  # each update is safe before it is acknowledged


def test_the_table_has_a_line_per_row(bench, document):
    assert bench("rounds").table(document).count("\n") == 2 + len(document["rows"])
