"""Memories: stepping through a block with a memory equals its whole windows; cutting back and growing lose nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocktrain.model.block import build_block
from blocktrain.model.kv_cache import Fan, Memory, Recall, Strand, Tokens, common_prefix
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


def memory_for(block):
    return Memory(len(block.layers), 2, 16, block.embedding)


def whole(block, text):
    """The logits at every position, from the window at once."""
    return (block(text[None], None)[1] if hasattr(block, "gain") else block.without_evidence(text[None]))[0]


def step(block, parts, text):
    return block.answer(block.step(text, None, Recall(Tokens(parts), 0)))


def test_byte_by_byte_equals_the_whole_window(block):
    memory = memory_for(block)
    steps = [step(block, [Strand(memory, at, 1)], TEXT[at : at + 1]) for at in range(30)]
    assert torch.allclose(torch.cat(steps), whole(block, TEXT[:30]), atol=1e-5)


def test_a_strand_goes_on_where_the_memory_ends(block):
    memory = memory_for(block)
    parts = [step(block, [Strand(memory, begin, end - begin)], TEXT[begin:end]) for begin, end in ((0, 20), (20, 64))]
    assert torch.allclose(torch.cat(parts), whole(block, TEXT), atol=1e-5)


def test_positions_behind_a_cut_are_overwritten(block):
    memory = memory_for(block)
    step(block, [Strand(memory, 0, 40)], TEXT[:40])
    other = torch.cat([TEXT[:10], TEXT[50:60]])
    assert torch.allclose(step(block, [Strand(memory, 10, 10)], other[10:]), whole(block, other)[10:], atol=1e-5)


def test_a_fan_s_rows_see_the_trunk_and_themselves(block):
    memory = memory_for(block)
    step(block, [Strand(memory, 0, 12)], TEXT[:12])
    memory.text = bytes(TEXT[:12].tolist())
    rows = TEXT[20:44].view(3, 8)
    fan = Fan(memory, rows=3, length=8)
    first = step(block, [fan.next(5)], rows[:, :5].reshape(-1)).view(3, 5, -1)
    rest = step(block, [fan.next(3)], rows[:, 5:].reshape(-1)).view(3, 3, -1)
    expected = torch.stack([whole(block, torch.cat([TEXT[:12], row]))[12:] for row in rows])
    assert torch.allclose(torch.cat([first, rest], 1), expected, atol=1e-5)


def test_several_texts_step_in_one_batch(block):
    memories = [memory_for(block), memory_for(block)]
    step(block, [Strand(memories[0], 0, 20)], TEXT[:20])
    parts = [Strand(memories[0], 20, 1), Strand(memories[1], 0, 7)]
    both = step(block, parts, torch.cat([TEXT[20:21], TEXT[30:37]]))
    assert torch.allclose(both[:1], whole(block, TEXT[:21])[20:], atol=1e-5)
    assert torch.allclose(both[1:], whole(block, TEXT[30:37]), atol=1e-5)


def test_growing_keeps_what_is_known_even_where_the_text_does_not_say_so_yet():
    memory = Memory(1, 2, 4, torch.zeros(0))
    memory.reserve(3)
    memory.put(0, 0, torch.full((3, 2, 4), 7.0), torch.full((3, 2, 4), 8.0))
    memory.reserve(500)
    assert memory.keys[0].size(1) >= 500
    assert memory.keys[0][:, :3].unique().tolist() == [7.0]
    assert memory.num_bytes == 2 * memory.keys[0].numel() * 4


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
