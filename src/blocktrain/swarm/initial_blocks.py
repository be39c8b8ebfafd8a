"""Initial blocks: the tensors that training starts from, and the memory it takes. Making them needs torch, which the
coordinator never loads: a process of its own makes them and ends. The coordinator then takes a quarter of the memory.
Next: coordinator/server.py, which asks for them before it serves; coordinator/loop.py, which records them."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from blocktrain import __version__
from blocktrain.errors import ConfigError
from blocktrain.io.files import write_whole
from blocktrain.spec import RunSpec
from blocktrain.start_model import StartModel
from blocktrain.swarm.coordinator.initial_files import initial_block_file

if TYPE_CHECKING:
    from blocktrain.wire.safetensors import Tensors

MEMORY_FILE = "memory.json"


@contextmanager
def torch_process() -> Iterator[ProcessPoolExecutor]:
    """One new process for what needs torch. It ignores Ctrl-C, which is for this process to handle."""
    deaf = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=deaf) as process:
            yield process
    except BrokenProcessPool:
        raise ConfigError(
            "the process that makes the initial blocks was ended from outside: give this machine more memory, or "
            "train a smaller model"
        ) from None


def make_in_torch_process(
    spec: RunSpec,
    folder: Path,
    start: StartModel | None = None,
    *,
    describe: Callable[[RunSpec], object] | None = None,
) -> dict[int, int]:
    """`make_initial_blocks` in a process that ends afterwards. `describe` may need torch too and runs there first. A
    run that has them already, as after a restart, needs no such process."""
    if (known := _made_before(spec, folder)) is not None:
        return known
    with torch_process() as process:
        if describe is not None:
            process.submit(describe, spec).result()
        return process.submit(make_initial_blocks, spec, folder, start).result()


def open_in_torch_process(path: Path) -> StartModel:
    """The model that a run starts from."""
    with torch_process() as process:
        return process.submit(_open_start, path).result()


def _open_start(path: Path) -> StartModel:
    from blocktrain.train.start import open_start  # with torch

    return open_start(path)


def make_initial_blocks(spec: RunSpec, folder: Path, start: StartModel | None = None) -> dict[int, int]:
    """Writes each initial block to its file in the folder, unless it is there: that of the model which the run starts
    from, or a new one. Returns the bytes of memory that training each phase takes."""
    from blocktrain.io.tensor_file import save_tensors
    from blocktrain.model.block import build_block
    from blocktrain.train.memory_estimate import least_memory_bytes
    from blocktrain.train.start import StartBlocks

    folder.mkdir(parents=True, exist_ok=True)
    blocks = StartBlocks(start) if start is not None else None
    for block in range(spec.model.blocks):
        if not (path := initial_block_file(folder, block)).exists():
            save_tensors(path, build_block(spec, block).state_dict() if blocks is None else blocks[block])
    memory_bytes = {phase.index: least_memory_bytes(spec.for_any_machine(), phase) for phase in spec.phases}
    write_whole(folder / MEMORY_FILE, json.dumps({"version": __version__, "bytes": memory_bytes}).encode())
    return memory_bytes


def _made_before(spec: RunSpec, folder: Path) -> dict[int, int] | None:
    """The memory of each phase, if this version made all initial blocks of the run."""
    if not all(initial_block_file(folder, block).exists() for block in range(spec.model.blocks)):
        return None
    try:
        found = json.loads((folder / MEMORY_FILE).read_bytes())
        if found["version"] == __version__:
            return {int(phase): num_bytes for phase, num_bytes in found["bytes"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # it is made again
    return None


def initial_blocks_here(spec: RunSpec, start: StartModel | None = None) -> Callable[[int], Tensors]:
    """The initial blocks, each made once in this process: for a coordinator beside workers, where torch is loaded
    anyway."""
    from blocktrain.io.arrays import as_arrays
    from blocktrain.model.block import initial_block_tensors
    from blocktrain.train.start import StartBlocks

    tensors = initial_block_tensors(spec) if start is None else StartBlocks(start).__getitem__
    return lambda block: as_arrays(tensors(block))
