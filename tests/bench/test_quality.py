"""The quality experiment at its quick size, and what the page makes of its results."""

from __future__ import annotations

import json
from functools import partial

import pytest

ROWS = "reference,scaffold,one-block-swarm"


@pytest.fixture(scope="module")
def options(tmp_path_factory, small_text):
    folder = tmp_path_factory.mktemp("quality")
    size = ["--quick", "--steps", "3", "--rows", ROWS, "--seeds", "0", "--max-windows", "4"]
    return [*size, "--corpus", str(small_text), "--out", str(folder), "--work", str(folder / "work")], folder


@pytest.fixture(scope="module")
def quality(bench):
    return bench("quality")


@pytest.fixture(scope="module")
def document(quality, options):
    arguments, folder = options
    quality.main(arguments)
    assert (folder / "quality.html").is_file()
    return json.loads((folder / "quality.json").read_text())


def test_every_row_is_scored_on_valid_and_test_beside_the_reference(document):
    lines = document["summary"]
    assert [line["row"] for line in lines] == ROWS.split(",")
    assert all(line["valid"] > 0 and line["test"] > 0 for line in lines)
    assert lines[0]["test_gap"] == 0.0


def test_the_default_does_the_reference_s_work_with_its_parameters(document):
    reference, scaffold, *_ = document["summary"]
    assert scaffold["parameters"] == reference["parameters"]
    assert scaffold["flops"] == pytest.approx(reference["flops"], rel=0.4)  # three steps leave much to rounding
    assert document["results"]["scaffold/0"]["missing"].keys() == {"0", "1", "2", "3"}


def test_results_name_the_corpus_and_not_its_place(document, small_text):
    assert document["results"]["scaffold/0"]["spec"]["corpus"]["source"] == "text.txt"
    assert str(small_text.parent) not in json.dumps(document)


def test_what_is_done_is_not_done_again(quality, document, options, capsys):
    arguments, folder = options
    quality.main(arguments)
    assert capsys.readouterr().out.startswith("0 rows to run")
    assert json.loads((folder / "quality.json").read_text())["results"] == document["results"]


def test_rows_may_be_trained_at_once_in_processes_of_their_own(bench):
    tasks = [partial(dict, row=name) for name in "ab"]
    assert sorted(record["row"] for record in bench("training.rows")._results(tasks, jobs=2)) == ["a", "b"]


def record(row: str, seed: int, loss: float, source: str = "wikitext-2") -> dict[str, object]:
    scores = {split: [{"path": "stack", "nats_per_byte": loss}] for split in ("valid", "test")}
    kept = {"parameters": 1, "train_bytes": 1, "flops": 1, "blocks_at_a_worker": 1, "replicas": 1}
    model = {"layers": 8, "width": 128, "context": 256, "blocks": 4}
    spec = {"corpus": {"source": source}, "model": model, "train": {"windows": 32}}
    return {"row": row, "seed": seed, "scores": scores, "spec": spec, **kept}


def made_of(*records):
    return {"reference_steps": 400, "results": {f"{each['row']}/{each['seed']}": each for each in records}}


def test_gaps_are_those_to_the_reference_of_the_same_seed(quality):
    runs = [("reference", 0, 1.3), ("reference", 1, 1.5), ("scaffold", 1, 1.4), ("scaffold", 2, 1.2)]
    line = quality.summarise(quality.ROWS, made_of(*(record(*run) for run in runs))["results"])[1]
    assert line["test_gap"] == pytest.approx(-0.1)
    assert line["test"] == pytest.approx(1.3)


@pytest.mark.parametrize("loss, reached", [(1.36, [False, False, False]), (1.33, [False, False, True])])
def test_the_default_is_held_against_the_reference_and_the_paper(quality, loss, reached):
    document = made_of(record("reference", 0, 1.32), record("scaffold", 0, loss))
    assert [verdict.reached for verdict in quality.verdicts(document)] == reached
    assert "+0.04 (1.359 against 1.32)" in quality.section(document)


def test_on_another_corpus_the_paper_has_no_figure(quality):
    document = made_of(record("reference", 0, 1.3, "sotu"), record("scaffold", 0, 1.2, "sotu"))
    assert [(verdict.reached, verdict.paper) for verdict in quality.verdicts(document)] == [(True, "–")] * 2
    assert quality.section(document).startswith("## Quality on sotu, ")


def test_a_gap_without_its_reference_reaches_nothing(quality):
    assert not any(verdict.reached for verdict in quality.verdicts(made_of(record("scaffold", 0, 2.0))))
