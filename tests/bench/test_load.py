"""Load at its quick size: a real coordinator, a few honest workers and a few bad clients."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads memory and files of Linux")


@pytest.fixture(scope="module")
def document(bench, tmp_path_factory):
    out = tmp_path_factory.mktemp("load")
    bench("load").main(["--quick", "--out", str(out)])
    return json.loads((out / "load.json").read_text())


def test_honest_clients_are_answered_without_errors_while_bad_ones_are_there(document):
    assert document["bad"]
    assert [x["first_errors"] for x in document["honest"].values()] == [{}, {}]
    assert document["honest"]["lease"]["done"] >= 4


def test_the_page_has_times_errors_and_goals(bench, document):
    page = bench("load").section(document)
    assert page.startswith("## Load\n\n")
    assert "| update |" in page
    assert bench("load").figures(document).keys() == {"load"}
