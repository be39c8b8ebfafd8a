import pytest
import torch

from blocktrain.model.block import (
    DenoiseBlock,
    StackedBlock,
    block_shapes,
    build_block,
    initial_block_tensors,
    logical_parameters,
    physical_parameters,
)
from blocktrain.model.stack import BlockModel, count_parameters
from blocktrain.model.transformer import rotary_table, rotate, span_mask
from blocktrain.spec import Denoise, RunSpec, Stacked, preset
from blocktrain.wire.safetensors import continue_block

TINY = preset("tiny")
STACKED = TINY.with_(objective=Stacked())
DENOISE = TINY.with_(objective=Denoise(span_share=0.25))


def trained_looking(spec: RunSpec, index: int = 0) -> StackedBlock | DenoiseBlock:
    """A block whose zero-initialised parts are filled, so that what it computes depends on all that it may see."""
    block = build_block(spec, index)
    generator = torch.Generator().manual_seed(9)
    for parameter in block.parameters():
        if not parameter.any():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return block


def some_bytes(windows: int = 2, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (windows, TINY.model.context), generator=generator)


def some_z(seed: int = 1) -> torch.Tensor:
    return torch.randn(2, TINY.model.context, 256, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_a_stacked_block_never_looks_ahead():
    block, text = trained_looking(STACKED), some_bytes()
    changed = text.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    before, after = block(text, None)[1], block(changed, None)[1]
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20], after[:, 20])


@torch.no_grad()
def test_a_denoise_block_never_looks_ahead_at_bytes_or_at_z():
    block, text, z, sigma = trained_looking(DENOISE), some_bytes(), some_z(), torch.tensor([2.0, 3.0])
    later_text, later_z = text.clone(), z.clone()
    later_text[:, 20:], later_z[:, 20:] = 7, 0.0
    before, after = block.denoise(text, z, sigma), block.denoise(later_text, later_z, sigma)
    torch.testing.assert_close(before[:, :20], after[:, :20])


@torch.no_grad()
def test_span_positions_see_each_other_and_no_clean_byte():
    block, text, z, sigma = trained_looking(DENOISE), some_bytes(), some_z(), torch.tensor([2.0, 3.0])
    logits = block.denoise(text, z, sigma, span_start=48)
    other_bytes, other_end = text.clone(), z.clone()
    other_bytes[:, 48:], other_end[:, 63] = 0, 0.0
    torch.testing.assert_close(block.denoise(other_bytes, z, sigma, span_start=48), logits)
    moved = block.denoise(text, other_end, sigma, span_start=48)
    assert not torch.allclose(moved[:, 48], logits[:, 48])
    torch.testing.assert_close(moved[:, :48], logits[:, :48])


def test_the_span_mask_is_causal_before_the_span():
    assert span_mask(3, 1).tolist() == [[True, False, False], [True, True, True], [True, True, True]]


def test_rotation_makes_scores_depend_on_distance_alone():
    cos, sin = rotary_table(8, 4)
    vectors = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    turned = [rotate(vector.expand(8, 4), cos, sin) for vector in vectors]
    assert (turned[0][5] @ turned[1][3]).item() == pytest.approx((turned[0][4] @ turned[1][2]).item(), rel=1e-5)


@torch.no_grad()
def test_a_new_block_continues_where_the_one_before_it_ended():
    first, second, text = trained_looking(STACKED), build_block(STACKED, 1), some_bytes()
    second.load_state_dict(continue_block(second.state_dict(), first.state_dict()))
    state, logits = first(text, None)
    torch.testing.assert_close(second(text, state)[1], logits)


@torch.no_grad()
def test_the_noise_level_changes_what_a_denoise_block_says():
    block, text, z = trained_looking(DENOISE), some_bytes(), some_z()
    low, high = (block.denoise(text, z, torch.full((2,), sigma)) for sigma in (1.0, 9.0))
    assert not torch.allclose(low, high)


@torch.no_grad()
def test_a_denoise_block_walks_over_its_own_range():
    block = build_block(DENOISE, 1)
    z_after, logits = block(some_bytes(), some_z())
    expected = logits.softmax(-1) @ block.code_table
    share = (block.sigma_low - block.sigma_high) / block.sigma_high
    torch.testing.assert_close(z_after, some_z() + share * (some_z() - expected))


