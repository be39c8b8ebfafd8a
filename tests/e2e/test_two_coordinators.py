"""Two coordinators of one run: real processes on a real PostgreSQL and a real bucket, behind one invite. Faults come at
planned updates of one worker, which trains in this process. The database of one coordinator is behind a TCP proxy."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import RECEIPTS_FILE, Worker, WorkReport
from blocktrain.wire.invite import parse_invite
from services import free_ports

pytestmark = pytest.mark.timeout(300)  # its processes import torch, on a machine that may be busy
SETTINGS = ("train.steps=6", "swarm.round_steps=2", "swarm.evaluate_every=1000")


class Proxy:
    """Passes TCP connections on, until it is cut: then it breaks them all and takes no others."""

    def __init__(self, port: int) -> None:
        self._target, self._is_cut, self._open = port, False, set[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, is_cut: bool) -> None:
        self._is_cut = is_cut
        for each in list(self._open) if is_cut else ():
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut(True)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._is_cut:
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                for pair in ((client, server), (server, client)):
                    self._open.add(pair[0])
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.discard(source)
        source.close()


@pytest.fixture
def proxy(postgres: str) -> Iterator[Proxy]:
    port = urlsplit(postgres).port
    assert port is not None
    with closing(Proxy(port)) as proxy:
        yield proxy


class Pair:
    """The two coordinators, and what happens to them."""

    def __init__(
        self,
        start: Callable[..., Any],
        coordinator_of: Callable[..., list[object]],
        text: Path,
        folder: Path,
        ledgers: list[str],
        blobs: str,
    ) -> None:
        self._start, self._ports = start, free_ports(2)
        self._commands = [
            [
                *coordinator_of(text, folder / str(i), *SETTINGS),
                *("--ledger", ledgers[i], "--blobs", blobs),
                *("--port", self._ports[i], "--peer", f"127.0.0.1:{self._ports[1 - i]}"),
            ]
            for i in range(2)
        ]
        self._processes = [self.started(i) for i in range(2)]
        self.invite = parse_invite((folder / "0" / "invite").read_text())

    def started(self, i: int) -> Any:
        process = self._start(*self._commands[i])
        process.line_with("blocktrain worker")  # it listens
        return process

    def kill(self, i: int) -> None:
        self._processes[i].kill()
        self._processes[i].wait()

    def stop(self, i: int) -> None:
        self._processes[i].terminate()
        assert self._processes[i].wait() == 0

    def restart(self, i: int) -> None:
        self._processes[i] = self.started(i)


@pytest.mark.timeout(300)  # four coordinators start, one after the other
def test_kills_restarts_and_a_cut_from_the_database_cost_two_coordinators_nothing(
    tmp_path, text, start, coordinator_of, postgres, bucket, proxy
):
    through_proxy = postgres.replace(f":{urlsplit(postgres).port}/", f":{proxy.port}/")
    pair = Pair(start, coordinator_of, text, tmp_path, [through_proxy, postgres], bucket)
    faults: dict[int, list[Callable[[], None]]] = {
        1: [lambda: proxy.cut(True)],
        2: [lambda: proxy.cut(False), lambda: pair.kill(1)],
        4: [lambda: pair.restart(1), lambda: pair.stop(0)],
    }
    submitted: list[str] = []

    def report(work: WorkReport) -> None:
        assert work.kind != "refused", work.text
        if work.kind == "submitted":
            submitted.append(work.text)
            for fault in faults.pop(len(submitted), ()):
                fault()

    with CoordinatorClient(pair.invite, patience_s=math.inf) as client:
        key = Ed25519PrivateKey.generate()
        Worker(client, tmp_path / "home", key=key, name="w", memory_bytes=2**33, report=report).run()
    assert faults == {}
    receipts = [json.loads(line) for line in (tmp_path / "home" / RECEIPTS_FILE).read_text().splitlines()]
    assert len({receipt["coordinator"] for receipt in receipts}) == 2
    with closing(Ledger(postgres)) as ledger:
        merged = {each.update.id: each.update.merged_round is not None for each in ledger.contributions()}
        assert [merged[receipt["update"]] for receipt in receipts] == [True] * len(submitted)
        assert all(phase.finished for phase in ledger.consistent_manifest().phases)
        blobs = Blobs(bucket)
        for block in range(4):
            versions = ledger.versions(block)
            assert all(later.version == earlier.version + 1 for earlier, later in pairwise(versions))
            assert len({(each.phase, each.round) for each in versions}) == len(versions)  # each round is merged once
            blobs.get(versions[-1].sha256)
