"""Going on from a model: its blocks, all or none, become the start of another run and stay as they are."""

from __future__ import annotations

import os

import pytest
import torch

from blocktrain.data.corpus import load_corpus
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.io.checkpoint import RunDirectory, copy_as
from blocktrain.model.block import block_shapes
from blocktrain.spec import Denoise, EndToEnd, RunSpec, Stacked
from blocktrain.train.run import load_model, train_run
from blocktrain.train.start import begin_from, open_start

SIMULTANEOUS = Stacked(schedule="simultaneous", scaffold=0, lookahead=1, refresh_steps=3)


def started(path, spec: RunSpec, model, **options) -> RunDirectory:
    """A run that starts from a model, trained."""
    start = open_start(model)
    spec = start.fitted(start.begin(spec))
    corpus = load_corpus(spec.corpus, spec.model.context)
    run = RunDirectory.create(path, spec, corpus.sha256)
    begin_from(run, start)
    train_run(run, corpus, **options)
    return run


def block(run: RunDirectory, index: int) -> torch.Tensor:
    tensors = run.load_block(index, block_shapes(run.spec, index))
    return torch.cat([tensors[name].flatten().float() for name in sorted(tensors)])


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_starts_where_the_model_ended(tmp_path, trained_run, steps):
    model = RunDirectory.open(trained_run)
    spec = model.spec.with_(**{"train.steps": steps, "optim.muon_lr": 1e-9, "optim.adam_lr": 1e-9})
    run = started(tmp_path / "run", spec, trained_run)
    for index in range(4):
        assert torch.allclose(block(run, index), block(model, index), atol=1e-6)


def test_the_model_stays_as_it_is_and_the_run_names_it_by_hash_alone(tmp_path, trained_run):
    before = {path.name: path.read_bytes() for path in trained_run.iterdir() if path.is_file()}
    run = started(tmp_path / "run", RunDirectory.open(trained_run).spec.with_(**{"train.steps": 2}), trained_run)
    assert {path.name: path.read_bytes() for path in trained_run.iterdir() if path.is_file()} == before
    assert run.spec.train.start_sha256 == open_start(trained_run).sha256
    assert str(trained_run) not in (run.path / "spec.toml").read_text()


def test_other_windows_are_read_than_the_model_has_seen(tmp_path, trained_run):
    model = RunDirectory.open(trained_run).spec
    assert model.draw_seed == model.seed
    assert open_start(trained_run).begin(model).draw_seed != model.seed


@pytest.mark.parametrize(
    "objective, frozen, phases",
    [
        (Stacked(), (0,), [((1, 2), (0,)), ((2, 3), (0, 1))]),
        (Stacked(), (0, 1, 2), [((3,), (0, 1, 2))]),
        (Stacked(schedule="whole"), (0, 1), [((2, 3), (0, 1))]),
        (EndToEnd(), (0, 1), [((2, 3), (0, 1))]),
        (SIMULTANEOUS, (0, 1, 2), [((3,), (0, 1, 2))]),
    ],
)
def test_frozen_blocks_keep_their_weights_and_the_others_learn(tmp_path, trained_run, objective, frozen, phases):
    model = RunDirectory.open(trained_run)
    spec = model.spec.with_(objective=objective, **{"train.steps": 2, "train.freeze": list(frozen)})
    assert [(phase.blocks, phase.below) for phase in spec.phases] == phases
    run = started(tmp_path / "run", spec, trained_run)
    unchanged = [index for index in range(4) if torch.equal(block(run, index), block(model, index))]
    assert unchanged == list(frozen)


def test_any_block_of_denoise_can_be_frozen(tmp_path, tiny):
    spec = tiny(Denoise())
    corpus = load_corpus(spec.corpus, spec.model.context)
    model = RunDirectory.create(tmp_path / "model", spec, corpus.sha256)
    train_run(model, corpus)
    run = started(tmp_path / "run", spec.with_(**{"train.freeze": [1, 3]}), model.path)
    assert [torch.equal(block(run, index), block(model, index)) for index in range(4)] == [False, True, False, True]


def test_a_run_stopped_on_the_way_ends_with_the_weights_of_one_that_was_not(tmp_path, trained_run):
    spec = RunDirectory.open(trained_run).spec.with_(**{"train.steps": 4, "train.freeze": [0]})
    straight = started(tmp_path / "straight", spec, trained_run)
    for _ in range(8):
        left = iter((False, False, True))
        resumed = started(tmp_path / "resumed", spec, trained_run, stop=lambda left=left: next(left))
        if len(resumed.manifest().finished) == len(resumed.spec.phases):
            break
    assert resumed.manifest() == straight.manifest()


@pytest.mark.parametrize("writes", range(5))  # four blocks, then the manifest
def test_a_kill_while_the_blocks_are_copied_leaves_none_or_all(tmp_path, trained_run, monkeypatch, writes):
    start = open_start(trained_run)
    run = RunDirectory.create(tmp_path / "run", start.begin(start.spec), "0" * 64)
    replace, left = os.replace, iter([True] * writes)

    def killed(*paths, **options):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return replace(*paths, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            begin_from(run, start)
    assert run.manifest().blocks == {}
    begin_from(run, start)
    assert all(torch.equal(block(run, k), block(RunDirectory.open(trained_run), k)) for k in range(4))


def test_an_export_in_half_precision_is_trained_in_full(tmp_path, trained_run):
    model = RunDirectory.open(trained_run)
    copy_as(model, tmp_path / "half", torch.bfloat16, lambda index: block_shapes(model.spec, index))
    run = started(tmp_path / "run", model.spec.with_(**{"train.steps": 1}), tmp_path / "half")
    assert {parameter.dtype for parameter in load_model(run).parameters()} == {torch.float32}


def test_a_model_whose_blocks_are_not_all_there_is_refused(tmp_path, tiny):
    RunDirectory.create(tmp_path / "model", tiny(Stacked()), "0" * 64)
    with pytest.raises(CheckpointError, match="has no trained block 0, 1, 2, 3 yet: train it to its end"):
        open_start(tmp_path / "model")


def test_a_run_that_lost_its_start_is_not_trained_from_noise(tmp_path, trained_run):
    spec = open_start(trained_run).begin(RunDirectory.open(trained_run).spec)
    corpus = load_corpus(spec.corpus, spec.model.context)
    run = RunDirectory.create(tmp_path / "run", spec, corpus.sha256)
    with pytest.raises(ConfigError, match=r"starts from a model \(sha256 .*give its directory with --from"):
        train_run(run, corpus)
