"""eval on runs that are trained already."""

from __future__ import annotations

import json

import pytest

from blocktrain.io.checkpoint import RunDirectory


def test_every_reading_is_a_row_and_the_answer_is_marked(run, trained):
    blocks, _ = trained
    lines = run("eval", blocks).stdout.splitlines()
    assert lines[0].split() == ["run", "path", "reading", "nats/byte", "±", "s.e.", "bits/byte", "perplexity"]
    assert [line.split()[1:3] for line in lines[1:5]] == [["stack", "block"]] * 4
    assert [line.split()[2] for line in lines if line.endswith("answer")] == ["combined"]


def test_the_gap_is_taken_to_the_end_to_end_run(run, trained):
    document = json.loads(run("eval", *trained, "--json", "--max-windows", 4).stdout)
    blocks, reference = document["runs"]
    assert (document["split"], document["gap_to"]) == ("valid", str(trained[1]))
    assert reference["gap_nats_per_byte"] == 0
    difference = blocks["answer"]["nats_per_byte"] - reference["answer"]["nats_per_byte"]
    assert blocks["gap_nats_per_byte"] == pytest.approx(difference)


def test_the_test_split_is_another_text_than_the_valid_one(run, trained):
    valid, test = (json.loads(run("eval", trained[0], "--json", "--split", s).stdout) for s in ("valid", "test"))
    assert valid["runs"][0]["answer"] != test["runs"][0]["answer"]


def test_one_window_has_no_standard_error(run, trained):
    document = json.loads(run("eval", trained[1], "--json", "--max-windows", 1).stdout)
    assert document["runs"][0]["answer"]["standard_error"] is None


def test_blocks_can_be_left_out(run, trained):
    document = json.loads(run("eval", trained[0], "--json", "--missing", "1,2", "--max-windows", 2).stdout)
    readings = [score["reading"] for score in document["runs"][0]["scores"]]
    assert readings == ["block 0", "block 3", "last", "combined"]


def test_other_text_can_be_measured_when_asked_for(run, trained, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("quite another text, " * 200)
    own, others = (json.loads(run("eval", trained[1], "--json", *extra).stdout) for extra in ([], ["--corpus", other]))
    assert others["runs"][0]["answer"]["nats_per_byte"] > own["runs"][0]["answer"]["nats_per_byte"]


def test_text_that_changed_since_training_is_refused(run, tiny, text, tmp_path):
    assert run("train", *tiny).exit_code == 0
    text.write_text(text.read_text() + "more")
    result = run("eval", tmp_path / "run")
    assert result.exit_code == 2
    assert f'was trained on other text than corpus "{text}" holds now' in result.stderr


def test_a_run_with_untrained_blocks_is_measured_as_far_as_it_is_and_marked(run, tiny, tmp_path):
    assert run("train", *tiny, "--block", 0).exit_code == 0
    result = run("eval", tmp_path / "run")
    assert (result.exit_code, sorted(RunDirectory.open(tmp_path / "run").manifest().blocks)) == (0, [0, 1])
    assert "is unfinished: phase 1 of 3, step 3 of 3; blocks 0 to 1 of 4 answer" in result.stderr
    assert f"{tmp_path / 'run'} (unfinished)" in result.stdout
    assert run("eval", tmp_path / "run", "--missing", "2,3").exit_code == 0
    (record,) = json.loads(run("eval", tmp_path / "run", "--json").stdout)["runs"]
    assert record["half_trained"].startswith("phase 1 of 3")


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--split", "dev"], 'no split "dev"'),
        (["--missing", "a"], "--missing a is not a list of blocks"),
        (["--missing", "4"], "--missing 4: "),
        (["--missing", "0,1,2,3"], "--missing names all 4 blocks"),
        (["--max-windows", "0"], "--max-windows 0 is too small"),
    ],
)
def test_options_that_make_no_sense_are_named(run, trained, options, complaint):
    result = run("eval", trained[0], *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert complaint in result.stderr
