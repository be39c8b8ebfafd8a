"""blocktrain coordinator: creates a run or continues it, and serves it to workers until it is stopped.
Next: swarm/coordinator/server.py, which does it."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from filelock import FileLock, Timeout

from blocktrain.cli.console import say
from blocktrain.cli.options import (
    Changes,
    CorpusSource,
    From,
    MaxConnections,
    MaxPerAddress,
    Preset,
    Presigned,
    Seed,
    TlsCert,
    TlsKey,
    Toml,
    TrustedProxies,
    http_limits,
    parse_size,
    read_spec,
    warn_about_text,
)
from blocktrain.errors import ConfigError
from blocktrain.http.limits import HttpLimits
from blocktrain.io.private import LEDGER_FILE, MANIFEST_FILE
from blocktrain.wire.invite import ADMIN_FILE, parse_address

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
    start_from: From = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Listen on this address.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 is any free port, kept after restarts.")
    ] = 0,
    public: Annotated[
        str | None, typer.Option(metavar="HOST", help="Host name for workers, if it differs from --host.")
    ] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="HOST:PORT", help="Another coordinator of the run, for the invite. Repeatable."),
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(metavar="URL", help="PostgreSQL database, instead of DIR/ledger.db.")
    ] = None,
    blobs: Annotated[
        str | None, typer.Option(metavar="URL", help="Bucket (s3://, gs://, az://), instead of DIR/blobs.")
    ] = None,
    presigned: Presigned = None,
    leaderboard: Annotated[
        bool, typer.Option("--leaderboard", help="Show contributions to everybody, without a token, at /leaderboard.")
    ] = False,
    rate: Annotated[
        float,
        typer.Option(metavar="N", min=0.1, help="Requests per second per address and access token."),
    ] = 300.0,
    max_storage: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Blobs and uploads take at most this much, e.g. 20GB. Default: the disk."),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_self_signed: Annotated[
        bool, typer.Option("--tls-self-signed", help="Make a certificate. The invite contains its fingerprint.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow other machines without TLS. Only on a network you trust.")
    ] = False,
    max_connections: MaxConnections = HttpLimits.max_connections,
    max_per_address: MaxPerAddress = HttpLimits.max_connections_per_address,
    trusted_proxies: TrustedProxies = None,
) -> None:
    """Coordinate a swarm of workers and print its invite.

    It may be killed at any time: the same command, or --dir alone, continues the run. Ctrl-C or SIGTERM stops it."""
    limits = http_limits(max_connections, max_per_address, trusted_proxies)
    if tls_cert and tls_self_signed:
        raise ConfigError("--tls-cert and --tls-self-signed exclude each other: give only one of them")
    _require_public(public, host)

    from blocktrain.cli.shared.certificates import check_tls_files, require_tls, tls_files

    check_tls_files(tls_cert, tls_key)
    remedy = "give --tls-self-signed, or --tls-cert and --tls-key"
    require_tls(host, bool(tls_cert) or tls_self_signed, insecure, remedy)
    for peer in peers or ():
        parse_address(peer, bool(tls_cert) or tls_self_signed)
    _require_own_folder(folder)
    found = ledger is not None or (folder / LEDGER_FILE).is_file()
    no_settings = all(each is None for each in (toml, preset, corpus, seed, start_from)) and not changes

    from blocktrain.swarm.initial_blocks import make_in_torch_process, open_in_torch_process

    start = None if start_from is None else open_in_torch_process(start_from)
    spec = None if found and no_settings else read_spec(toml, preset, corpus, seed, changes, start)
    if spec is not None:
        warn_about_text(spec)

    from blocktrain.http.rate_limit import Rate
    from blocktrain.http.server import Tls
    from blocktrain.swarm.coordinator.quotas import StorageLimits
    from blocktrain.swarm.coordinator.server import Address, opened, serve

    tls: Tls | None = None
    if tls_self_signed or tls_cert:
        tls = tls_files(folder, public or host, tls_cert, tls_key)
    announce = partial(_announce, folder)
    make_initial_blocks = partial(make_in_torch_process, describe=_describe)
    storage = StorageLimits(total_bytes=None if max_storage is None else parse_size("--max-storage", max_storage))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if the shell that started it ignores interrupts
    opening = opened(folder, spec, ledger, blobs, make_initial_blocks, storage, start, presigned, tls is not None)
    with opening as run, alone_in(folder):
        for line in filter(None, (run.upgrade, run.coordinator.blobs.direct_access)):
            say(str(line))
        try:
            address, allowed = Address(host, port, public, tuple(peers or ())), Rate.per_second(rate)
            serve(run, address, tls, allowed, limits, announce=announce, say=say, leaderboard=leaderboard)
        except SystemExit:
            say("stopped: everything is saved, run the same command again to continue")
            raise


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A second coordinator would overwrite the invites of the first. The system frees the lock of a killed process."""
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"another coordinator runs in {folder}: stop it first, or choose another --dir; "
            f"several coordinators of one run need one --dir each"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _require_public(public: str | None, host: str) -> None:
    """What the invite names: workers must be able to reach it."""
    if public is None and host in EVERYWHERE:
        raise ConfigError(f'workers cannot reach --host "{host}": give the name of this machine with --public')
    if public is None:
        return
    try:
        ip_address(public)
    except ValueError:
        if re.fullmatch(r"[\w.-]+", public) is None:
            raise ConfigError(
                f'--public "{public}" is not the name or address of a machine: give for example example.org, '
                f"without http:// and port"
            ) from None


def _require_own_folder(folder: Path) -> None:
    """Two kinds of runs in one folder could not be told apart later."""
    if (folder / MANIFEST_FILE).is_file() and not (folder / LEDGER_FILE).is_file():
        raise ConfigError(
            f"{folder} holds a trained model, not the run of a coordinator: choose another --dir; "
            f"to go on from the model, add --from {folder}"
        )


def _describe(spec: RunSpec) -> None:
    from blocktrain.cli.shared.training import describe  # counts parameters, with torch

    describe(spec)


def _announce(folder: Path, invites: Invites) -> None:
    """Prints the dashboard's address with a viewer's access token, which may be shared and may end up in logs.
    The admin's is printed only on a terminal."""

    say(f"dashboard (read-only): {invites.viewer.page}")
    if sys.stderr.isatty():
        say(f"dashboard for the admin, with pause and invite: {invites.admin.page}")
    say(f"the admin's invite is in {folder / ADMIN_FILE}; workers join with:")
    print(f"blocktrain worker '{invites.worker}'", flush=True)
