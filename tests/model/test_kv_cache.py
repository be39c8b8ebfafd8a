"""KV caches: stepping through a block with a cache equals its whole windows; cutting back and growing lose nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.model.block import build_block
from blocktrain.model.kv_cache import BranchedCache, CacheView, KVCache, PositionBatch, TextPositions, common_prefix
from blocktrain.model.transformer import lean_norm, rms_norm
from blocktrain.spec import Denoise, Stacked, preset

TINY = preset("tiny")
TEXT = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[Stacked(), Denoise()], ids=["stacked", "denoise"])
def block(request):
    """Of two layers, with weights that say something."""
    built = build_block(TINY.with_(**{"objective": request.param, "model.layers": 8}), 1)
    generator = torch.Generator().manual_seed(1)
    for parameter in built.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return built.requires_grad_(False)


def cache_for(block):
    return KVCache(len(block.layers), 2, 16, block.embedding)


def whole(block, text):
    """The logits at every position, from the window at once."""
    return (block(text[None], None)[1] if hasattr(block, "gain") else block.without_evidence(text[None]))[0]


def step(block, parts, text):
    return block.answer(block.step(text, None, CacheView(PositionBatch(parts), 0)))


def test_byte_by_byte_equals_the_whole_window(block):
    cache = cache_for(block)
    steps = [step(block, [TextPositions(cache, at, 1)], TEXT[at : at + 1]) for at in range(30)]
    assert torch.allclose(torch.cat(steps), whole(block, TEXT[:30]), atol=1e-5)


def test_positions_continue_where_the_cache_ends(block):
    cache = cache_for(block)
    parts = [
        step(block, [TextPositions(cache, begin, end - begin)], TEXT[begin:end]) for begin, end in ((0, 20), (20, 64))
    ]
    assert torch.allclose(torch.cat(parts), whole(block, TEXT), atol=1e-5)


def test_positions_behind_a_cut_are_overwritten(block):
    cache = cache_for(block)
    step(block, [TextPositions(cache, 0, 40)], TEXT[:40])
    other = torch.cat([TEXT[:10], TEXT[50:60]])
    assert torch.allclose(step(block, [TextPositions(cache, 10, 10)], other[10:]), whole(block, other)[10:], atol=1e-5)


def test_rows_of_a_branched_cache_see_the_text_and_themselves(block):
    cache = cache_for(block)
    step(block, [TextPositions(cache, 0, 12)], TEXT[:12])
    cache.text = bytes(TEXT[:12].tolist())
    rows = TEXT[20:44].view(3, 8)
    branches = BranchedCache(cache, rows=3, length=8)
    first = step(block, [branches.next(5)], rows[:, :5].reshape(-1)).view(3, 5, -1)
    rest = step(block, [branches.next(3)], rows[:, 5:].reshape(-1)).view(3, 3, -1)
    expected = torch.stack([whole(block, torch.cat([TEXT[:12], row]))[12:] for row in rows])
    assert torch.allclose(torch.cat([first, rest], 1), expected, atol=1e-5)


def test_several_texts_step_in_one_batch(block):
    caches = [cache_for(block), cache_for(block)]
    step(block, [TextPositions(caches[0], 0, 20)], TEXT[:20])
    parts = [TextPositions(caches[0], 20, 1), TextPositions(caches[1], 0, 7)]
    both = step(block, parts, torch.cat([TEXT[20:21], TEXT[30:37]]))
    assert torch.allclose(both[:1], whole(block, TEXT[:21])[20:], atol=1e-5)
    assert torch.allclose(both[1:], whole(block, TEXT[30:37]), atol=1e-5)


def test_growing_keeps_what_is_known_even_where_the_text_does_not_say_so_yet():
    cache = KVCache(1, 2, 4, torch.zeros(0))
    cache.reserve(3)
    cache.put(0, 0, torch.full((3, 2, 4), 7.0), torch.full((3, 2, 4), 8.0))
    cache.reserve(500)
    assert cache.keys[0].size(1) >= 500
    assert cache.keys[0][:, :3].unique().tolist() == [7.0]
    assert cache.num_bytes == 2 * cache.keys[0].numel() * 4


@given(st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8))
def test_the_common_prefix_is_the_longest(same, one, other):
    length = common_prefix(same + one, same + other)
    assert (same + one)[:length] == (same + other)[:length]
    assert (same + one)[: length + 1] != (same + other)[: length + 1] or length == min(len(one), len(other)) + len(same)


@pytest.mark.parametrize("shape", [(1, 32), (5, 4, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_lean_norm_is_the_norm(shape, dtype):
    x = 300 * torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.allclose(lean_norm(x), rms_norm(x), atol=1e-5)
    assert not lean_norm(torch.zeros(shape, dtype=dtype)).any()
