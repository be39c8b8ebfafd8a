"""A run whose training has not ended, looked at."""

from __future__ import annotations

import pytest

from blocktrain.data.corpus import load_corpus
from blocktrain.errors import CheckpointError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.spec import Denoise, EndToEnd, Stacked
from blocktrain.train.evaluate import answer, evaluate
from blocktrain.train.run import train_run
from blocktrain.train.unfinished import trained_so_far


@pytest.fixture
def stopped(tiny, tmp_path):
    """A run that was stopped after so many steps in all."""

    def build(objective, num_steps, **changes):
        spec, left = tiny(objective, **changes), iter(range(num_steps))
        corpus = load_corpus(spec.corpus, spec.model.context)
        run = RunDirectory.create(tmp_path / "run", spec, corpus.sha256)
        assert not train_run(run, corpus, stop=lambda: next(left, None) is None)
        return run, corpus

    return build


@pytest.mark.parametrize(
    "num_steps, blocks, where",
    [
        (3, 2, "phase 1 of 3, step 3 of 5; blocks 0 to 1 of 4 answer"),
        (7, 3, "phase 2 of 3, step 2 of 5; blocks 0 to 2 of 4 answer"),
        (12, 4, "phase 3 of 3, step 2 of 5"),
    ],
)
def test_a_stack_is_as_deep_as_it_has_been_trained(stopped, num_steps, blocks, where):
    run, corpus = stopped(Stacked(later_share=1.0), num_steps)
    found = trained_so_far(run)
    assert (found.spec.model.blocks, found.where) == (blocks, where)
    assert answer(evaluate(found.model(), corpus.valid, max_windows=4)).nats_per_byte < 5.545


@pytest.mark.parametrize(
    "objective", [Denoise(), EndToEnd(), Stacked(schedule="simultaneous", scaffold=0), Stacked(schedule="whole")]
)
def test_every_objective_can_be_looked_at(stopped, objective):
    run, corpus = stopped(objective, 3)
    found = trained_so_far(run)
    assert found.spec.model.blocks == 4
    assert answer(evaluate(found.model(), corpus.valid, max_windows=4)).nats_per_byte < 5.545


@pytest.mark.parametrize(
    "steps, where", [(5, "exported before its first phase ended; block"), (0, "no step is saved yet")]
)
def test_a_model_exported_in_its_first_phase_is_no_run_without_a_step(stopped, tmp_path, steps, where):
    run, corpus = stopped(Stacked(later_share=1.0), 3)
    model = RunDirectory.create(tmp_path / "model", run.spec, corpus.sha256)
    for block, tensors in trained_so_far(run).tensors.items():
        model.save_block(block, tensors, steps)
    assert trained_so_far(model).where.startswith(where)


def test_a_run_without_a_saved_step_is_refused_with_the_reason(tiny, tmp_path):
    run = RunDirectory.create(tmp_path / "run", tiny(Stacked()), "c0")
    with pytest.raises(CheckpointError, match="holds no step of its training yet: progress is saved every 20 s"):
        trained_so_far(run)
