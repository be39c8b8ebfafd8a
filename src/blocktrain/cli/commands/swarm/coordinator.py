"""blocktrain coordinator: found a run, or go on with it, and serve it to workers until it is told to stop.
Next: serving.py, which does it; swarm/coordinator/coordinator.py, which decides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blocktrain.cli.options import Changes, CorpusSource, Preset, Seed, Toml, read_spec
from blocktrain.errors import ConfigError

EVERYWHERE = ("0.0.0.0", "::", "")


def coordinator(
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where the run's state is kept; the same command continues it.")
    ],
    toml: Toml = None,
    preset: Preset = None,
    corpus: CorpusSource = None,
    seed: Seed = None,
    changes: Changes = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen on this address.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="0: a free one, the same after a restart.")
    ] = 0,
    public: Annotated[
        str | None, typer.Option(metavar="HOST", help="The name workers reach it by, if it is another.")
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(metavar="URL", help="A PostgreSQL database instead of DIR/ledger.db.")
    ] = None,
    blobs: Annotated[
        str | None, typer.Option(metavar="URL", help="A bucket (s3://, gs://, az://) instead of DIR/blobs.")
    ] = None,
    rate: Annotated[
        float, typer.Option(metavar="N", min=0.1, help="Requests a second from one address with one token; then 429.")
    ] = 300.0,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None,
    tls_self_signed: Annotated[
        bool, typer.Option("--tls-self-signed", help="Make a certificate; the invite names its fingerprint.")
    ] = False,
) -> None:
    """Run the meeting point of a swarm; prints the invite.

    It can be killed at any time: the same command continues. Ends with 0 on SIGTERM, with 130 on Ctrl-C."""
    _check_tls(tls_cert, tls_key, tls_self_signed)
    if public is None and host in EVERYWHERE:
        raise ConfigError(f'--host "{host}" is no address that workers could reach: name one with --public')
    spec = read_spec(toml, preset, corpus, seed, changes)

    from blocktrain.cli.shared.certificates import tls_files
    from blocktrain.cli.shared.serving import Address, opened, serve
    from blocktrain.http.rate_limit import Rate
    from blocktrain.http.server import Tls

    tls: Tls | None = None
    if tls_self_signed or tls_cert:
        tls = tls_files(folder, public or host, tls_cert, tls_key)
    with opened(folder, spec, ledger, blobs) as run:
        serve(run, Address(host, port, public), tls, Rate.per_second(rate))


def _check_tls(cert: Path | None, key: Path | None, self_signed: bool) -> None:
    if (cert is None) != (key is None):
        raise ConfigError("a certificate and its key belong together: give both --tls-cert and --tls-key, or none")
    if cert and self_signed:
        raise ConfigError("--tls-cert and --tls-self-signed both name a certificate: give one of them")
    for path in (cert, key):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path} is not a file: give the path of a PEM file")
