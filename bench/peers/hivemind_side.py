"""hivemind's side: worker processes, each with a DHT node and a DecentralizedAverager, that average their steps in one
group of all, over its own p2p daemons. There is no central process.

    python hivemind_side.py drive CELL
    python hivemind_side.py work CELL NUMBER PEERS      PEERS: addresses of worker 0, joined by commas

The averager is used as hivemind's own optimiser uses it: it averages what changed, and the worker applies it.
Next: work.py, what is averaged."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import hivemind
import torch
from hivemind import compression
from hivemind.averaging import DecentralizedAverager
from work import Cell, Leader, Led, Memory, error_of_step, start, step, trained_for, write_result

CODECS = {
    "fp32": compression.NoCompression,
    "fp16": compression.Float16Compression,
    "uniform8bit": compression.Uniform8BitQuantization,
    "quantile8bit": compression.Quantile8BitQuantization,
    "blockwise8bit": compression.BlockwiseQuantization,  # needs bitsandbytes
}
MATCHMAKING = {"min_matchmaking_time": 1.0, "request_timeout": 0.5}  # seconds; a full group does not wait for them
STEP_TIMEOUT_S = 120.0


def work(cell: Cell, number: int, initial_peers: list[str]) -> None:
    dht = hivemind.DHT(initial_peers=initial_peers, start=True, tls=False, use_relay=False, auto_nat=False)
    led = Led()
    led.say({"addresses": [str(address) for address in dht.get_visible_maddrs()]})
    before = start(cell)
    averager = DecentralizedAverager(
        [torch.zeros(shape) for shape in cell.shapes.values()],
        dht,
        start=True,
        prefix="peers",
        target_group_size=cell.workers,
        min_group_size=cell.workers,
        compression=CODECS[cell.codec](),
        **MATCHMAKING,
    )
    trained = trained_for(cell, number)
    for round_number in range(cell.rounds + 1):
        own = {} if trained else step(number, round_number, cell.shapes)
        led.ready(round_number)
        if trained:
            own = {name: array - before[name] for name, array in trained.weights(before).items()}
        with averager.get_tensors() as tensors:
            for tensor, array in zip(tensors, (own[name] for name in cell.shapes), strict=True):
                tensor.copy_(torch.from_numpy(array))
        gathered = averager.step(timeout=STEP_TIMEOUT_S)
        with averager.get_tensors() as tensors:
            after = {name: before[name] + tensor.numpy() for name, tensor in zip(cell.shapes, tensors, strict=True)}
        led.done(round_number)
        if gathered is None or len(gathered) != cell.workers:
            raise RuntimeError(f"round {round_number} averaged {len(gathered or ())} of {cell.workers} workers")
        if trained:
            led.say({"error": trained.loss(after) if number == 0 else 0.0})
        else:
            led.say({"error": error_of_step(before, after, cell.workers, round_number)})
        before = after
    led.say({"end": True})
    averager.shutdown()
    dht.shutdown()


def settings(cell: Cell) -> dict[str, Any]:
    return {
        "hivemind": version("hivemind"),
        "torch": torch.__version__,
        "target_group_size": cell.workers,
        "compression": CODECS[cell.codec].__name__,
        "tls": False,
        **MATCHMAKING,
    }


def drive(cell: Cell) -> None:
    command = [sys.executable, __file__, "work", str(cell)]
    environment = {"OMP_NUM_THREADS": "1"}
    with Leader([[*command, "0", ""]], environment) as first:
        (addresses,) = first.hear("addresses")
        others = [[*command, str(number), ",".join(addresses)] for number in range(1, cell.workers)]
        with Leader(others, environment) as leader:
            leader.hear("addresses")
            leader.processes.insert(0, first.processes[0])
            groups = {f"worker {n}": [process.pid] for n, process in enumerate(leader.processes)}
            with Memory(lambda: groups) as memory:
                measured, errors = leader.run(cell.rounds)
            leader.hear("end")
    write_result(cell, measured, errors, memory, settings(cell))


if __name__ == "__main__":
    action, cell_text, *rest = sys.argv[1:]
    if action == "work":
        work(Cell.read(cell_text), int(rest[0]), [address for address in rest[1].split(",") if address])
    else:
        drive(Cell.read(cell_text))
