"""Files of tensors, saved and loaded; mapped tensors: those in use are resident in memory, released ones are not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from blocktrain.errors import CheckpointError, TensorError
from blocktrain.io.tensor_file import MappedTensors, load_tensors, save_tensors
from blocktrain.model.block import block_shapes
from blocktrain.model.offload import offloaded_block
from blocktrain.spec import preset

MIB = 2**20
SMALL_SHAPES = {"w": (2, 2)}
NEW = {"w": torch.ones(2, 2)}
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is resident")


def resident_bytes(path: Path) -> int:
    """How much of the mapped file counts as memory of this process."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [at for at, line in enumerate(lines) if line.endswith(str(path))]
    rss = [next(line for line in lines[at:] if line.startswith("Rss:")) for at in starts]
    return sum(int(line.split()[1]) * 1024 for line in rss)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tensors.safetensors"
    save_tensors(
        path, {"first": torch.ones(4 * MIB), "second": torch.full((4 * MIB,), 2.0), "third": torch.zeros(3, 4)}
    )
    return path


SHAPES = {"first": (4 * MIB,), "second": (4 * MIB,), "third": (3, 4)}


def test_mapped_tensors_are_those_that_were_saved(path):
    mapped = MappedTensors(path, SHAPES)
    path.unlink()
    assert mapped.tensors["first"].mean() == 1
    assert mapped.tensors["second"].mean() == 2
    assert torch.equal(mapped.tensors["third"], torch.zeros(3, 4))


@linux
def test_what_is_released_is_not_resident_and_still_readable(path):
    mapped = MappedTensors(path, SHAPES)
    before = resident_bytes(path)
    for name, mean in [("first", 1), ("second", 2), ("first", 1)]:
        mapped.expect(mapped.tensors[name])
        assert mapped.tensors[name].mean() == mean
        assert 16 * MIB <= resident_bytes(path) < 24 * MIB  # the system maps some pages around those that are read
        mapped.release(mapped.tensors[name])
    assert before < 8 * MIB
    assert resident_bytes(path) < 8 * MIB


class Watched(MappedTensors):
    """Records how much of the file is resident after each matrix was used."""

    def release(self, tensor: torch.Tensor) -> None:
        self.resident = [*getattr(self, "resident", []), resident_bytes(self.path)]
        super().release(tensor)


@linux
def test_a_streamed_block_has_never_more_than_one_layer_of_its_file_in_memory(tmp_path):
    spec = preset("tiny").with_(**{"model.width": 512, "model.layers": [6, 1, 1, 1]})
    layer_bytes = 12 * 512**2 * 4
    tensors = {name: torch.zeros(shape) for name, shape in block_shapes(spec, 0).items()}
    save_tensors(tmp_path / "block.safetensors", tensors)
    mapped = Watched(tmp_path / "block.safetensors", block_shapes(spec, 0))
    offloaded_block(spec, 0, mapped.tensors, mapped)(torch.zeros(1, 8, dtype=torch.long), None)
    assert 6 * layer_bytes < mapped.path.stat().st_size
    assert 0 < max(mapped.resident) <= layer_bytes


@pytest.mark.parametrize(
    "data, complaint", [(b"", "is empty: get it again"), (b"\x00" * 20, "not whole safetensors"), (b"x", "no header")]
)
def test_a_file_that_holds_no_tensors_is_refused(tmp_path, data, complaint):
    path = tmp_path / "tensors.safetensors"
    path.write_bytes(data)
    with pytest.raises(TensorError, match=complaint):
        MappedTensors(path, SHAPES)


def test_tensors_of_another_shape_are_refused(path):
    with pytest.raises(TensorError, match=r'"third" has shape \(3, 4\) and \(4, 3\) is expected'):
        MappedTensors(path, {**SHAPES, "third": (4, 3)})


def test_tensors_come_back_from_their_file(tmp_path):
    save_tensors(tmp_path / "t.safetensors", NEW, {"step": "3"})
    tensors, metadata = load_tensors(tmp_path / "t.safetensors", expected=SMALL_SHAPES)
    assert torch.equal(tensors["w"], NEW["w"])
    assert metadata == {"step": "3"}


@pytest.mark.parametrize(
    "expected, complaint",
    [
        ({"w": (2, 2), "v": (1,)}, r't.safetensors: tensor "v" is missing: make it again, or restore it'),
        ({}, r't.safetensors: tensor "w" is not part of this model: make it again'),
        ({"w": (4,)}, r't.safetensors: tensor "w" has shape \(2, 2\) and \(4,\) is expected: make it again'),
    ],
)
def test_a_file_with_other_tensors_is_named(tmp_path, expected, complaint):
    save_tensors(tmp_path / "t.safetensors", NEW)
    with pytest.raises(CheckpointError, match=complaint):
        load_tensors(tmp_path / "t.safetensors", expected)


def test_a_missing_or_truncated_file_is_named(tmp_path):
    path = tmp_path / "t.safetensors"
    with pytest.raises(CheckpointError, match=r"t.safetensors is missing: check the path"):
        load_tensors(path)
    save_tensors(path, NEW)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"t.safetensors: not whole safetensors bytes .*: make it again"):
        load_tensors(path)
