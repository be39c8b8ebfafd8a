"""Flower's side by its older way, `start_server` and `start_client`: one server process, one process a worker, a gRPC
stream between, no polling and no process a message. Deprecated since Flower 1.13, and its fastest. Next: work.py.

    python flower_grpc_side.py drive CELL
    python flower_grpc_side.py serve CELL PORT
    python flower_grpc_side.py work CELL PORT NUMBER"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from work import (
    Cell,
    Memory,
    Rounds,
    await_open,
    error_of_step,
    free_port,
    loopback_bytes,
    start,
    started,
    step,
    trained_for,
    write_result,
)

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
from flwr.client import NumPyClient, start_client
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg

DTYPES = {"fp32": np.float32, "fp16": np.float16}
MAX_MESSAGE_BYTES = 2**30


class Averaging(FedAvg):
    """FedAvg over all workers, timed from sending the tensors to having their mean."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.measured, self.errors = cell, Rounds(), list[float]()
        self.published, self.trained = start(cell), trained_for(cell, 0)
        super().__init__(
            fraction_fit=1.0,
            min_fit_clients=cell.workers,
            min_available_clients=cell.workers,
            fraction_evaluate=0.0,
            initial_parameters=ndarrays_to_parameters(self._cast()),
            on_fit_config_fn=lambda server_round: {"round": server_round - 1},
        )

    def _cast(self) -> list[Any]:
        return [array.astype(DTYPES[self.cell.codec], copy=False) for array in self.published.values()]

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        client_manager.wait_for(self.cell.workers)
        self._began = loopback_bytes(), time.perf_counter()
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> tuple[Any, dict[str, Any]]:
        if failures or len(results) != self.cell.workers:
            raise RuntimeError(f"{len(results)} of {self.cell.workers} workers answered: {failures}")
        before, began_s = self._began
        mean = {name: np.zeros(shape, np.float32) for name, shape in self.cell.shapes.items()}
        for _, reply in results:
            for name, array in zip(mean, parameters_to_ndarrays(reply.parameters), strict=True):
                mean[name] += array.astype(np.float32, copy=False) / np.float32(self.cell.workers)
        fp16 = self.cell.codec == "fp16"  # the step alone was sent
        after = {name: self.published[name] + mean[name] for name in mean} if fp16 else mean
        self.measured.seconds.append(time.perf_counter() - began_s)
        self.measured.loopback_bytes.append(loopback_bytes() - before)
        if self.trained:
            self.errors.append(self.trained.loss(after))
        else:
            self.errors.append(error_of_step(self.published, after, self.cell.workers, server_round - 1))
        self.published = after
        return ndarrays_to_parameters(self._cast()), {}


class Adding(NumPyClient):
    def __init__(self, cell: Cell, number: int) -> None:
        self.cell, self.number, self.trained = cell, number, trained_for(cell, number)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        if self.trained:
            after = self.trained.weights(dict(zip(self.cell.shapes, parameters, strict=True)))
            return [after[name] for name in self.cell.shapes], 1, {}
        own = step(self.number, int(config["round"]), self.cell.shapes)
        if self.cell.codec == "fp16":
            return [array.astype(np.float16) for array in own.values()], 1, {}
        return [array + own[name] for name, array in zip(own, parameters, strict=True)], 1, {}


def serve(cell: Cell, port: str) -> None:
    averaging = Averaging(cell)
    start_server(
        server_address=f"127.0.0.1:{port}",
        config=ServerConfig(num_rounds=cell.rounds + 1),
        strategy=averaging,
        grpc_max_message_length=MAX_MESSAGE_BYTES,
    )
    measured = averaging.measured
    said = {"seconds": measured.seconds, "loopback_bytes": measured.loopback_bytes, "errors": averaging.errors}
    (Path(cell.folder) / "said.json").write_text(json.dumps(said))


def work(cell: Cell, port: str, number: int) -> None:
    import_module("torch")  # as every worker has it that trains: it is a large part of a process's memory
    start_client(
        server_address=f"127.0.0.1:{port}",
        client=Adding(cell, number).to_client(),
        insecure=True,
        grpc_max_message_length=MAX_MESSAGE_BYTES,
    )


def drive(cell: Cell) -> None:
    port = str(free_port())
    command = [sys.executable, __file__]
    with ExitStack() as stack:
        server = stack.enter_context(started([*command, "serve", str(cell), port]))
        await_open(int(port), server)  # a worker that comes before gives up
        workers = [
            stack.enter_context(started([*command, "work", str(cell), port, str(number)]))
            for number in range(cell.workers)
        ]
        groups = {"central": [server.pid], **{f"worker {n}": [worker.pid] for n, worker in enumerate(workers)}}
        with Memory(lambda: groups) as memory:
            if status := server.wait():
                raise RuntimeError(f"the server ended with {status}")
    found = json.loads((Path(cell.folder) / "said.json").read_text())
    measured = Rounds(found["seconds"], found["loopback_bytes"])
    settings = {"flwr": version("flwr"), "numpy": np.__version__, "way": "start_server, start_client (deprecated)"}
    write_result(cell, measured, found["errors"], memory, settings)


if __name__ == "__main__":
    action, cell_text, *rest = sys.argv[1:]
    if action == "serve":
        serve(Cell.read(cell_text), rest[0])
    elif action == "work":
        work(Cell.read(cell_text), rest[0], int(rest[1]))
    else:
        drive(Cell.read(cell_text))
