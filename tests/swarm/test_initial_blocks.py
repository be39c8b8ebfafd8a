"""Initial blocks: made in a process that ends, they are the blocks that any process would make."""

import signal

import numpy as np
import pytest

from blocktrain.errors import ConfigError
from blocktrain.spec import preset
from blocktrain.swarm import initial_blocks
from blocktrain.swarm.coordinator.initial_files import initial_block_file, initial_blocks_in
from blocktrain.swarm.initial_blocks import (
    initial_blocks_here,
    make_in_torch_process,
    make_initial_blocks,
    torch_process,
)
from blocktrain.train.memory_estimate import least_memory_bytes

SPEC = preset("tiny")


def test_blocks_made_in_another_process_are_those_made_here(tmp_path):
    make_in_torch_process(SPEC, tmp_path / "initial-blocks")
    there, here = initial_blocks_in(tmp_path / "initial-blocks"), initial_blocks_here(SPEC)
    for block in range(SPEC.model.blocks):
        assert there(block).keys() == here(block).keys()
        assert all(np.array_equal(there(block)[name], tensor) for name, tensor in here(block).items())


def test_it_returns_the_memory_that_training_each_phase_takes(tmp_path):
    assert make_initial_blocks(SPEC, tmp_path) == {x.index: least_memory_bytes(SPEC, x) for x in SPEC.phases}


def test_blocks_that_are_there_are_not_made_again(tmp_path):
    make_initial_blocks(SPEC, tmp_path)
    files = [initial_block_file(tmp_path, block) for block in range(SPEC.model.blocks)]
    before = [path.stat().st_ino for path in files]
    make_initial_blocks(SPEC, tmp_path)
    assert before == [path.stat().st_ino for path in files]


def test_a_restarted_coordinator_needs_no_other_process(tmp_path, monkeypatch):
    made = make_initial_blocks(SPEC, tmp_path)
    monkeypatch.setattr(initial_blocks, "torch_process", lambda: pytest.fail("a process was started"))
    assert make_in_torch_process(SPEC, tmp_path) == made


@pytest.mark.parametrize("found", [b"[]", b'{"version": "0.0.1", "bytes": {"0": 1}}'], ids=["damaged", "older"])
def test_what_another_version_estimated_or_a_damaged_file_is_made_anew(found, tmp_path):
    made = make_initial_blocks(SPEC, tmp_path)
    (tmp_path / initial_blocks.MEMORY_FILE).write_bytes(found)
    assert make_in_torch_process(SPEC, tmp_path) == made


def test_a_process_that_is_killed_is_reported_in_a_sentence():
    with (
        pytest.raises(ConfigError, match="was ended from outside: give this machine more memory"),
        torch_process() as one,
    ):
        one.submit(signal.raise_signal, signal.SIGKILL).result()
