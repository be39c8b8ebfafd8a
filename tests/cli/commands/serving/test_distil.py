"""blocktrain distil."""

from __future__ import annotations

import shutil

import pytest

from blocktrain.io.checkpoint import RunDirectory


def test_a_drafter_is_put_into_the_run_directory(run, trained_run, tmp_path):
    shutil.copytree(trained_run, tmp_path / "run")
    result = run("distil", tmp_path / "run", "--stages", 2, "--steps", 2)
    assert result.exit_code == 0
    assert "The drafter behind block 1 agrees with the whole model on" in result.stderr
    assert [*RunDirectory.open(tmp_path / "run").manifest().drafters] == [1]


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--stages", 1], "must leave at least one to the others"),
        (["--stages", 9], "--stages 9 does not fit a model of 4 blocks"),
        (["--steps", 0], "--steps"),
    ],
)
def test_what_cannot_be_distilled_is_refused_with_the_reason(run, trained_run, options, complaint):
    result = run("distil", trained_run, *options)
    assert result.exit_code == 2
    assert complaint in result.stderr
