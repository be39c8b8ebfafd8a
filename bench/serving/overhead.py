"""What HTTP, gateway and three stages add to the same sweep in one process, without any distance: the two alternate, so
that what else runs on the machine troubles both alike. Next: report.py."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from blocktrain.serve.decode.request import Request
from blocktrain.serve.segment.local import LocalForward
from blocktrain.serve.segment.segment import Segment
from serving.modes import Chain, write
from serving.stages import address_of, blocktrain_process
from shared.experiment import cpu_s

TIMEOUT_S = 300.0


def gateway_overhead(model: Path, shares: Sequence[range], chain: Chain, requests: Sequence[Request]) -> dict[str, Any]:
    """Seconds of each request both ways, by the clock and of the processors; added shares are medians of ratios, less
    one. Processor time is the fairer one where the machine is busy with other things."""
    local = LocalForward(*(Segment.open(model, list(share)) for share in shares))
    stages = ",".join(chain.addresses)
    with (
        blocktrain_process("gateway", "--stages", stages, "--port", "0") as process,
        httpx.Client(base_url=address_of(process), timeout=TIMEOUT_S) as client,
    ):
        _ask(client, requests[0])  # warms up
        asyncio.run(write(local, requests[0]))
        here, there = Costs(time.process_time), Costs(lambda: cpu_s(process.pid) + chain.cpu_s())
        for request in requests:
            with here.of_one():
                asyncio.run(write(local, request))
            with there.of_one():
                _ask(client, request)
    ratios = [served / alone for served, alone in zip(there.seconds, here.seconds, strict=True)]
    return {
        "in_process_seconds": here.seconds,
        "gateway_seconds": there.seconds,
        "in_process_cpu_seconds": here.cpu_seconds,
        "gateway_cpu_seconds": there.cpu_seconds,
        "output_bytes": requests[0].max_tokens,
        "added_share": statistics.median(ratios) - 1,
        "added_share_of_fastest": min(there.seconds) / min(here.seconds) - 1,
        "added_cpu_share": sum(there.cpu_seconds) / max(sum(here.cpu_seconds), 1e-9) - 1,
        "load": os.getloadavg(),
    }


class Costs:
    """Of one request after the other."""

    def __init__(self, cpu_clock: Callable[[], float]) -> None:
        self._cpu_clock = cpu_clock
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    @contextmanager
    def of_one(self) -> Iterator[None]:
        began_s, cpu_began_s = time.perf_counter(), self._cpu_clock()
        yield
        self.seconds.append(time.perf_counter() - began_s)
        self.cpu_seconds.append(self._cpu_clock() - cpu_began_s)


def _ask(client: httpx.Client, request: Request) -> None:
    order = {
        "prompt": request.prompt.decode(errors="replace"),
        "max_tokens": request.max_tokens,
        "mode": request.mode.value,
        "candidates": request.candidates,
        "seed": request.seed,
    }
    client.post("/completions", json=order).raise_for_status()
