"""What does a round cost the coordinator in memory? The peak of a real coordinator's resident memory above its idle,
for rounds of a few and of many replicas: merging one update at a time, it must not grow with them.

Each number of replicas has a process of its own, and idle is before its first lease: what a process has once touched it
may keep. Updates come one after the other, or all at once, where every request under way takes memory of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from blocktrain.spec import RunSpec
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import TrainLease
from blocktrain.wire.safetensors import Tensors
from swarms.merging import FLOAT_BYTES
from swarms.processes import Member, num_parameters, phase_tensors, random_update, run_id, running_coordinator

MAX_GROWTH = 1.25  # of the peak, from the fewest replicas to the most: what allocators keep differs from run to run
PATIENCE_S, POLL_S = 300.0, 0.5


def memory_part(spec: RunSpec, replica_counts: Sequence[int], arrivals: Sequence[bool], folder: Path) -> dict[str, Any]:
    before = phase_tensors(spec)
    block_bytes = FLOAT_BYTES * num_parameters(before)
    rows = [
        memory_row(spec, before, replicas, at_once, folder / f"memory-{replicas}-{at_once}")
        for at_once in arrivals
        for replicas in replica_counts
    ]
    for row in rows:
        row["peak_of_block"] = row["peak_bytes"] / block_bytes
    return {
        "model": spec.model.model_dump(mode="json"),
        "update": spec.swarm.update,
        "block_bytes": block_bytes,
        "rows": rows,
        "growth": [{"at_once": at_once, "factor": growth(rows, at_once)} for at_once in arrivals],
    }


def growth(rows: Sequence[dict[str, Any]], at_once: bool) -> float:
    """The peak with the most replicas over that with the fewest."""
    of_kind = [row for row in rows if row["at_once"] == at_once]
    return float(of_kind[-1]["peak_bytes"] / of_kind[0]["peak_bytes"])


def memory_row(spec: RunSpec, before: Tensors, replicas: int, at_once: bool, folder: Path) -> dict[str, Any]:
    payloads = [random_update(before, spec, seed) for seed in range(replicas)]
    with running_coordinator(spec, folder) as coordinator:
        run = run_id(coordinator.invite)
        members = [Member(spec, run, f"member {n}") for n in range(replicas)]
        idle = coordinator.reset_peak()
        merged = hand_in(coordinator.invite, members, payloads, at_once)
        peak = coordinator.peak_bytes()
    return {
        "replicas": replicas,
        "at_once": at_once,
        "idle_bytes": idle,
        "peak_bytes": peak - idle,
        "merged": merged,
    }


def hand_in(invite: Invite, members: Sequence[Member], payloads: Sequence[bytes], at_once: bool) -> int:
    """One round; the number of updates that it merged."""
    with CoordinatorClient(invite, patience_s=PATIENCE_S) as client:
        leases = [client.lease(member.request) for member in members]
    with ThreadPoolExecutor(len(members) if at_once else 1) as pool:
        list(pool.map(lambda work: _send(invite, *work), zip(members, leases, payloads, strict=True)))
    with CoordinatorClient(invite, patience_s=PATIENCE_S) as client:
        return _merged(client, len(members))


def _merged(client: CoordinatorClient, expected: int) -> int:
    """How many updates the first round merged: a long merge may still go on when its last update has its receipt."""
    for _ in range(int(PATIENCE_S / POLL_S)):
        merged = len([entry for entry in client.contributions() if entry["update"]["merged_round"] == 0])
        if merged == expected:
            break
        time.sleep(POLL_S)
    return merged


def _send(invite: Invite, member: Member, lease: TrainLease, payload: bytes) -> None:
    with CoordinatorClient(invite, patience_s=PATIENCE_S) as client:
        client.submit(member.notice(lease, client.upload(payload, lease.lease)))
