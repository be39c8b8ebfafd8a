"""blocktrain export: downloads the newest model of a run, as a directory for eval, generate and serve, or as a folder
that transformers loads. Next: swarm/worker/export.py, which downloads it; hf.py, which writes that folder."""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.console import named_blocks, say
from blocktrain.cli.options import Home, read_secret
from blocktrain.errors import CheckpointError, ConfigError
from blocktrain.io.private import METRICS_FILE, cache_home
from blocktrain.wire.invite import Invite, read_invite

if TYPE_CHECKING:
    from blocktrain.io.checkpoint import RunDirectory
    from blocktrain.wire.messages import ModelManifest

SCHEMES = ("bt:", "bts:")


class Precision(StrEnum):
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INVITE|RUN",
            help="An invite: bt://…#… in quotes, @FILE or - for stdin. With --hf also a run directory.",
            callback=read_secret,
        ),
    ],
    out: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Directory for the model. An older export there is updated.")
    ] = None,
    hf: Annotated[
        Path | None, typer.Option("--hf", metavar="DIR", help="Write a folder that transformers loads.")
    ] = None,
    home: Home = None,
    precision: Annotated[
        Precision,
        typer.Option(metavar="FORMAT", help="Numbers on disk: float32, float16 or bfloat16."),
    ] = Precision.FLOAT32,
) -> None:
    """Download the newest model of a run, or convert a model.

    DIR gets one version of every block; eval, generate, serve and report read it. With --hf, the model becomes a folder
    that Hugging Face's transformers loads; a run directory can then be given instead of an invite."""
    for folder in (out, hf):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file: name a directory")
    if out is not None and (out / METRICS_FILE).is_file():
        raise CheckpointError(f"{out} holds a run that was trained here: name another directory for the download")
    if out is None and hf is None:
        raise ConfigError("no output was given: name a directory, or --hf DIR for a folder that transformers loads")
    if source.startswith(SCHEMES) or (out is not None and Path(source).exists()):
        _from_swarm(read_invite(source), out, hf, (home or cache_home()) / "blobs", precision)
    elif out is not None or hf is None:
        raise ConfigError(
            f"{source} is not an invite: give bt://…#… to download a model, or only --hf DIR to convert one"
        )
    else:
        _write_hf(Path(source), hf)


def _from_swarm(invite: Invite, out: Path | None, hf: Path | None, cache: Path, precision: Precision) -> None:
    with tempfile.TemporaryDirectory(prefix="blocktrain-") as beside:
        run, manifest = fetch(invite, out or Path(beside) / "run", cache, precision)
        if out is not None:
            _describe(out, run, manifest)
        if hf is not None:
            _write_hf(run.path, hf)


def fetch(
    invite: Invite, out: Path, cache: Path, precision: Precision = Precision.FLOAT32
) -> tuple[RunDirectory, ModelManifest]:
    """Downloads the newest model, and who trained it."""
    import torch

    from blocktrain.cli.shared.story import save_story
    from blocktrain.swarm.worker.client import CoordinatorClient
    from blocktrain.swarm.worker.export import export_model

    with CoordinatorClient(invite) as client:
        manifest = client.manifest()
        run = export_model(client, manifest, out, cache, getattr(torch, precision))
        save_story(client, out)
    return run, manifest


def _describe(out: Path, run: RunDirectory, manifest: ModelManifest) -> None:
    spec, present = run.spec, {each.block for each in manifest.blocks}
    if missing := [block for block in range(spec.model.blocks) if block not in present]:
        say(f"{named_blocks(missing, spec.model.blocks, 'does', 'do')} not exist yet: export again later")
    versions = ", ".join(f"{each.block} (version {each.version})" for each in manifest.blocks)
    finished = len(manifest.finished) == len(spec.phases)
    print(f"{out} holds blocks {versions or 'none'}; {'training is finished' if finished else 'training continues'}")
    if not missing:
        elsewhere = "" if spec.corpus.has_name else f" --corpus PATH-OF-{spec.corpus.source}"
        say(f"next: blocktrain eval {quote(str(out))}{elsewhere}")


def _write_hf(folder: Path, out: Path) -> None:
    from blocktrain.cli.shared.scoring import open_trained

    run = open_trained(folder)
    try:
        from transformers.utils import logging

        from blocktrain.hf import write_folder
    except ImportError as error:
        raise ConfigError(
            f"--hf needs a package that is not installed ({error}): pip install 'blocktrain[hf]'"
        ) from None
    logging.disable_progress_bar()
    write_folder(run, out)
    print(f"{out} holds the model for transformers")
    say(f'load it: import blocktrain.hf; AutoModelForCausalLM.from_pretrained("{out}")')
