"""The experiment on depth, at a tiny shape: its rows do equal work, and its file makes its part of the page."""

import json

import pytest
import torch

from blocktrain.data.corpus import load_corpus
from blocktrain.spec import preset
from blocktrain.train.flops import run_flops
from blocktrain.train.streamed import streamed_run_flops


@pytest.fixture(scope="module")
def depth(bench):
    return bench("depth")


@pytest.fixture(scope="module")
def report(bench):
    return bench("training.depth_report")


@pytest.fixture(scope="module")
def document(depth, small_text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("depth")
    rows = "end-to-end,whole-bare,one-block,whole-bare-x4,one-block-x4,two-blocks-x4"
    rows += ",end-to-end-in16,whole-bare-in16,one-block-in16"
    depth.main(
        ["--quick", "--corpus", str(small_text), "--rows", rows, "--out", str(folder), "--work", str(folder / "runs")]
    )
    return json.loads((folder / "depth.json").read_text())


def test_every_row_does_the_work_of_its_budget(depth):
    base = preset("small").with_(**{"model.layers": 8})
    rows = {row.name: row.make(base, 800) for row in depth.rows_of(800)}
    work = run_flops(rows["end-to-end-800"])
    for name, spec in rows.items():
        assert (streamed_run_flops if "whole" in name else run_flops)(spec) == pytest.approx(work, rel=0.01), name


def test_the_section_tells_every_row_and_the_memory_of_a_streamed_worker(depth, document):
    text = depth.section(document)
    assert "whole model, one block in memory | 3 |" in text
    assert "whole, one block in memory | 2 |" in text


def test_workers_that_average_are_compared_with_the_best_model_that_fits_one_of_them(depth, report, document):
    lines = {line["kind"]: line for line in report._swarm_lines(document)}
    best = min(lines["one-block-x4"]["valid"], lines["two-blocks-x4"]["valid"])
    assert lines["whole-bare-x4"]["against"] == pytest.approx(lines["whole-bare-x4"]["valid"] - best)
    assert "against the best that fits" in depth.section(document)


def test_a_model_in_sixteen_blocks_is_compared_with_its_own_reference_and_one_of_its_layers(depth, report, document):
    (line,) = report._cut_lines(document)
    assert line["blocks"] == 16
    assert line["valid_gap"] == pytest.approx(line["valid"] - line["end-to-end"]["valid"])
    specs = [record["spec"]["model"] for name, record in document["results"].items() if "one-block-in16" in name]
    assert [spec["layers"] for spec in specs] == [1]
    assert "| 16 | 3 |" in depth.section(document)


def test_averaged_workers_that_were_stopped_go_on_to_the_same_weights(bench, small_text, tmp_path, monkeypatch):
    rows = bench("training.rows")
    spec = preset("tiny").with_(**{"corpus.source": str(small_text), "train.steps": 4})
    corpus = load_corpus(spec.corpus, spec.model.context)
    monkeypatch.setattr(rows, "AVERAGE_EVERY_STEPS", 1)
    whole = rows.train_replicas(spec, corpus, 2, tmp_path / "whole.pt")
    monkeypatch.setattr(rows, "SAVE_EVERY_S", -1.0)
    keep, kept = rows._keep, []

    def keep_and_stop(progress, path):
        keep(progress, path)
        kept.append(progress["phase"])
        if len(kept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(rows, "_keep", keep_and_stop)
    with pytest.raises(KeyboardInterrupt):
        rows.train_replicas(spec, corpus, 2, tmp_path / "stopped.pt")
    again = rows.train_replicas(spec, corpus, 2, tmp_path / "stopped.pt")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


def test_what_is_recovered_is_one_at_the_loss_of_end_to_end_training(report):
    lines = {
        "one-block": {"valid": 1.3},
        "two-blocks": {"valid": 1.25},
        "end-to-end": {"valid": 1.2},
        "whole": {"valid": 1.2},
        "at-once": {"valid": 1.3},
        "default": {"valid": 1.25},
    }
    assert [report._recovered(lines, kind) for kind in ("whole", "at-once", "default")] == [1.0, 0.0, 0.0]


def test_nothing_is_recovered_where_a_model_that_fits_is_better_than_end_to_end(report):
    lines = {"one-block": {"valid": 1.15}, "end-to-end": {"valid": 1.2}, "whole": {"valid": 1.3}}
    assert report._recovered(lines, "whole") is None


@pytest.mark.parametrize("source, goals", [("wikitext-2", 1), ("novels", 0)])
def test_the_goal_of_an_hour_is_for_wikitext_alone(report, document, source, goals):
    results = {
        name: {**record, "spec": {**record["spec"], "corpus": {**record["spec"]["corpus"], "source": source}}}
        for name, record in document["results"].items()
    }
    assert len(report._hour({**document, "results": results})) == goals


def test_the_figure_has_one_line_per_way_of_training(depth, document):
    assert len(depth.figures(document)["depth"].data) == 3
