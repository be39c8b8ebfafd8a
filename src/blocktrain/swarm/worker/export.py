"""Export: downloads the newest model of a run from its coordinator into a run directory.
Next: io/checkpoint.py, the run directory; client.py, the downloads."""

from __future__ import annotations

from pathlib import Path

import torch

from blocktrain.io.arrays import as_tensors
from blocktrain.io.checkpoint import RunDirectory
from blocktrain.io.tensor_file import stored_as
from blocktrain.model.block import block_shapes
from blocktrain.spec import RunSpec, usable_weights
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.messages import TOKENIZER_BLOB, ModelManifest
from blocktrain.wire.safetensors import decode


def export_model(
    client: CoordinatorClient,
    manifest: ModelManifest,
    out: Path,
    cache: Path,
    precision: torch.dtype = torch.float32,
) -> RunDirectory:
    """Downloads everything before it replaces anything, so that a broken connection leaves an older export as it was.
    One block is in memory at a time. The weights of the combination come last: they belong to exactly these blocks."""
    spec = RunSpec.model_validate(manifest.spec)
    run = RunDirectory.create(out, spec, manifest.corpus_sha256)
    if spec.corpus.tokenizer_sha256 is not None:
        run.save_tokenizer(bytes(client.download(client.run_info().corpus[TOKENIZER_BLOB], cache)))
    steps = _steps_of_blocks(spec, manifest)
    for each in manifest.blocks:
        client.download(each.tensors, cache)
    for each in manifest.blocks:
        data = client.download(each.tensors, cache)
        tensors, _ = decode(data, expected=block_shapes(spec, each.block))
        run.save_block(each.block, stored_as(as_tensors(tensors), precision), steps.get(each.block, 0))
    for phase in manifest.finished:
        run.finish_phase(phase, {}, spec.phases[phase].steps)
    for path, weights in usable_weights(manifest.combine, spec.model.blocks).items():
        run.save_combine(path, weights)
    return run


def _steps_of_blocks(spec: RunSpec, manifest: ModelManifest) -> dict[int, int]:
    """Block -> the step of the last phase that has trained it."""
    return {
        block: step for phase, step in sorted(manifest.steps.items()) if step for block in spec.phases[phase].blocks
    }