def test_equal_seeds_build_equal_blocks_and_other_blocks_differ():
    one, same, other = build_block(STACKED, 0), build_block(STACKED, 0), build_block(STACKED, 1)
    assert torch.equal(one.embedding, same.embedding)
    assert not torch.equal(one.embedding, other.embedding)


@torch.no_grad()
@pytest.mark.parametrize("objective", [STACKED.objective, DENOISE.objective])
def test_a_block_with_shared_layers_is_the_block_that_repeats_them(objective):
    deep = TINY.with_(objective=objective, **{"model.layers": [5, 1, 1, 1]})
    shared, repeated = trained_looking(deep.with_(**{"model.physical_layers": [2, 1, 1, 1]})), build_block(deep, 0)
    for name, tensor in shared.state_dict().items():
        layer, rest = int(name.split(".")[1]) if name.startswith("layers.") else None, name.split(".")[-1]
        copies = [name] if layer is None else [f"layers.{at}.{rest}" for at in range(5) if at % 2 == layer]
        for copy in copies:
            repeated.get_parameter(copy).data = tensor
    text = some_bytes()
    if isinstance(shared, DenoiseBlock):
        assert torch.equal(shared.without_evidence(text), repeated.without_evidence(text))
    else:
        assert torch.equal(shared(text, None)[1], repeated(text, None)[1])


@pytest.mark.parametrize("objective", [STACKED.objective, DENOISE.objective])
def test_logical_and_stored_parameters_are_counted_from_the_shapes_alone(objective):
    deep = TINY.with_(objective=objective, **{"model.layers": [5, 1, 2, 1]})
    shared = deep.with_(**{"model.physical_layers": [2, 1, 1, 1]})
    assert physical_parameters(deep) == logical_parameters(deep) == count_parameters(BlockModel(deep))
    assert logical_parameters(shared) == logical_parameters(deep)
    assert physical_parameters(shared) == count_parameters(BlockModel(shared)) < logical_parameters(shared)


def test_the_shapes_are_those_of_a_real_block_in_its_order():
    real = build_block(DENOISE, 1).state_dict()
    assert list(block_shapes(DENOISE, 1).items()) == [(name, tuple(tensor.shape)) for name, tensor in real.items()]


@torch.no_grad()
@pytest.mark.parametrize("objective", [STACKED.objective, DENOISE.objective])
def test_narrow_tables_are_a_block_with_the_tables_that_they_make(objective):
    wide = TINY.with_(objective=objective, **{"model.vocabulary": 300})
    narrow, full = trained_looking(wide.with_(**{"model.table_rank": 4})), build_block(wide, 0)
    tensors = narrow.state_dict()
    up, down = tensors.pop("embedding_up"), tensors.pop("readout_down")
    assert (tuple(tensors["embedding"].shape), tuple(tensors["readout"].shape)) == ((300, 4), (300, 4))
    full.load_state_dict({**tensors, "embedding": tensors["embedding"] @ up.T, "readout": tensors["readout"] @ down})
    torch.testing.assert_close(narrow.embedding_table(), full.embedding_table())
    answers = [
        x.without_evidence(some_bytes()) if isinstance(x, DenoiseBlock) else x(some_bytes(), None)[1]
        for x in (narrow, full)
    ]
    torch.testing.assert_close(*answers, atol=1e-4, rtol=1e-3)


def test_blocks_may_have_different_numbers_of_layers():
    spec = TINY.with_(**{"model.layers": [1, 3, 1, 2]})
    assert [len(build_block(spec, index).layers) for index in range(4)] == [1, 3, 1, 2]


@pytest.mark.parametrize("name", ["tiny", "small", "wikitext", "paper"])
def test_every_preset_builds_blocks_of_its_shape(name):
    spec = preset(name)
    shapes = block_shapes(spec, spec.model.blocks - 1)
    assert shapes["readout"] == (256, spec.model.width)
    last_layer = spec.model.layers_of(spec.model.blocks - 1) - 1
    assert shapes[f"layers.{last_layer}.up"] == (4 * spec.model.width, spec.model.width)


def test_an_initial_block_is_built_once():
    tensors = initial_block_tensors(TINY)
    assert tensors(1) is tensors(1)
