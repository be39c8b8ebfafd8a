"""A coordinator that takes in an update and merges it, in a real process that really kills itself at its n-th write;
for every n, until it survives. Started by test_merge_kills.py:

    python kill_at_every_write.py TEXT FOLDER    makes FOLDER/0, FOLDER/1, …: the state each left; prints how each ended
    python kill_at_every_write.py TEXT FOLDER LEDGER BLOBS    one state, for FOLDER/shared: after the death of the last,
                                                              each life is another coordinator of database and bucket

This process itself opens nothing: every life is a fork of it, which costs no imports."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.data.corpus import load_corpus
from blocktrain.io import files
from blocktrain.io.arrays import as_arrays
from blocktrain.model.block import build_block
from blocktrain.spec import RunSpec, preset
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.coordinator.storage.bucket import Bucket
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.signatures import sign
from blocktrain.wire.codecs.table import make_codec
from blocktrain.wire.messages import PROTOCOL_VERSION, Blob, LeaseRequest, TrainLease, UpdateNotice
from blocktrain.wire.safetensors import Array, decode
from blocktrain.wire.updates import encode_update

NOTICE, PLACE, NOW_S = "notice.json", "place.json", 1000.0


def spec_of(text: Path) -> RunSpec:
    return preset("tiny").with_(
        **{"corpus.source": str(text), "swarm.update": "fp32", "swarm.round_steps": 2, "swarm.outer": "nesterov"}
    )


def stores_of(folder: Path) -> tuple[Ledger, Blobs]:
    place = json.loads((folder / PLACE).read_text()) if (folder / PLACE).exists() else {}
    return Ledger(place.get("ledger", folder / "ledger.db")), Blobs(place.get("blobs", folder / "blobs"))


def coordinator_of(text: Path, folder: Path) -> tuple[Coordinator, Ledger]:
    (ledger, blobs), spec = stores_of(folder), spec_of(text)
    initial = partial(initial_block, spec)
    return Coordinator(spec, ledger, blobs, initial_block=initial, clock=lambda: NOW_S), ledger


@cache
def initial_block(spec: RunSpec, block: int) -> dict[str, Array]:
    return as_arrays(build_block(spec, block).state_dict())


def notice_in(folder: Path) -> UpdateNotice:
    return UpdateNotice.model_validate_json((folder / NOTICE).read_text())


def prepare(text: Path, folder: Path) -> None:
    """A run with one lease, whose update is uploaded and not yet announced."""
    (ledger, blobs), spec = stores_of(folder), spec_of(text)
    found_run(spec, load_corpus(spec.corpus, spec.model.context), ledger, blobs, NOW_S)
    ledger.close()
    coordinator, ledger = coordinator_of(text, folder)
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    me: dict[str, Any] = {"worker": key.public_key().public_bytes_raw().hex()}
    said = {"name": "w", "device": "cpu", "memory_bytes": 2**40, "steps_per_s": 1.0}
    coordinator.loop.settle()
    run = coordinator.info().run
    lease = coordinator.lease(sign(LeaseRequest(protocol=PROTOCOL_VERSION, nonce=1, **me, **said), key, run))
    assert isinstance(lease, TrainLease)
    before = {
        f"{x.block}.{name}": tensor
        for x in lease.trained
        for name, tensor in decode(coordinator.blobs.get(x.tensors.sha256))[0].items()
    }
    data = encode_update(before, {name: tensor - 1e-3 for name, tensor in before.items()}, make_codec("fp32"))
    payload = Blob(sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))
    coordinator.intake.receive(lease.lease, payload.sha256, 0, len(data), data)
    shapes = {name: tuple(tensor.shape) for name, tensor in before.items()}
    done = {"steps": lease.steps, "tokens": lease.steps * spec.step_tokens, "loss": 5.0}
    notice = sign(
        UpdateNotice(lease=lease.lease, tensors=shapes, payload=payload, **me, **done), key, coordinator.info().run
    )
    (folder / NOTICE).write_text(notice.model_dump_json())
    ledger.close()


def die_at(write: int, ledger: Ledger) -> None:
    """SIGKILL at that one of the moments before a file is synced, before and after it is renamed or put into a bucket,
    before a transaction is committed."""
    moments = count()

    def moment() -> None:
        if next(moments) == write:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(real: Callable[..., Any], after: bool) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            moment()
            result = real(*args)
            if after:
                moment()
            return result

        return call

    files.os.fsync, files.os.replace = watched(os.fsync, after=False), watched(os.replace, after=True)
    if not ledger.database.is_sqlite:
        Bucket.write = watched(Bucket.write, after=True)  # type: ignore[method-assign]
    ledger.database.watch(commit=lambda writes, synced: moment() if writes else None)


def live(text: Path, folder: Path, write: int) -> None:
    coordinator, ledger = coordinator_of(text, folder)
    die_at(write, ledger)
    coordinator.update(notice_in(folder))
    coordinator.loop.settle()
    ledger.close()


def in_a_fork(action: Callable[[], None]) -> int:
    """How it ended: 0, or the negative number of the signal."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        action()
        code = 0
    finally:
        os._exit(code)


def main(text: Path, folder: Path, *places: str) -> None:
    for block in spec_of(text).phases[0].blocks:
        initial_block(spec_of(text), block)
    prepared, ended = folder / "prepared", list[int]()
    prepared.mkdir(parents=True)
    if places:
        prepared = prepared.rename(folder / "shared")
        (prepared / PLACE).write_text(json.dumps(dict(zip(("ledger", "blobs"), places, strict=True))))
    assert in_a_fork(lambda: prepare(text, prepared)) == 0
    while not ended or ended[-1] < 0:
        life = prepared if places else folder / str(len(ended))
        if not places:
            shutil.copytree(prepared, life)
        ended.append(in_a_fork(lambda life=life: live(text, life, write=len(ended))))  # type: ignore[misc]
    print(json.dumps(ended))  # noqa: T201 (for the test that started it)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
