"""blocktrain export: the newest model of a running or finished run as a directory that eval and generate take.
Next: checkpoint.py, what such a directory is."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.console import say
from blocktrain.cli.options import InviteText
from blocktrain.cli.private import cache_home
from blocktrain.errors import CheckpointError
from blocktrain.wire.invite import parse_invite

if TYPE_CHECKING:
    from blocktrain.spec import RunSpec
    from blocktrain.swarm.client import CoordinatorClient
    from blocktrain.wire.messages import ModelManifest


class Precision(StrEnum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def export(
    invite: InviteText,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes; an older export is renewed.")],
    home: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where downloads are kept; ~/.cache/blocktrain.")
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Of the matrices on the disk; half is for serving.")] = (
        Precision.FLOAT32
    ),
) -> None:
    """Fetch the newest model of a run: one version of every block, and how they are combined."""
    address = parse_invite(invite)
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file: name a directory")

    from blocktrain.spec import RunSpec
    from blocktrain.swarm.client import CoordinatorClient

    with CoordinatorClient(address) as client:
        manifest = client.manifest()
        spec = RunSpec.model_validate(manifest.spec)
        _fill(out, spec, manifest, client, (home or cache_home()) / "blobs", precision)
    versions = ", ".join(f"{each.block} (version {each.version})" for each in manifest.blocks)
    born = {each.block for each in manifest.blocks}
    if unborn := [str(block) for block in range(spec.model.blocks) if block not in born]:
        say(f"not born yet: block {', '.join(unborn)} of {spec.model.blocks}; export again when their turn has come")
    finished = len(manifest.finished) == len(spec.phases)
    print(f"{out} holds blocks {versions or 'none'}; {'trained to the end' if finished else 'training goes on'}")
    if not unborn:
        say(f"measure it: blocktrain eval {out}")


def _fill(
    out: Path, spec: RunSpec, manifest: ModelManifest, client: CoordinatorClient, cache: Path, precision: Precision
) -> None:
    """All is fetched before anything is replaced, so that a broken connection leaves an older export as it was. One
    block is in memory at a time. The weights of the composition come last: they belong to exactly these blocks."""
    import torch

    from blocktrain.checkpoint import RunDirectory, stored_as
    from blocktrain.model.block import block_shapes
    from blocktrain.wire.tensors import decode

    run = RunDirectory.create(out, spec, manifest.corpus_sha256)
    steps = {
        block: step for phase, step in sorted(manifest.steps.items()) if step for block in spec.phases[phase].blocks
    }  # of the last phase that has trained it
    for each in manifest.blocks:
        client.download(each.tensors, cache)
    for each in manifest.blocks:
        data = client.download(each.tensors, cache)
        tensors, _ = decode(data, expected=block_shapes(spec, each.block))
        run.save_block(each.block, stored_as(tensors, getattr(torch, precision)), steps.get(each.block, 0))
    for phase in manifest.finished:
        run.finish_phase(phase, {}, spec.phases[phase].steps)
    for path, weights in manifest.combine.items():
        run.save_combine(path, weights)
