import pytest
import torch

from blocktrain.errors import ConfigError
from blocktrain.model.stack import BlockModel, draw
from blocktrain.spec import Denoise, RunSpec, Stacked, preset

TINY = preset("tiny")
OBJECTIVES = [Stacked(), Denoise(span_share=0.25)]


def filled(spec: RunSpec) -> BlockModel:
    model = BlockModel(spec)
    generator = torch.Generator().manual_seed(4)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_bytes() -> torch.Tensor:
    return torch.randint(0, 256, (2, TINY.model.context), generator=seeded())


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["stacked", "denoise"])
@torch.no_grad()
def test_two_targets_with_the_same_context_get_identical_logits(objective):
    """Whatever follows position t, the readings up to t are bit-equal: no path sees its target, by z or otherwise."""
    model, text = filled(TINY.with_(objective=objective)), some_bytes()
    other = text.clone()
    other[:, 40:] = (other[:, 40:] + 13) % 256
    for path in model.paths:
        here, there = (model.readings(batch, path, seeded()) for batch in (text, other))
        assert all(torch.equal(a[:, :40], b[:, :40]) for a, b in zip(here, there, strict=True))


@torch.no_grad()
def test_the_stack_is_the_blocks_one_after_the_other():
    model, text = filled(TINY), some_bytes()
    state = None
    for block, reading in zip(model.blocks, model.readings(text, "stack"), strict=True):
        state, logits = block(text, state)
        assert torch.equal(logits, reading)


@torch.no_grad()
def test_combined_evidence_is_the_weighted_sum_of_the_readings():
    model = BlockModel(TINY, {"stack": (0.5, 0.0, 0.25, 1.0)})
    readings = [torch.full((1, 1, 256), float(value)) for value in (2, 7, 4, 3)]
    assert model.combined(readings, "stack").unique().tolist() == [5.0]


@torch.no_grad()
def test_without_fitted_weights_the_last_block_answers_for_the_stack():
    model, text = filled(TINY), some_bytes()
    assert torch.equal(model.logits(text), model.readings(text, "stack")[-1])


@pytest.mark.parametrize("missing", [(0,), (1,), (3,), (0, 2)])
@torch.no_grad()
def test_a_model_with_missing_blocks_still_answers(missing):
    model = filled(TINY)
    readings = model.readings(some_bytes(), "stack", missing=missing)
    assert len(readings) == 4 - len(missing)
    assert readings[-1].isfinite().all()


def test_equal_seeds_generate_equal_bytes():
    model = filled(TINY)
    first, again, other = (bytes(model.generate(b"Hello", 30, seeded(seed))) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_generation_goes_on_beyond_the_context():
    assert len(list(filled(TINY).generate(b"x" * 60, 10, seeded()))) == 10


def test_an_empty_prompt_starts_a_new_line():
    model = filled(TINY)
    assert list(model.generate(b"", 5, seeded())) == list(model.generate(b"\n", 5, seeded()))


def test_a_sweep_writes_all_bytes_in_one_traversal():
    model, traversals = filled(TINY.with_(objective=Denoise(span_share=0.25))), []
    model.blocks[0].register_forward_hook(lambda *_: traversals.append(1))
    assert len(model.sweep(b"The", 16, seeded())) == 16
    assert len(traversals) == 1


@pytest.mark.parametrize("objective, num_bytes", [(Stacked(), 4), (Denoise(), 4), (Denoise(span_share=0.25), 17)])
def test_a_sweep_the_model_was_not_trained_for_is_refused(objective, num_bytes):
    with pytest.raises(ConfigError, match="sweep"):
        filled(TINY.with_(objective=objective)).sweep(b"The", num_bytes, seeded())


def test_temperature_zero_takes_the_likeliest_byte():
    logits = torch.zeros(256)
    logits[65] = 0.1
    assert draw(logits, seeded(), temperature=0) == 65


def test_top_p_keeps_only_the_likeliest_bytes():
    logits = torch.full((256,), -20.0)
    logits[:3] = torch.tensor([0.6, 0.3, 0.1]).log()
    assert {draw(logits, seeded(seed), top_p=0.7) for seed in range(40)} == {0, 1}


def test_a_difference_in_the_last_bit_of_equal_logits_draws_the_same_token():
    equal, nearly = torch.zeros(256), torch.arange(256) * 1e-12
    assert all(draw(equal, seeded(seed)) == draw(nearly, seeded(seed)) for seed in range(20))


@pytest.mark.parametrize("weights", [(), (1.0,), (1.0,) * 9, (1e300, 0.0, 0.0), (float("nan"), 0.0, 0.0)])
def test_weights_that_do_not_fit_the_model_are_left_out(weights):
    """They may come from elsewhere. The model then answers with its last block."""
    spec = TINY.with_(objective=Stacked(), **{"model.blocks": 3, "model.layers": 3})
    model = BlockModel(spec, {"stack": weights})
    assert model.combine == {}
    assert model.logits(some_bytes()).isfinite().all()
