"""The folder of initial blocks: where it is, the file of each, and its tensors. It imports neither the ledger nor
torch: the process that makes the blocks starts sooner. Next: swarm/initial_blocks.py, which writes them; server.py,
which reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from blocktrain.io.files import mapped
from blocktrain.wire.safetensors import Array, decode


def initial_blocks_folder(run_folder: Path, spec_digest: str) -> Path:
    """Where a coordinator looks for the initial blocks of this spec before it makes them."""
    return run_folder / "initial-blocks" / spec_digest[:16]


def initial_block_file(folder: Path, block: int) -> Path:
    return folder / f"block-{block}.safetensors"


def initial_blocks_in(folder: Path) -> Callable[[int], dict[str, Array]]:
    """The initial blocks of a folder. They stay in their files."""
    return lambda block: decode(mapped(initial_block_file(folder, block)), in_place=True)[0]
