"""What blocktrain coordinator does: open the state of a run, listen, print the invite, serve, keep time.
Next: swarm/coordinator/routes.py, the routes; swarm/coordinator/coordinator.py, the decisions.

    DIR/
      ledger.db, blobs/       the run (or elsewhere: --ledger, --blobs)
      newborn/                its untrained blocks, made when it is first served here
      invite, invite-admin,   address and token, for their owner's eyes only; the ledger has just the hashes of tokens
      invite-viewer
      tls-cert.pem, -key.pem  of --tls-self-signed (certificates.py)
"""

from __future__ import annotations

import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType

from blocktrain.cli.console import say
from blocktrain.cli.shared.private import INVITE_FILE, LEDGER_FILE, read_private, write_private
from blocktrain.data.corpus import load_corpus
from blocktrain.errors import BlockTrainError, ConfigError, StorageError
from blocktrain.http import server as http_server
from blocktrain.http.rate_limit import Rate
from blocktrain.http.server import GRACE_S, Tls, listening
from blocktrain.io.allocator import keep_little_memory
from blocktrain.spec import RunSpec
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.routes import build_service
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.initial_blocks import elsewhere, newborn_in, raise_blocks
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import Role
from blocktrain.wire.invite import Invite, parse_invite

BLOBS_FOLDER, NEWBORN_FOLDER, ADMIN_FILE, VIEWER_FILE = "blobs", "newborn", "invite-admin", "invite-viewer"
TICK_S = 1.0


@dataclass(frozen=True)
class Address:
    host: str
    port: int  # 0: any
    public: str | None


@dataclass(frozen=True)
class OpenRun:
    folder: Path
    ledger: Ledger
    coordinator: Coordinator


@contextmanager
def opened(folder: Path, spec: RunSpec, ledger_url: str | None, blobs_url: str | None) -> Iterator[OpenRun]:
    """The run of this folder, founded when there is none yet; with other settings than it was founded with, refused."""
    corpus = load_corpus(spec.corpus, spec.model.context)
    _make_folder(folder)
    ledger = Ledger(ledger_url or folder / LEDGER_FILE)
    try:
        with elsewhere() as process:
            blobs = Blobs(blobs_url or folder / BLOBS_FOLDER)
            run = found_run(spec, corpus, ledger, blobs, time.time())
            process.submit(_describe, spec).result()
            newborn = folder / NEWBORN_FOLDER / run.spec_digest[:16]
            memory_bytes = process.submit(raise_blocks, spec, newborn).result()
        del corpus  # it is among the blobs now
        coordinator = Coordinator(
            spec, ledger, blobs, newborn=newborn_in(newborn), memory_bytes=lambda phase: memory_bytes[phase.index]
        )
        yield OpenRun(folder, ledger, coordinator)
    finally:
        ledger.close()


def serve(run: OpenRun, address: Address, tls: Tls | None, rate: Rate) -> None:
    """Until SIGTERM, which ends it with 0, or Ctrl-C, which ends it with 130."""
    keep_little_memory()
    before = signal.signal(signal.SIGTERM, _end)  # uvicorn raises the signal once more when it has closed
    try:
        port = _port(run.folder, address)
        with listening(address.host, port, "another coordinator of this run") as listener, _ticking(run):
            port = int(listener.getsockname()[1])
            invite = _print_invites(run, address.public or address.host, port, tls)
            http_server.serve(build_service(run.coordinator, run.ledger, rate, invite=invite), listener, tls=tls)
    except SystemExit:
        say("stopped: everything is saved, run the same command again to continue")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _describe(spec: RunSpec) -> None:
    from blocktrain.cli.shared.training import describe  # counts parameters, with torch

    describe(spec)


def _port(folder: Path, address: Address) -> int:
    """The one asked for, else that of the invite that workers have, else a free one."""
    known = known_invite(folder / INVITE_FILE)
    return address.port or (known.port if known else 0)


def _print_invites(run: OpenRun, host: str, port: int, tls: Tls | None) -> Invite:
    """The workers'. The dashboard's address is printed with a viewer's token, which may be handed on and end up in
    logs; with the admin's on a terminal only."""
    fingerprint = tls.fingerprint if tls else None
    invites = [
        _kept_invite(run, role, path, lambda token: Invite(host, port, token, tls is not None, fingerprint))
        for role, path in _INVITES
    ]
    worker, admin, viewer = invites
    say(f"dashboard: {viewer.page} (to look at)")
    if sys.stderr.isatty():
        say(f"dashboard for you, with pause and invite: {admin.page}")
    say(f"an admin's invite is in {run.folder / ADMIN_FILE}; workers join with:")
    print(f"blocktrain worker '{worker}'", flush=True)
    return worker


_INVITES: tuple[tuple[Role, str], ...] = (("worker", INVITE_FILE), ("admin", ADMIN_FILE), ("viewer", VIEWER_FILE))


def _kept_invite(run: OpenRun, role: Role, name: str, invite_with: Callable[[str], Invite]) -> Invite:
    """The one that is there while its token is good, at the present address; or else one with a new token. The file
    comes first: a kill between leaves a token that nobody knows, and the next start makes another."""
    path = run.folder / name
    known = known_invite(path)
    if known is not None and run.ledger.role_of(known.access_token) == role:
        invite = invite_with(known.access_token)
        if invite != known:
            write_private(path, f"{invite}\n".encode())
        return invite
    invite = invite_with(secrets.token_urlsafe(24))
    write_private(path, f"{invite}\n".encode())
    run.ledger.add_token(_free_name(run.ledger, role), role, invite.access_token, time.time())
    return invite


def known_invite(path: Path) -> Invite | None:
    """The invite in a file; what is none there is as good as nothing."""
    data = read_private(path)
    with suppress(ConfigError):
        return parse_invite(data.decode(errors="replace")) if data else None
    return None


def _free_name(ledger: Ledger, role: str) -> str:
    taken = {token.name for token in ledger.tokens() if token.revoked_s is None}
    return next(name for n in count(1) if (name := role if n == 1 else f"{role}-{n}") not in taken)


@contextmanager
def _ticking(run: OpenRun) -> Iterator[None]:
    """Rounds are merged beside the requests, which do not wait for it; deadlines are met without any; what happened is
    said."""
    stopped, due = threading.Event(), threading.Event()
    thread = threading.Thread(target=_tick_until, args=(run, stopped, due), name="ticks", daemon=True)
    run.coordinator.wake = due.set
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        due.set()
        thread.join(GRACE_S)


def _tick_until(run: OpenRun, stopped: threading.Event, due: threading.Event) -> None:
    """An error is one line, once while it lasts, and never the end."""
    said, newest = "", None
    while not stopped.is_set():
        due.clear()
        try:
            run.coordinator.tick()
            newest = _say_news(run.ledger, newest)
            said = ""
        except Exception as error:
            sentence = str(error) if isinstance(error, BlockTrainError) else f"unexpected {error!r}"
            if sentence != said:
                say(f"error: {' '.join(sentence.split())}")
            said = sentence
        due.wait(TICK_S)


def _say_news(ledger: Ledger, newest: int | None) -> int:
    """The events since the last time; at the start, none of those that are there."""
    events = ledger.events(after=newest or 0)
    if newest is not None:
        for event in events:
            say(f"{time.strftime('%H:%M:%S', time.localtime(event.at_s))} {event.kind} {event.text}")
    return events[-1].number if events else newest or 0


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made ({error.strerror}): choose another --dir") from None


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
