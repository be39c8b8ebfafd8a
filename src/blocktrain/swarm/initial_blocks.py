"""Nursery: what a coordinator must know of the model, and nothing of which it does itself. These functions load torch:
a process of its own calls them and ends, and the coordinator, which only averages, takes a quarter of the memory.
Next: coordinator.py, which is given the newborn blocks; ../cli/serving.py, which asks before it serves."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from blocktrain.errors import ConfigError
from blocktrain.io.files import mapped
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.blocks import Tensors
from blocktrain.wire.safetensors import decode


@contextmanager
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    """One process, begun afresh: it has nothing of this one. Ctrl-C is for this one to hear."""
    deaf = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=deaf) as process:
            yield process
    except BrokenProcessPool:
        raise ConfigError(
            "the process that makes the untrained blocks was ended from outside: give this machine more memory, or "
            "train a smaller model"
        ) from None


def raise_blocks(spec: RunSpec, folder: Path) -> dict[int, int]:
    """Every block untrained, in a file of the folder that stays; and what training takes in bytes, phase by phase."""
    from blocktrain.io.tensor_file import save_tensors
    from blocktrain.model.block import build_block
    from blocktrain.train.memory_estimate import training_memory_bytes

    folder.mkdir(parents=True, exist_ok=True)
    for block in range(spec.model.blocks):
        if not (path := _file(folder, block)).exists():
            save_tensors(path, build_block(spec, block).state_dict())
    return {phase.index: training_memory_bytes(spec, phase) for phase in spec.phases}


def newborn_here(spec: RunSpec) -> Callable[[int], Tensors]:
    """The untrained blocks, each made once in this process, for a coordinator beside workers: torch is there anyway."""
    from blocktrain.io.arrays import as_arrays
    from blocktrain.model.block import newborn_of

    newborn = newborn_of(spec)
    return lambda block: as_arrays(newborn(block))


def newborn_in(folder: Path) -> Callable[[int], Tensors]:
    """The untrained blocks that `raise_blocks` left there, in their files."""
    return lambda block: decode(mapped(_file(folder, block)), in_place=True)[0]


def _file(folder: Path, block: int) -> Path:
    return folder / f"block-{block}.safetensors"
