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
from blocktrain.cli.machine import parse_size
from blocktrain.cli.options import (
    Changes,
    CorpusSource,
    From,
    Host,
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
    read_spec,
    warn_about_text,
)
from blocktrain.errors import ConfigError
from blocktrain.http.limits import HttpLimits
from blocktrain.io.private import LEDGER_FILE, MANIFEST_FILE
from blocktrain.wire.invite import ADMIN_FILE, parse_address

if TYPE_CHECKING:
    from blocktrain.spec import RunSpec
    from blocktrain.start_model import StartModel
    from blocktrain.swarm.coordinator.server import Invites

EVERYWHERE = ("0.0.0.0", "::", "")

RunFolder = Annotated[
    Path, typer.Option("--dir", metavar="DIR", help="Directory of the run. The same command continues it.")
]
Port = Annotated[
    int, typer.Option(metavar="N", min=0, max=65535, help="Port; 0 is any free port, kept after restarts.")
]
PublicName = Annotated[
    str | None, typer.Option(metavar="HOST", help="Host name for workers, if it differs from --host.")
]
Peers = Annotated[
    list[str] | None,
    typer.Option("--peer", metavar="HOST:PORT", help="Another coordinator of the run, for the invite. Repeatable."),
]
LedgerPlace = Annotated[str | None, typer.Option(metavar="URL", help="PostgreSQL database, instead of DIR/ledger.db.")]
BlobsPlace = Annotated[
    str | None, typer.Option(metavar="URL", help="Bucket (s3://, gs://, az://), instead of DIR/blobs.")
]
ShowLeaderboard = Annotated[
    bool,
    typer.Option("--leaderboard", help="Show contributions to everybody, without an access token, at /leaderboard."),
]
RequestRate = Annotated[
    float,
    typer.Option(metavar="N", min=0.1, help="Requests per second per address and access token."),
]
MaxStorage = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Blobs and uploads take at most this much, e.g. 20GB. Default: the disk."),
]
TlsSelfSigned = Annotated[
    bool, typer.Option("--tls-self-signed", help="Make a certificate. The invite contains its fingerprint.")
]
WithoutTls = Annotated[
    bool, typer.Option("--insecure", help="Allow other machines without TLS. Only on a network you trust.")
]


def coordinator(
    folder: RunFolder,
    toml: Toml = None,
    preset: Preset = None,
    corpus: CorpusSource = None,
    seed: Seed = None,
    changes: Changes = None,
    start_from: From = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    public: PublicName = None,
    peers: Peers = None,
    ledger: LedgerPlace = None,
    blobs: BlobsPlace = None,
    presigned: Presigned = None,
    leaderboard: ShowLeaderboard = False,
    rate: RequestRate = 300.0,
    max_storage: MaxStorage = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_self_signed: TlsSelfSigned = False,
    insecure: WithoutTls = False,
    max_connections: MaxConnections = HttpLimits.max_connections,
    max_per_address: MaxPerAddress = HttpLimits.max_connections_per_address,
    trusted_proxies: TrustedProxies = None,
) -> None:
    """Coordinate a swarm of workers and print its invite.

    It may be killed at any time: the same command, or --dir alone, continues the run. Ctrl-C or SIGTERM stops it."""
    limits = http_limits(max_connections, max_per_address, trusted_proxies)
    _require_public(public, host)
    with_tls = _with_tls(host, tls_cert, tls_key, tls_self_signed, insecure)
    for peer in peers or ():
        parse_address(peer, with_tls)
    _require_own_folder(folder)

    from blocktrain.cli.shared.certificates import tls_files
    from blocktrain.http.rate_limit import Rate
    from blocktrain.swarm.coordinator.quotas import StorageLimits
    from blocktrain.swarm.coordinator.server import Address, opened, serve
    from blocktrain.swarm.initial_blocks import make_in_torch_process, open_in_torch_process

    start = None if start_from is None else open_in_torch_process(start_from)
    is_known = ledger is not None or (folder / LEDGER_FILE).is_file()
    spec = _given_spec(is_known, toml, preset, corpus, seed, changes, start)
    tls = tls_files(folder, public or host, tls_cert, tls_key) if with_tls else None
    make_initial_blocks, announce = partial(make_in_torch_process, describe=_describe), partial(_announce, folder)
    storage = StorageLimits(total_bytes=None if max_storage is None else parse_size("--max-storage", max_storage))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also if the shell that started it ignores interrupts
    opening = opened(folder, spec, ledger, blobs, make_initial_blocks, storage, start, presigned, with_tls)
    with opening as run, alone_in(folder):
        for line in filter(None, (run.upgrade, run.coordinator.blobs.direct_access)):
            say(str(line))
        address, allowed = Address(host, port, public, tuple(peers or ())), Rate.per_second(rate)
        try:
            serve(run, address, tls, allowed, limits, announce=announce, say=say, leaderboard=leaderboard)
        except SystemExit:
            say("stopped: everything is saved, run the same command again to continue")
            raise


def _given_spec(
    is_known: bool,
    toml: Path | None,
    preset: str | None,
    corpus: str | None,
    seed: int | None,
    changes: list[str] | None,
    start: StartModel | None,
) -> RunSpec | None:
    """None: the run goes on with the settings in its ledger."""
    no_settings = all(each is None for each in (toml, preset, corpus, seed, start)) and not changes
    if is_known and no_settings:
        return None
    spec = read_spec(toml, preset, corpus, seed, changes, start)
    warn_about_text(spec)
    return spec


def _with_tls(host: str, cert: Path | None, key: Path | None, self_signed: bool, insecure: bool) -> bool:
    """Whether these options are for TLS; refuses those that contradict each other or leave it out where it is
    needed."""
    from blocktrain.cli.shared.certificates import check_tls_files, require_tls

    if cert and self_signed:
        raise ConfigError("--tls-cert and --tls-self-signed exclude each other: give only one of them")
    check_tls_files(cert, key)
    with_tls = bool(cert) or self_signed
    require_tls(host, with_tls, insecure, "give --tls-self-signed, or --tls-cert and --tls-key")
    return with_tls


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
