"""A swarm in one process, for notebooks, examples and tests: a real coordinator behind HTTP on a free port of this
machine, and real workers in threads. Nothing is left when it ends.
Next: coordinator/server.py, which it runs; worker/worker.py."""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.data.corpus import load_corpus, with_tokenizer
from blocktrain.errors import ConfigError
from blocktrain.http.limits import LOOPBACK
from blocktrain.model.stack import BlockModel
from blocktrain.spec import RunSpec
from blocktrain.start_model import StartModel, require_start
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.server import served_here
from blocktrain.swarm.coordinator.setup import begin_blocks, found_run
from blocktrain.swarm.initial_blocks import initial_blocks_here
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.export import export_model
from blocktrain.swarm.worker.worker import Worker, WorkReport
from blocktrain.train.run import load_model
from blocktrain.train.start import open_start
from blocktrain.wire.invite import Invite

ENOUGH_BYTES = 2**52  # the workers share the memory of this machine: no lease is refused for lack of it
LONGEST_WAIT_S = 0.25  # until a worker asks again: on one machine that costs nothing
NAP_S = 0.05  # between two looks whether the workers are done; Ctrl-C interrupts it


class LocalSwarm:
    """Made by `local_swarm`. Leaving the `with` block ends it.

    with local_swarm(preset("tiny"), workers=2) as swarm:
        swarm.wait()
        model = swarm.model()
    """

    def __init__(
        self,
        spec: RunSpec,
        workers: int,
        folder: Path | None,
        report: Callable[[str, WorkReport], None],
        start: StartModel | None = None,
    ) -> None:
        self._report, self._stopped, self._stack = report, threading.Event(), ExitStack()
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []
        with ExitStack() as opening:
            self.folder = folder or Path(opening.enter_context(tempfile.TemporaryDirectory(prefix="blocktrain-")))
            self.spec, self._invite = _open_run(spec, self.folder, opening, start)
            self._stack = opening.pop_all()
        for _ in range(workers):
            self.add_worker()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def invite(self) -> str:
        """For `blocktrain worker`, `status` and the like, from another terminal of this machine."""
        return str(self._invite)

    def add_worker(self, name: str | None = None) -> None:
        name = name or f"worker-{len(self._threads) + 1}"
        thread = threading.Thread(target=self._work, args=(name,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Returns True when the run is finished, or False after `timeout_s`. Raises a worker's error."""
        if not self._threads:
            raise ConfigError("this swarm has no workers, so it would never end: add_worker() first")
        give_up_s = time.monotonic() + (threading.TIMEOUT_MAX if timeout_s is None else timeout_s)
        while any(thread.is_alive() for thread in self._threads) and not self._errors:
            if time.monotonic() > give_up_s:
                return False
            self._stopped.wait(NAP_S)
        if self._errors:
            raise self._errors[0]
        return True

    def status(self) -> dict[str, Any]:
        """What `blocktrain status --json` prints."""
        with self._client() as client:
            return client.status()

    def model(self) -> BlockModel:
        """The newest version of every block, composed."""
        with self._client() as client:
            run = export_model(client, client.manifest(), self.folder / "model", self.folder / "home" / "blobs")
        return load_model(run)

    def stop(self) -> None:
        """Workers submit what they have trained; then the coordinator closes. Stopping again does nothing."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._stack.close()

    def _client(self) -> CoordinatorClient:
        return CoordinatorClient(self._invite)

    def _work(self, name: str) -> None:
        def sleep(seconds: float) -> None:
            self._stopped.wait(min(seconds, LONGEST_WAIT_S))

        try:
            with CoordinatorClient(self._invite, sleep=sleep) as client:
                Worker(
                    client,
                    self.folder / "home",
                    key=Ed25519PrivateKey.generate(),
                    name=name,
                    memory_bytes=ENOUGH_BYTES,
                    report=lambda report: self._report(name, report),
                    stop=self._stopped.is_set,
                    sleep=sleep,
                ).run()
        except Exception as error:
            self._errors.append(error)


def local_swarm(
    spec: RunSpec,
    *,
    workers: int = 2,
    folder: str | Path | None = None,
    report: Callable[[str, WorkReport], None] = lambda name, report: None,
    start: str | Path | None = None,
) -> LocalSwarm:
    """Start a run on this machine, serve it, and train it with this number of workers. Without a folder it leaves no
    files; with a folder it can be continued there. `report` gets what each worker does, in the worker's thread. `start`
    is the directory of a model that the run starts from."""
    return LocalSwarm(spec, workers, Path(folder) if folder else None, report, open_start(start) if start else None)


def _open_run(
    spec: RunSpec, folder: Path, opening: ExitStack, start: StartModel | None = None
) -> tuple[RunSpec, Invite]:
    spec = start.begin(spec) if start else spec
    corpus = load_corpus(spec.corpus, spec.model.context)
    spec = with_tokenizer(spec, corpus)
    spec = start.fitted(spec) if start else spec
    require_start(spec, start)
    folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(folder / "ledger.db")
    opening.callback(ledger.close)
    blobs, access_token = Blobs(folder / "blobs"), secrets.token_urlsafe(24)
    found_run(spec, corpus, ledger, blobs, time.time())
    initial_block = initial_blocks_here(spec, start)
    begin_blocks(spec, ledger, blobs, initial_block, time.time())
    ledger.add_access_token(f"local-{access_token[:8]}", "admin", access_token, time.time())
    coordinator = Coordinator(spec, ledger, blobs, initial_block=initial_block)
    port = opening.enter_context(served_here(coordinator, ledger))
    return spec, Invite(LOOPBACK, port, access_token)
