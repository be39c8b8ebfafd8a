"""blocktrain coordinator: creates a run or continues it, and serves it to workers until it is stopped.
Next: swarm/coordinator/server.py, which does it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blocktrain.cli.console import say
from blocktrain.cli.options import Changes, CorpusSource, Preset, Seed, Toml, read_spec
from blocktrain.errors import ConfigError

if TYPE_CHECKING:
    from blocktrain.spec import RunSpec
    from blocktrain.swarm.coordinator.server import Invites

EVERYWHERE = ("0.0.0.0", "::", "")


def coordinator(
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Directory of the run. The same command continues it.")
    ],
    toml: Toml = None,
    preset: Preset = None,
    corpus: CorpusSource = None,
    seed: Seed = None,
    changes: Changes = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen on this address.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 is any free port, kept after restarts.")
    ] = 0,
    public: Annotated[
        str | None, typer.Option(metavar="HOST", help="Host name for workers, if it differs from --host.")
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(metavar="URL", help="PostgreSQL database, instead of DIR/ledger.db.")
    ] = None,
    blobs: Annotated[
        str | None, typer.Option(metavar="URL", help="Bucket (s3://, gs://, az://), instead of DIR/blobs.")
    ] = None,
    rate: Annotated[
        float,
        typer.Option(metavar="N", min=0.1, help="Requests per second per address and access token."),
    ] = 300.0,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate chain in PEM format.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key in PEM format.")] = None,
    tls_self_signed: Annotated[
        bool, typer.Option("--tls-self-signed", help="Make a certificate. The invite contains its fingerprint.")
    ] = False,
) -> None:
    """Coordinate a swarm of workers and print its invite.

    It may be killed at any time: the same command continues the run. Ctrl-C or SIGTERM stops it."""
    _check_tls(tls_cert, tls_key, tls_self_signed)
    if public is None and host in EVERYWHERE:
        raise ConfigError(f'workers cannot reach --host "{host}": give the name of this machine with --public')
    spec = read_spec(toml, preset, corpus, seed, changes)

    from blocktrain.cli.shared.certificates import tls_files
    from blocktrain.http.rate_limit import Rate
    from blocktrain.http.server import Tls
    from blocktrain.swarm.coordinator.server import Address, opened, serve
    from blocktrain.swarm.initial_blocks import make_in_torch_process

    tls: Tls | None = None
    if tls_self_signed or tls_cert:
        tls = tls_files(folder, public or host, tls_cert, tls_key)
    announce = partial(_announce, folder)
    make_initial_blocks = partial(make_in_torch_process, describe=_describe)
    with opened(folder, spec, ledger, blobs, make_initial_blocks) as run:
        try:
            serve(run, Address(host, port, public), tls, Rate.per_second(rate), announce=announce, say=say)
        except SystemExit:
            say("stopped: everything is saved, run the same command again to continue")
            raise


def _describe(spec: RunSpec) -> None:
    from blocktrain.cli.shared.training import describe  # counts parameters, with torch

    describe(spec)


def _announce(folder: Path, invites: Invites) -> None:
    """Prints the dashboard's address with a viewer's access token, which may be shared and may end up in logs.
    The admin's is printed only on a terminal."""
    from blocktrain.swarm.coordinator.server import ADMIN_FILE

    say(f"dashboard (read-only): {invites.viewer.page}")
    if sys.stderr.isatty():
        say(f"dashboard for the admin, with pause and invite: {invites.admin.page}")
    say(f"the admin's invite is in {folder / ADMIN_FILE}; workers join with:")
    print(f"blocktrain worker '{invites.worker}'", flush=True)


def _check_tls(cert: Path | None, key: Path | None, self_signed: bool) -> None:
    if (cert is None) != (key is None):
        raise ConfigError("a certificate needs its key: give both --tls-cert and --tls-key, or neither")
    if cert and self_signed:
        raise ConfigError("--tls-cert and --tls-self-signed exclude each other: give only one of them")
    for path in (cert, key):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path} is not a file: give the path of a PEM file")
