"""blocktrain export: the newest model of a running or finished run as a directory that eval and generate take.
Next: swarm/export.py, which fetches it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.console import say
from blocktrain.cli.options import InviteText
from blocktrain.cli.private import cache_home
from blocktrain.errors import CheckpointError
from blocktrain.wire.invite import parse_invite


def export(
    invite: InviteText,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes; an older export is renewed.")],
    home: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where downloads are kept; ~/.cache/blocktrain.")
    ] = None,
) -> None:
    """Fetch the newest model of a run: one version of every block, and how they are combined."""
    address = parse_invite(invite)
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file: name a directory")

    from blocktrain.cli.story import save_story
    from blocktrain.spec import RunSpec
    from blocktrain.swarm.client import CoordinatorClient
    from blocktrain.swarm.export import export_model

    with CoordinatorClient(address) as client:
        manifest = client.manifest()
        spec = RunSpec.model_validate(manifest.spec)
        export_model(client, manifest, out, (home or cache_home()) / "blobs")
        save_story(client, out)
    versions = ", ".join(f"{each.block} (version {each.version})" for each in manifest.blocks)
    born = {each.block for each in manifest.blocks}
    if unborn := [str(block) for block in range(spec.model.blocks) if block not in born]:
        say(f"not born yet: block {', '.join(unborn)} of {spec.model.blocks}; export again when their turn has come")
    finished = len(manifest.finished) == len(spec.phases)
    print(f"{out} holds blocks {versions or 'none'}; {'trained to the end' if finished else 'training goes on'}")
    if not unborn:
        say(f"measure it: blocktrain eval {out}")
