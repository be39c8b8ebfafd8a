import math

import numpy as np
import pytest
import torch

from blocktrain.data.windows import consecutive_windows
from blocktrain.model.stack import BlockModel
from blocktrain.spec import MAX_COMPOSITION_WEIGHT, Denoise, EndToEnd, Stacked, preset
from blocktrain.train.evaluate import FIT_WINDOWS, answer, evaluate, fit_combination, windows_at_once
from blocktrain.train.trainer import BlockTrainer

TINY = preset("tiny")
TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog. " * 60, dtype=np.uint8)
PROSE = np.frombuffer(
    b"".join(b"%d bottles of beer on the wall, take %d down and pass it around; " % (n, n % 7) for n in range(300)),
    dtype=np.uint8,
)


def trained(spec, data=TEXT) -> BlockModel:
    published: dict[int, dict[str, torch.Tensor]] = {}
    for phase in spec.phases:
        trainer = BlockTrainer(spec, phase, data, published)
        while not trainer.finished:
            trainer.step()
        published |= trainer.weights()
    return BlockModel.from_tensors(spec, published)


def test_a_model_that_knows_nothing_costs_eight_bits_a_byte():
    score = answer(evaluate(BlockModel(TINY), TEXT))
    assert score.bits_per_byte == pytest.approx(8.0, rel=1e-5)
    assert score.perplexity == pytest.approx(256, rel=1e-4)
    assert score.standard_error == pytest.approx(0.0, abs=1e-6)


def test_every_byte_but_the_first_and_a_short_rest_is_scored_once():
    score = answer(evaluate(BlockModel(TINY), TEXT))
    assert len(TEXT) - 64 <= score.num_bytes < len(TEXT)


@pytest.mark.parametrize(
    "objective, readings",
    [
        (
            Stacked(),
            ["stack block 0", "stack block 1", "stack block 2", "stack block 3", "stack last", "stack combined"],
        ),
        (EndToEnd(), ["stack last"]),
        (
            Denoise(),
            [f"mean block {k}" for k in range(4)]
            + ["mean combined"]
            + [f"euler block {k}" for k in range(4)]
            + ["euler last"],
        ),
    ],
    ids=["stacked", "end_to_end", "denoise"],
)
def test_every_block_path_and_composition_is_reported(objective, readings):
    scores = evaluate(BlockModel(TINY.with_(objective=objective)), TEXT, max_windows=4)
    assert [f"{score.path} {score.reading}" for score in scores] == readings


def test_the_standard_error_is_that_of_the_mean_over_windows():
    model = trained(TINY.with_(objective=EndToEnd(), **{"train.steps": 10}), PROSE)
    (score,) = evaluate(model, PROSE)
    windows = torch.from_numpy(PROSE[: 64 * (len(PROSE) // 64)].astype(np.int64))
    losses = []
    for start in range(0, len(windows) - 64, 64):
        inputs, targets = windows[start : start + 64], windows[start + 1 : start + 65]
        losses.append(torch.nn.functional.cross_entropy(model.logits(inputs[None])[0], targets).item())
    assert score.nats_per_byte == pytest.approx(np.mean(losses), rel=1e-4)
    assert score.standard_error == pytest.approx(np.std(losses, ddof=1) / math.sqrt(len(losses)), rel=1e-2)


@pytest.mark.parametrize("vocabulary, at_once", [(200, 32), (256, 32), (1024, 8), (65_536, 1)])
def test_a_large_vocabulary_is_scored_in_smaller_batches(vocabulary, at_once):
    assert windows_at_once(TINY.with_(**{"model.vocabulary": vocabulary}), 32) == at_once


def test_evaluation_twice_gives_the_same_scores():
    model = BlockModel(TINY.with_(objective=Denoise()))
    assert evaluate(model, TEXT, max_windows=4) == evaluate(model, TEXT, max_windows=4)


@pytest.mark.parametrize("objective", [Stacked(), Denoise()], ids=["stacked", "denoise"])
def test_fitted_weights_predict_no_worse_than_the_composition_before(objective):
    model = trained(TINY.with_(objective=objective, **{"train.steps": 15}), PROSE)
    before = answer(evaluate(model, PROSE)).nats_per_byte
    model.combine = fit_combination(model, PROSE)
    assert answer(evaluate(model, PROSE)).nats_per_byte <= before + 1e-3


@pytest.mark.parametrize("objective, steps", [(Stacked(), 30), (Denoise(), 20)], ids=["stacked", "denoise"])
def test_fitted_weights_predict_as_well_as_those_of_torch_s_optimiser(objective, steps):
    model = trained(TINY.with_(objective=objective, **{"train.steps": steps}), PROSE)
    path = model.paths[0]
    windows = torch.from_numpy(consecutive_windows(PROSE, TINY.model.context + 1)[:FIT_WINDOWS]).long()
    logits, targets = (
        torch.stack(model.readings(windows[:, :-1], path)).flatten(1, 2).detach(),
        windows[:, 1:].flatten(),
    )

    def loss(weights):
        return torch.nn.functional.cross_entropy(torch.tensordot(weights, logits, dims=1), targets)

    theirs = torch.full((4,), 0.25, requires_grad=True)
    optimiser = torch.optim.LBFGS([theirs], max_iter=100, line_search_fn="strong_wolfe")
    optimiser.step(lambda: (optimiser.zero_grad(), value := loss(theirs), value.backward())[1])
    assert loss(torch.tensor(fit_combination(model, PROSE)[path])) <= loss(theirs) + 1e-4


def test_blocks_that_know_nothing_keep_their_weights():
    assert fit_combination(BlockModel(TINY), TEXT) == {"stack": (0.0, 0.0, 0.0, 1.0)}


def test_a_missing_block_is_left_out_of_the_readings():
    names = [score.reading for score in evaluate(BlockModel(TINY), TEXT, max_windows=2, missing={1})]
    assert names == ["block 0", "block 2", "block 3", "last", "combined"]


def test_low_noise_lets_training_copy_the_target_and_the_held_out_loss_shows_it():
    """The leak that σ ∈ [1, 10] avoids: with σ_min = 0.002 the blocks' training loss collapses, since z gives the byte
    away, while the composed model, whose z starts as noise, is no better than before."""
    steps = {"train.steps": 60, "model.blocks": 2, "model.layers": 2, "optim.adam_lr": 0.05}
    leaking = TINY.with_(objective=Denoise(sigma_min=0.002, sigma_max=80.0), **steps)
    sound = TINY.with_(objective=Denoise(), **steps)
    final = {}
    for name, spec in (("leaking", leaking), ("sound", sound)):
        trainer = BlockTrainer(spec, spec.phases[1], PROSE, {})
        final[name] = [trainer.step().loss for _ in range(60)][-1]
    held_out = {score.path: score for score in evaluate(trained(leaking, PROSE), PROSE, max_windows=16)}
    assert final["leaking"] < 0.1
    assert final["sound"] > 1.0
    assert held_out["euler"].nats_per_byte > 1.0


def test_the_weights_of_a_model_that_learned_little_stay_within_what_a_coordinator_accepts():
    spec = preset("tiny").with_(**{"train.steps": 2})
    published = {}
    for phase in spec.phases:
        trainer = BlockTrainer(spec, phase, PROSE, published)
        trainer.step()
        published |= trainer.weights()
    model = BlockModel.from_tensors(spec, published)
    assert max(abs(weight) for weight in fit_combination(model, PROSE)["stack"]) <= MAX_COMPOSITION_WEIGHT
