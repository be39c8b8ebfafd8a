"""The coordinator as a server: opens the state of a run, keeps its invites, answers requests, and runs the loop beside
them. It prints nothing: `announce` and `say` get what people should read.
Next: routes.py, which answers requests; loop.py, which does what follows from them.

    DIR/
      ledger.db, blobs/       the run (or elsewhere: --ledger, --blobs)
      initial-blocks/         the tensors that training starts from, made when the run is first served here
      invite, invite-admin,   address and access token, readable by their owner only
      invite-viewer
      ledger-head             the hash of all acknowledged updates
      receipt-key             signs the receipts of updates
      tls-cert.pem, -key.pem  of --tls-self-signed
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import FrameType

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.data.corpus import load_corpus, with_tokenizer
from blocktrain.errors import ConfigError, StorageError
from blocktrain.http import server as http
from blocktrain.http.limits import HttpLimits
from blocktrain.http.rate_limit import Rate
from blocktrain.io.allocator import keep_little_memory
from blocktrain.io.private import LEDGER_FILE, read_private, write_private
from blocktrain.spec import RunSpec
from blocktrain.start_model import StartModel, require_start
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.initial_files import initial_blocks_folder, initial_blocks_in
from blocktrain.swarm.coordinator.quotas import StorageLimits
from blocktrain.swarm.coordinator.routes import build_service
from blocktrain.swarm.coordinator.setup import begin_blocks, continued_run, found_run, has_its_start, spec_of
from blocktrain.swarm.coordinator.watching.leaderboard import Leaderboard
from blocktrain.swarm.ledger.chain import HEAD_FILE, NotedHead
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.migrations.upgrading import Upgrade, upgrade_ledger
from blocktrain.swarm.ledger.records import Role
from blocktrain.wire.invite import ADMIN_FILE, INVITE_FILE, Invite, parse_address, parse_invite

BLOBS_FOLDER, VIEWER_FILE = "blobs", "invite-viewer"
RECEIPT_KEY_FILE = "receipt-key"

# Writes the initial blocks of a run to a folder, and returns the bytes of memory that training each phase takes.
MakeInitialBlocks = Callable[[RunSpec, Path, StartModel | None], Mapping[int, int]]


@dataclass(frozen=True)
class Address:
    host: str
    port: int  # 0: any
    public: str | None  # the name that workers reach it by, if it is another
    peers: tuple[str, ...] = ()  # HOST:PORT or HOST:PORT/SHA256 of the run's other coordinators, for the invite


@dataclass(frozen=True)
class OpenRun:
    folder: Path
    ledger: Ledger
    coordinator: Coordinator
    upgrade: Upgrade | None = None  # of a ledger of an older version


@dataclass(frozen=True)
class Invites:
    worker: Invite
    admin: Invite
    viewer: Invite


@contextmanager
def opened(
    folder: Path,
    spec: RunSpec | None,
    ledger_url: str | None,
    blobs_url: str | None,
    make_initial_blocks: MakeInitialBlocks,
    storage: StorageLimits | None = None,
    start: StartModel | None = None,
    presigned: bool | None = None,
    tls: bool = False,
) -> Iterator[OpenRun]:
    """The run of this folder, made when there is none yet. A run with other settings is refused; without settings the
    run goes on as it is, and its text is not read again. A new run begins with the blocks of `start`, if it is given.
    """
    corpus = load_corpus(spec.corpus, spec.model.context) if spec else None
    spec = with_tokenizer(spec, corpus) if spec and corpus else None
    spec = start.fitted(spec) if spec and start else spec
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made ({error.strerror}): choose another --dir") from None
    _require_ledger(folder, ledger_url)
    upgrade = upgrade_ledger(ledger_url or folder / LEDGER_FILE, backups=folder)
    ledger = Ledger(ledger_url or folder / LEDGER_FILE)
    try:
        if upgrade is not None:
            ledger.add_event("upgraded", str(upgrade), time.time())
        noted_head = NotedHead(folder / HEAD_FILE)
        _require_head(ledger, noted_head)
        blobs = Blobs(blobs_url or folder / BLOBS_FOLDER, presigned=presigned, tls=tls)
        run = found_run(spec, corpus, ledger, blobs, time.time()) if spec and corpus else continued_run(ledger)
        del corpus  # it is among the blobs now
        spec = spec_of(run)
        if not has_its_start(spec, ledger):
            require_start(spec, start)
        initial_blocks = initial_blocks_folder(folder, run.spec_digest)
        memory_bytes = make_initial_blocks(spec, initial_blocks, start)
        begin_blocks(spec, ledger, blobs, initial_blocks_in(initial_blocks), time.time())
        coordinator = Coordinator(
            spec,
            ledger,
            blobs,
            initial_block=initial_blocks_in(initial_blocks),
            memory_bytes=lambda phase: memory_bytes[phase.index],
            storage=storage,
            receipt_key=_receipt_key(folder / RECEIPT_KEY_FILE),
            noted_head=noted_head,
        )
        yield OpenRun(folder, ledger, coordinator, upgrade)
    finally:
        ledger.close()


def serve(
    run: OpenRun,
    address: Address,
    tls: http.Tls | None,
    rate: Rate,
    limits: HttpLimits | None = None,
    *,
    announce: Callable[[Invites], None],
    say: Callable[[str], None],
    leaderboard: bool = False,
) -> None:
    """Until SIGTERM, which raises SystemExit(0), or Ctrl-C, which raises KeyboardInterrupt. `announce` gets the invites
    when the port is known; `say` gets one line per event of the run. `leaderboard` is a page for everybody."""
    keep_little_memory()
    before = signal.signal(signal.SIGTERM, _end)  # uvicorn raises the signal once more when it has closed
    try:
        known = known_invite(run.folder / INVITE_FILE)  # workers have it: its port is kept if it can be
        port = address.port or (known.port if known else 0)
        with (
            http.listening(address.host, port, "another coordinator of this run") as listener,
            run.coordinator.loop.running(say),
        ):
            port = int(listener.getsockname()[1])
            invites = _kept_invites(run, address, port, tls)
            announce(invites)
            board = Leaderboard(spec_of(continued_run(run.ledger)), run.ledger, time.time) if leaderboard else None
            service = build_service(run.coordinator, run.ledger, rate, invite=invites.worker, leaderboard=board)
            http.serve(service, listener, tls=tls, limits=limits)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def served_here(coordinator: Coordinator, ledger: Ledger, tls: http.Tls | None = None) -> Iterator[int]:
    """The same from threads of this process, while the `with` block runs: for notebooks and tests. Gives the port, a
    free one of this machine."""
    service = build_service(coordinator, ledger)
    with coordinator.loop.running(), http.served_in_thread(service, tls=tls) as server:
        yield server.port


def _kept_invites(run: OpenRun, address: Address, port: int, tls: http.Tls | None) -> Invites:
    peers = [parse_address(peer, tls is not None) for peer in address.peers]

    def invite_with(access_token: str) -> Invite:
        host, fingerprint = address.public or address.host, tls.fingerprint if tls else None
        others = tuple(Invite(at, on, access_token, tls is not None, theirs) for at, on, theirs in peers)
        return Invite(host, port, access_token, tls is not None, fingerprint, others)

    return Invites(
        worker=_kept_invite(run, "worker", INVITE_FILE, invite_with),
        admin=_kept_invite(run, "admin", ADMIN_FILE, invite_with),
        viewer=_kept_invite(run, "viewer", VIEWER_FILE, invite_with),
    )


def _kept_invite(run: OpenRun, role: Role, name: str, invite_with: Callable[[str], Invite]) -> Invite:
    """The invite that is there while its access token is good, at the present address; or else one with a new token.
    The file comes first: a kill between leaves a token that nobody knows, and the next start makes another."""
    path = run.folder / name
    known = known_invite(path)
    if known is not None and run.ledger.role_of(known.access_token) == role:
        invite = invite_with(known.access_token)
        if invite != known:
            write_private(path, f"{invite}\n".encode())
        return invite
    invite = invite_with(secrets.token_urlsafe(24))
    write_private(path, f"{invite}\n".encode())
    run.ledger.add_access_token(_free_name(run.ledger, role), role, invite.access_token, time.time())
    return invite


def _require_ledger(folder: Path, ledger_url: str | None) -> None:
    """Blobs without their ledger are a run that lost it: founding another one beside them would hide that."""
    if ledger_url is not None or (folder / LEDGER_FILE).exists():
        return
    blobs = folder / BLOBS_FOLDER / BLOBS_FOLDER
    if blobs.is_dir() and any(blobs.iterdir()):
        raise StorageError(
            f"{folder} has blobs and no {LEDGER_FILE}: restore the ledger from a backup, or choose an empty --dir "
            f"for a new run"
        )


def _require_head(ledger: Ledger, noted: NotedHead) -> None:
    """The ledger must have every update that was acknowledged when the head was noted."""
    head = noted.read()
    if head is not None and ledger.chain_links().get(head.number, ("", ""))[1] != head.sha256:
        raise StorageError(
            f"the ledger at {ledger.database.where} is damaged: update {head.number} was acknowledged and is not in it "
            f"as it was. Restore the ledger from a backup; blocktrain verify lists what is wrong. To go on without "
            f"what was lost, remove {noted.path}"
        )


def _receipt_key(path: Path) -> Ed25519PrivateKey:
    """The key that signs receipts, made when the run is first served here."""
    if (data := read_private(path)) is None:
        key = Ed25519PrivateKey.generate()
        write_private(path, key.private_bytes_raw().hex().encode())
        return key
    try:
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(data.decode()))
    except ValueError:
        raise StorageError(f"{path} holds no key: restore it, or remove it and a new one is made") from None


def known_invite(path: Path) -> Invite | None:
    """The invite in a file; None if there is none."""
    data = read_private(path)
    with suppress(ConfigError):
        return parse_invite(data.decode(errors="replace")) if data else None
    return None


def _free_name(ledger: Ledger, role: str) -> str:
    taken = {token.name for token in ledger.access_tokens() if token.revoked_s is None}
    return next(name for n in count(1) if (name := role if n == 1 else f"{role}-{n}") not in taken)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
