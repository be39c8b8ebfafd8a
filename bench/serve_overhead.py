"""What HTTP, gateway and three stages add to the same sweep in one process, without any distance: the two alternate, so
that what else runs on the machine troubles both alike. Next: serve_report.py."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from blocktrain.serve.decode import Request
from blocktrain.serve.segment import LocalForward, Segment
from serve_modes import write
from stages import address_of, blocktrain_process

TIMEOUT_S = 300.0


def gateway_overhead(
    model: Path, shares: Sequence[range], stages: Sequence[str], requests: Sequence[Request]
) -> dict[str, Any]:
    """Seconds of each request both ways, and the median of their ratios less one."""
    local = LocalForward(*(Segment.open(model, list(share)) for share in shares))
    here: list[float] = []
    there: list[float] = []
    with (
        blocktrain_process("gateway", "--stages", ",".join(stages), "--port", "0") as process,
        httpx.Client(base_url=address_of(process), timeout=TIMEOUT_S) as client,
    ):
        for number, request in enumerate([requests[0], *requests]):  # the first warms up and is not counted
            pair = [
                _seconds(lambda request=request: asyncio.run(write(local, request))),  # type: ignore[misc]
                _seconds(lambda request=request: _ask(client, request)),  # type: ignore[misc]
            ]
            if number:
                here.append(pair[0])
                there.append(pair[1])
    ratios = [served / alone for served, alone in zip(there, here, strict=True)]
    return {
        "in_process_seconds": here,
        "gateway_seconds": there,
        "output_bytes": requests[0].max_bytes,
        "added_share": statistics.median(ratios) - 1,
        "added_share_of_medians": statistics.median(there) / statistics.median(here) - 1,
        "added_share_of_fastest": min(there) / min(here) - 1,
        "load": os.getloadavg(),
    }


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _ask(client: httpx.Client, request: Request) -> None:
    order = {
        "prompt": request.prompt.decode(errors="replace"),
        "max_tokens": request.max_bytes,
        "mode": request.mode.value,
        "candidates": request.candidates,
        "seed": request.seed,
    }
    client.post("/completions", json=order).raise_for_status()
