"""Blocks whose matrices pass through memory one by one: the same answers as loaded ones, a matrix at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blocktrain.io.tensor_file import MappedTensors, save_tensors, stored_as
from blocktrain.model.block import Block, DenoiseBlock, block_shapes, build_block
from blocktrain.model.offload import TILE_VALUES, WeightStream, offloaded_block
from blocktrain.spec import Denoise, RunSpec, Stacked, preset

SHAPE = {"model.layers": [5, 1, 1, 1], "model.physical_layers": [2, 1, 1, 1], "model.width": 96, "model.heads": 3}
STACKED = preset("tiny").with_(objective=Stacked(), **SHAPE)
DENOISE = preset("tiny").with_(objective=Denoise(span_share=0.5), **SHAPE)
TEXT = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))


def some_tensors(spec: RunSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = block_shapes(spec, 0)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def loaded(spec: RunSpec, tensors: Mapping[str, Tensor]) -> Block:
    block = build_block(spec, 0)
    block.load_state_dict(dict(tensors))
    return block.requires_grad_(False)


def streamed(path: Path, spec: RunSpec, tensors: Mapping[str, Tensor]) -> Block:
    save_tensors(path / "block.safetensors", tensors, {"steps": "12"})
    mapped = MappedTensors(path / "block.safetensors", block_shapes(spec, 0))
    return offloaded_block(spec, 0, mapped.tensors, mapped)


def answer(block: Block) -> Tensor:
    if isinstance(block, DenoiseBlock):
        return block(TEXT, torch.ones(*TEXT.shape, 256), 20)[1]
    return block(TEXT, None)[1]


@pytest.mark.parametrize("spec", [STACKED, DENOISE], ids=["stacked", "denoise"])
def test_a_block_streamed_from_a_float32_file_is_the_loaded_one_bit_for_bit(tmp_path, spec):
    tensors = some_tensors(spec)
    assert torch.equal(answer(streamed(tmp_path, spec, tensors)), answer(loaded(spec, tensors)))


@pytest.mark.parametrize("spec", [STACKED, DENOISE], ids=["stacked", "denoise"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_block_streamed_from_a_half_precision_file_is_the_loaded_one_to_rounding(tmp_path, spec, dtype):
    """The stored numbers are the same, all sums are in float32, only their order differs."""
    tensors = stored_as(some_tensors(spec), dtype)
    torch.testing.assert_close(
        answer(streamed(tmp_path, spec, tensors)), answer(loaded(spec, tensors)), atol=1e-5, rtol=1e-5
    )


class Shelf:
    """Notes which matrix is called for and which is put back."""

    def __init__(self) -> None:
        self.expected: list[Tensor] = []
        self.released: list[Tensor] = []

    def expect(self, tensor: Tensor) -> None:
        self.expected.append(tensor)

    def release(self, tensor: Tensor) -> None:
        self.released.append(tensor)


def test_the_next_matrix_is_called_for_while_one_works_and_every_one_is_released():
    tensors, shelf = some_tensors(STACKED), Shelf()
    block = offloaded_block(STACKED, 0, tensors, shelf)
    shelf.released.clear()
    answer(block)
    walked = [tensors[name] for name in tensors if name.startswith("layers.")]
    twice_and_a_half = [id(matrix) for matrix in (*walked, *walked, *walked[:6])]
    assert [id(matrix) for matrix in shelf.released] == twice_and_a_half
    assert [id(matrix) for matrix in shelf.expected[:-1]] == twice_and_a_half[1:]


@pytest.mark.parametrize("rows", [1, 7, 3 * TILE_VALUES // 1000 + 5])
def test_a_matrix_larger_than_the_buffer_is_multiplied_tile_by_tile(rows):
    weight = torch.randn(rows, 1000, generator=torch.Generator().manual_seed(0)).half()
    x = torch.randn(2, 3, 1000, generator=torch.Generator().manual_seed(1))
    product = WeightStream(Shelf(), [weight]).multiply(x, weight)
    torch.testing.assert_close(product, x @ weight.float().T, atol=1e-4, rtol=1e-5)


def test_a_offloaded_block_owns_no_matrix(tmp_path):
    block = streamed(tmp_path, STACKED, some_tensors(STACKED))
    assert {name for name, _ in block.named_parameters()} == {"embedding", "readout", "gain"}
