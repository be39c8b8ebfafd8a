"""A drafter for the first stage: it agrees better with the whole model, changes no exact text, and goes when its blocks
change."""

from __future__ import annotations

import asyncio
import shutil

import pytest
import torch

from blocktrain.data.corpus import load_corpus
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.io.checkpoint import RunDirectory, copy_as
from blocktrain.model.block import block_shapes
from blocktrain.serve.decode.decoder import decode
from blocktrain.serve.decode.request import Mode, Request
from blocktrain.serve.segment.local import LocalForward
from blocktrain.serve.segment.segment import Segment
from blocktrain.spec import Denoise
from blocktrain.train.distil import agreement, distil

PROMPT = b"99 bottles of "
LAST = 1  # of the first stage's blocks


@pytest.fixture(scope="module")
def distilled(trained_run, tmp_path_factory):
    """(run with a drafter, what was found)"""
    path = tmp_path_factory.mktemp("distilled") / "run"
    shutil.copytree(trained_run, path)
    run = RunDirectory.open(path)
    return run, distil(run, load_corpus(run.spec.corpus, run.spec.model.context), LAST, steps=20)


def written(run, mode, with_drafter=True, **settings):
    """(bytes, stats) of the run in two segments."""
    segments = [Segment.open(run.path, part, with_drafter=with_drafter) for part in ([0, 1], [2, 3])]

    async def collect():
        return [step async for step in decode(LocalForward(*segments), Request(PROMPT, 60, mode, seed=3, **settings))]

    steps = asyncio.run(collect())
    return bytes(token.value for step in steps for token in step.written), steps[-1].stats


def test_a_drafter_agrees_better_with_the_whole_model(distilled):
    _, found = distilled
    assert found.before < found.after <= 1


@pytest.mark.parametrize("mode", [Mode.AUTOREGRESSIVE, Mode.SPECULATIVE])
def test_a_drafter_changes_no_exact_byte(distilled, mode):
    run, _ = distilled
    (drafted, stats), (plain, _) = (written(run, mode, with_drafter) for with_drafter in (True, False))
    assert drafted == plain
    assert stats.exact == 60


def test_a_drafter_takes_part_in_sweeps_of_any_kind(distilled):
    run, _ = distilled
    for candidates in (1, 3):
        assert len(written(run, Mode.SWEEP, candidates=candidates)[0]) == 60


def test_only_a_first_segment_that_ends_where_the_drafter_begins_loads_it(distilled):
    run, _ = distilled
    sizes = {tuple(part): Segment.open(run.path, part)._num_layers for part in ([0, 1], [0], [1], [0, 1, 2, 3])}
    assert sizes == {(0, 1): 3, (0,): 1, (1,): 1, (0, 1, 2, 3): 4}


def test_a_copy_in_another_precision_keeps_the_drafter(distilled, tmp_path):
    run, _ = distilled
    copy = copy_as(run, tmp_path / "copy", torch.float16, lambda block: block_shapes(run.spec, block))
    assert (
        copy.load_drafter(LAST, block_shapes(run.spec, LAST + 1)).keys()
        == run.load_drafter(LAST, block_shapes(run.spec, LAST + 1)).keys()
    )


def test_a_block_that_is_trained_again_takes_the_drafters_with_it(distilled, tmp_path):
    shutil.copytree(distilled[0].path, tmp_path / "run")
    run = RunDirectory.open(tmp_path / "run")
    run.save_block(3, {"x": torch.ones(2)}, steps=9)
    assert run.manifest().drafters == {}
    assert not [*run.path.glob("drafter-*")]


def test_a_damaged_drafter_is_named_with_the_remedy(distilled, tmp_path):
    shutil.copytree(distilled[0].path, tmp_path / "run")
    (file,) = (tmp_path / "run").glob("drafter-1-*")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"is damaged .*: run blocktrain distil .* again"):
        Segment.open(tmp_path / "run", [0, 1])


@pytest.mark.parametrize("last", [-1, 3])
def test_the_last_block_has_nothing_to_draft_for(distilled, last):
    with pytest.raises(ConfigError, match="must leave at least one to the others"):
        distil(distilled[0], None, last)


def test_a_denoising_model_is_refused(tmp_path, tiny):
    run = RunDirectory.create(tmp_path / "run", tiny(Denoise()), "0" * 64)
    with pytest.raises(ConfigError, match="distil a stacked model"):
        distil(run, None, 0)


def test_agreement_is_one_less_the_total_variation():
    ours, theirs = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.8, 0.2]]).log()
    assert agreement(ours, theirs) == pytest.approx(0.7)
