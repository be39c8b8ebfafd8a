"""Where does a round go? One round at a time, every worker's part after the other, through the real client, server,
coordinator and ledger in one process, with everything counted: requests, statements, transactions, those of them that
write and are synced, files that are synced, bytes hashed, written, read and decoded, and processor time. Beside it
the least that the same bytes can cost: a bare asyncio server that hashes each update, writes it to a synced file, and
sends the new version back.

    python bench/rounds.py [--sizes 1,10,100] [--workers 2,4,8] [--codecs fp32,int8,vector]

Counts are exact. Processor time is that of workers and coordinator together, without training.
Next: peers.py, the same rounds in seconds, beside other systems."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.data.corpus import load_corpus
from blocktrain.http.server import served_in_thread
from blocktrain.io.allocator import keep_freed_memory
from blocktrain.spec import RunSpec, preset
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.routes import build_service
from blocktrain.swarm.coordinator.setup import found_run
from blocktrain.swarm.initial_blocks import initial_blocks_here
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.signatures import public_half, sign
from blocktrain.swarm.worker.block_cache import BlockCache
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.codecs.table import codec_type, update_codec
from blocktrain.wire.error_feedback import ErrorFeedback
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import PROTOCOL_VERSION, Blob, LeaseRequest, TrainLease, UpdateNotice
from blocktrain.wire.safetensors import Array, flat
from blocktrain.wire.updates import EncodedUpdate, tensor_shapes
from peers import SIZES
from shared.experiment import RESULTS, machine, read_json, write_json
from swarms.rounds_report import BYTES, COUNTS, figures, section, table, verdicts

__all__ = ["figures", "main", "section", "table", "verdicts"]  # what page.py asks for

TOKEN = "a-token"
WARM_UP = 2  # rounds that are not counted: in the first one everything is downloaded
WRITES = ("INSERT", "UPDATE", "DELETE")


class Counting:
    """Counts what the whole process does while it is entered."""

    def __init__(self, ledger: Ledger, connections: Counter[str]) -> None:
        self.counts, self._ledger = connections, ledger

    @contextmanager
    def on(self) -> Iterator[None]:
        real, slices, thread = hashlib.sha256, EncodedUpdate.__init__, threading.local()

        def counted_hash(data: Any = b"", **options: Any) -> Any:
            self.counts["hashed"] += memoryview(data).nbytes
            return _CountedHash(real(data, **options), self.counts)

        def opened(update: EncodedUpdate, codec: Any, layout: Any, values: Any, from_course: bool) -> None:
            slices(update, codec, layout, _CountedValues(values, self.counts), from_course)

        def statement(sql: str) -> None:
            self.counts["statements"] += 1
            thread.writes = getattr(thread, "writes", False) or sql.lstrip().upper().startswith(WRITES)

        def commit(for_writing: bool, synced: bool) -> None:
            self.counts["transactions"] += 1
            self.counts["commits"] += synced and getattr(thread, "writes", False)
            thread.writes = False

        def counted_sync(sync: Callable[[int], None]) -> Callable[[int], None]:
            def counted(file: int) -> None:
                self.counts["syncs"] += 1
                sync(file)

            return counted

        self._ledger.database.watch(statement, commit)
        with (
            patch.object(hashlib, "sha256", counted_hash),
            patch.object(EncodedUpdate, "__init__", opened),
            patch.object(os, "fsync", counted_sync(os.fsync)),
            patch.object(os, "fdatasync", counted_sync(os.fdatasync)),
        ):
            yield

    def now(self) -> Counter[str]:
        lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return self.counts + Counter({"written": int(lines["wchar"]), "read": int(lines["rchar"])})


class _CountedHash:
    def __init__(self, hash: Any, counts: Counter[str]) -> None:
        self._hash, self._counts = hash, counts

    def update(self, data: Any) -> None:
        self._counts["hashed"] += memoryview(data).nbytes
        self._hash.update(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hash, name)


class _CountedValues:
    def __init__(self, values: Any, counts: Counter[str]) -> None:
        self._values, self._counts = values, counts

    def slice(self, begin: int, end: int) -> Any:
        self._counts["decoded"] += 4 * (end - begin)
        return self._values.slice(begin, end)


class Member:
    """A worker that is given its steps: it leases, fetches, encodes and sends as workers do."""

    def __init__(self, spec: RunSpec, client: CoordinatorClient, folder: Path, number: int) -> None:
        self._spec, self._client, self._key = spec, client, Ed25519PrivateKey.generate()
        self._nonces, self._run, self._number = count(1), client.run_info().run, number
        by_course = codec_type(spec.swarm.update).uses_course
        initial = initial_blocks_here(spec)
        shapes = {block: tensor_shapes(initial(block)) for block in range(spec.model.blocks)}
        self._cache = BlockCache(
            client, folder, shapes=shapes.__getitem__, make_initial=initial, keep_earlier=by_course
        )
        self._feedback = ErrorFeedback()
        noise, size = np.random.default_rng(number), max(math.prod(shape) for shape in shapes[0].values())
        self._noise = np.float32(1e-3) * noise.standard_normal(size, np.float32)

    def take_part(self) -> None:
        lease = self._client.lease(self._request, self._cache.held())
        assert isinstance(lease, TrainLease), lease
        published = flat(self._cache.trained(lease.trained))
        after = {name: self._moved(tensor) for name, tensor in self._feedback.start(published).items()}
        phase, earlier = self._spec.phases[lease.phase], self._cache.earlier(lease.trained)
        codec = update_codec(self._spec.swarm, phase.steps, lease.step_start + self._spec.swarm.round_steps)
        payload = self._feedback.compress(published, after, codec, earlier)
        self._cache.keep_payload(payload)

        def notice(blob: Blob) -> UpdateNotice:
            said = UpdateNotice(
                lease=lease.lease,
                worker=public_half(self._key),
                tensors=tensor_shapes(published),
                payload=blob,
                steps=lease.steps,
                tokens=lease.steps * self._spec.step_tokens,
                loss=5.0,
            )
            return sign(said, self._key, self._run)

        self._client.send(payload, lease.lease, notice)
        self._feedback.accepted(payload, published, after, earlier)

    def _request(self) -> LeaseRequest:
        said = LeaseRequest(
            protocol=PROTOCOL_VERSION,
            nonce=next(self._nonces),
            worker=public_half(self._key),
            name=f"worker-{self._number}",
            device="cpu",
            memory_bytes=2**40,
            steps_per_s=1.0,
        )
        return sign(said, self._key, self._run)

    def _moved(self, tensor: Array) -> Array:
        """Stands for training, which is no part of a round: the same noise again, one subtraction."""
        return np.asarray(tensor - self._noise[: tensor.size].reshape(tensor.shape))


def profile(spec: RunSpec, workers: int, rounds: int) -> dict[str, Any]:
    """The counts of one round, and its processor time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ledger, blobs, counts = Ledger(folder / "ledger.db"), Blobs(folder / "blobs"), Counter[str]()
        found_run(spec, load_corpus(spec.corpus, spec.model.context), ledger, blobs, 0.0)
        ledger.add_access_token("bench", "worker", TOKEN, 0.0)
        coordinator = Coordinator(spec, ledger, blobs, initial_block=initial_blocks_here(spec))
        counting, took = Counting(ledger, counts), []
        service = build_service(coordinator, ledger)

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            counts["requests"] += scope["type"] == "http"
            await service(scope, receive, send)

        with served_in_thread(counted) as server:
            invite = Invite("127.0.0.1", server.port, TOKEN)
            with CoordinatorClient(invite) as client:
                members = [Member(spec, client, folder / f"home-{n}", n) for n in range(workers)]
                coordinator.loop.settle()
                with counting.on():
                    for number in range(WARM_UP + rounds):
                        before, began_s = counting.now(), time.process_time()
                        for member in members:
                            member.take_part()
                        coordinator.loop.settle()
                        if number >= WARM_UP:
                            took.append((counting.now() - before, time.process_time() - began_s))
        middle = sorted(took, key=lambda each: each[1])[len(took) // 2]
        updates = [blobs.size(each.update.id) for each in ledger.contributions()][-1]
    return {**{key: middle[0][key] for key in COUNTS + BYTES}, "cpu_s": middle[1], "update_bytes": updates}


def limit_cpu_s(update_bytes: int, version_bytes: int, workers: int) -> float:
    """Processor time of a bare asyncio server and its clients for the same bytes."""
    with tempfile.TemporaryDirectory() as name:
        version, update = os.urandom(version_bytes), os.urandom(update_bytes)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            digest, path = hashlib.sha256(), Path(name) / f"{id(writer)}"
            with path.open("wb") as file:
                left = update_bytes
                while left and (chunk := await reader.read(min(left, 2**18))):
                    digest.update(chunk)
                    file.write(chunk)
                    left -= len(chunk)
                file.flush()
                os.fsync(file.fileno())
            writer.write(version)
            await writer.drain()
            writer.close()

        async def both() -> float:
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]

            async def take_part() -> None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(update)
                await writer.drain()
                while await reader.read(2**18):
                    pass
                writer.close()

            began_s = time.process_time()
            for _ in range(workers):
                await take_part()
            took_s = time.process_time() - began_s
            server.close()
            return took_s

        return min(asyncio.run(both()) for _ in range(3))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    as_list: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--sizes", type=as_list, default=["1", "10", "100"], help="megabytes: " + ", ".join(SIZES))
    parser.add_argument("--workers", type=as_list, default=["2", "4", "8"])
    parser.add_argument("--codecs", type=as_list, default=["fp32", "int8", "vector"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the smallest block, one round")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if options.quick:
        options.sizes, options.workers, options.rounds = ["0.1"], ["2"], 1
    keep_freed_memory()
    path = options.out / "rounds.json"
    for size in options.sizes:
        for workers in map(int, options.workers):
            for codec in options.codecs:
                row = _row(size, workers, codec, options.rounds)
                document = read_json(path) | {"machine": machine()}
                document.setdefault("rows", {})[f"{size} MB, {workers} workers, {codec}"] = row
                write_json(path, document)
    print(table(read_json(path)))


def _row(size: str, workers: int, codec: str, rounds: int) -> dict[str, Any]:
    shape = {"model.width": SIZES[size].width, "model.blocks": 1, "model.layers": SIZES[size].layers}
    swarm = {
        "swarm.update": codec,
        "swarm.download": "fp32" if codec == "fp32" else preset("tiny").swarm.download,
        "swarm.min_updates": workers,
        "swarm.round_steps": 1,
        "swarm.evaluate_every": 10**6,
        "swarm.deadline_floor_s": 600.0,
        "train.steps": 10**4,
    }
    row = profile(preset("tiny").with_(**shape, **swarm), workers, rounds)
    version_bytes = sum(4 * tensor.size for tensor in initial_blocks_here(preset("tiny").with_(**shape))(0).values())
    down_bytes = version_bytes if codec == "fp32" else row["update_bytes"]
    row |= {"workers": workers, "version_bytes": version_bytes}
    return row | {"limit_cpu_s": limit_cpu_s(row["update_bytes"], down_bytes, workers)}


if __name__ == "__main__":
    main()
