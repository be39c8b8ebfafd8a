from pathlib import Path

import numpy as np
import pytest
import torch

from blocktrain.data.corpus import load_corpus
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.model.block import block_shapes
from blocktrain.spec import Denoise, EndToEnd, RunSpec, Stacked
from blocktrain.train.run import load_model, train_run

SIMULTANEOUS = Stacked(schedule="simultaneous", scaffold=0, lookahead=1, refresh_steps=3)
OBJECTIVES = {
    "progressive": Stacked(),
    "simultaneous": SIMULTANEOUS,
    "denoise": Denoise(),
    "end_to_end": EndToEnd(),
}


def trained(path: Path, spec: RunSpec, **options) -> RunDirectory:
    corpus = load_corpus(spec.corpus, spec.model.context)
    run = RunDirectory.create(path, spec, corpus.sha256)
    train_run(run, corpus, **options)
    return run


def weights(run: RunDirectory) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in load_model(run).parameters()])


class StopAfter:
    """Asks for a stop once so many steps have been reported."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def report(self, _) -> None:
        self.left -= 1

    def stop(self) -> bool:
        return self.left <= 0


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_a_run_stopped_again_and_again_ends_with_the_weights_of_one_that_was_not(tmp_path, tiny, objective):
    spec = tiny(objective)
    straight = trained(tmp_path / "straight", spec)
    for _ in range(40):
        pause = StopAfter(2)
        resumed = trained(tmp_path / "resumed", spec, report=pause.report, stop=pause.stop)
        if len(resumed.manifest().finished) == len(spec.phases):
            break
    assert torch.equal(weights(straight), weights(resumed))
    assert straight.manifest() == resumed.manifest()


def test_two_processes_train_what_one_trains(tmp_path, tiny):
    spec = tiny(SIMULTANEOUS)
    torch.testing.assert_close(
        weights(trained(tmp_path / "one", spec)), weights(trained(tmp_path / "two", spec, jobs=2)), atol=1e-4, rtol=0
    )


def test_a_finished_run_is_left_alone(tmp_path, tiny):
    spec = tiny(Stacked())
    before = trained(tmp_path / "run", spec).manifest()
    steps: list[object] = []
    assert trained(tmp_path / "run", spec, report=steps.append).manifest() == before
    assert steps == []


def test_progress_is_saved_by_the_clock(tmp_path, tiny):
    times = iter(range(0, 100_000, 30))
    spec, saved = tiny(EndToEnd()), []
    corpus = load_corpus(spec.corpus, spec.model.context)
    run = RunDirectory.create(tmp_path / "run", spec, corpus.sha256)
    train_run(run, corpus, clock=lambda: next(times), report=lambda _: saved.append(run.load_progress(0) is not None))
    assert saved == [False, True, True, True, True]


def test_one_block_of_independent_ones_can_be_trained_alone(tmp_path, tiny):
    run = trained(tmp_path / "run", tiny(Denoise()), only_block=2)
    assert list(run.manifest().blocks) == [2]


def test_blocks_trained_one_by_one_are_those_trained_in_a_row(tmp_path, tiny):
    spec = tiny(Stacked(scaffold=0))
    whole = trained(tmp_path / "whole", spec)
    for block in range(4):
        parts = trained(tmp_path / "parts", spec, only_block=block)
    assert torch.equal(weights(whole), weights(parts))


@pytest.mark.parametrize(
    "objective, block, complaint",
    [
        (Stacked(), 2, "stands on blocks"),
        (Stacked(), 3, "has no phase of its own"),
        (SIMULTANEOUS, 1, "all together"),
        (Denoise(), 9, "choose one of 0, 1, 2, 3"),
    ],
)
def test_a_block_that_cannot_be_trained_alone_is_refused(tmp_path, tiny, objective, block, complaint):
    with pytest.raises(ConfigError, match=complaint):
        trained(tmp_path / "run", tiny(objective), only_block=block)


def test_a_small_block_can_stand_beside_large_ones(tmp_path, tiny):
    run = trained(tmp_path / "run", tiny(Stacked(), **{"model.layers": [1, 2, 1, 1]}))
    assert len(run.manifest().finished) == 3


@pytest.mark.parametrize("objective", [Stacked(), Denoise(), EndToEnd()])
def test_a_run_with_shared_layers_trains_and_stores_the_real_ones(tmp_path, tiny, objective):
    shape = {"model.layers": [3, 3, 2, 3], "model.physical_layers": [1, 2, 1, 1]}
    run = trained(tmp_path / "run", tiny(objective, **shape))
    assert len(run.manifest().finished) == len(run.spec.phases)
    stored = run.load_block(1, block_shapes(run.spec, 1))
    assert {name.split(".")[1] for name in stored if name.startswith("layers.")} == {"0", "1"}


def test_a_damaged_block_below_stops_the_run_and_names_the_file(tmp_path, tiny):
    spec = tiny(Stacked())
    pause = StopAfter(6)
    run = trained(tmp_path / "run", spec, report=pause.report, stop=pause.stop)
    (file,) = run.path.glob("block-0-*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=file.name):
        trained(tmp_path / "run", spec)


@pytest.mark.parametrize("missing", ["weights:0.readout", "step"])
def test_progress_that_lacks_something_stops_the_run_and_names_the_file(tmp_path, tiny, missing):
    spec, pause = tiny(Stacked()), StopAfter(2)
    run = trained(tmp_path / "run", spec, report=pause.report, stop=pause.stop)
    state, metadata = run.load_progress(0)
    kept = {name: tensor for name, tensor in state.items() if name != missing}
    run.save_progress(0, kept, {key: value for key, value in metadata.items() if key != missing})
    with pytest.raises(CheckpointError, match=r"phase-0.safetensors does not hold .* delete it"):
        trained(tmp_path / "run", spec)


def test_the_weights_of_the_composition_are_fitted_when_all_is_trained(tmp_path, tiny):
    run = trained(tmp_path / "run", tiny(Stacked()))
    assert len(run.manifest().combine["stack"]) == 4


def test_a_run_of_one_block_is_a_plain_transformer(tmp_path, tiny):
    plain = tiny(Stacked(), **{"model.blocks": 1})
    twin = tiny(EndToEnd(), **{"model.blocks": 1})
    assert torch.equal(weights(trained(tmp_path / "plain", plain)), weights(trained(tmp_path / "twin", twin)))


def test_metrics_tell_every_step(tmp_path, tiny):
    records = trained(tmp_path / "run", tiny(Stacked(later_share=1.0))).metrics()
    assert [(record["phase"], record["step"]) for record in records] == [(p, s) for p in range(3) for s in range(1, 6)]
    assert all(np.isfinite(record["loss"]) for record in records)


def test_an_unfinished_corpus_is_not_mistaken_for_the_run_s(tmp_path, text, tiny):
    spec = tiny(Stacked())
    trained(tmp_path / "run", spec)
    text.write_bytes(text.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match="other text"):
        trained(tmp_path / "run", spec)


@pytest.mark.parametrize("objective", [Stacked(), Denoise(), Stacked(schedule="whole")], ids=lambda x: x.kind)
def test_computing_layers_again_changes_no_bit(tmp_path, tiny, objective):
    plain = trained(tmp_path / "plain", tiny(objective))
    again = trained(tmp_path / "again", tiny(objective, **{"train.checkpoint_activations": True}))
    assert torch.equal(weights(plain), weights(again))


def test_fewer_windows_at_once_change_only_the_rounding(tmp_path, tiny):
    plain = trained(tmp_path / "plain", tiny(Stacked()))
    parts = trained(tmp_path / "parts", tiny(Stacked(), **{"train.micro_windows": 3}))
    assert torch.allclose(weights(plain), weights(parts), atol=1e-3)
    assert not torch.equal(weights(plain), weights(parts))


def test_a_run_may_be_continued_with_other_memory_settings(tmp_path, tiny):
    pause = StopAfter(2)
    trained(tmp_path / "run", tiny(Stacked()), report=pause.report, stop=pause.stop)
    more = trained(tmp_path / "run", tiny(Stacked(), **{"train.checkpoint_activations": True}))
    assert torch.equal(weights(more), weights(trained(tmp_path / "straight", tiny(Stacked()))))
    assert more.spec.digest() == tiny(Stacked()).digest()
