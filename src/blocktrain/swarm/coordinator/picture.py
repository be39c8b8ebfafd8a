"""Picture: what each block and each worker is doing, said for people. Pure: the facts and the time are arguments.
Next: watching.py, which shows it; rounds.py, whose words these are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from blocktrain.spec import RunSpec
from blocktrain.swarm.ledger.records import EvaluationLease, PhaseRecord, RoundRecord, Worker
from blocktrain.swarm.policy.rounds import Lease, lateness

PRESENT_S = 300.0  # since a worker was heard of
BlockState = Literal["unborn", "scaffold", "training", "waiting", "frozen"]
Held = Mapping[str, tuple[Lease, RoundRecord]]  # worker: its newest lease, and the round of it


def block_pictures(spec: RunSpec, phases: Iterable[PhaseRecord], versions: Mapping[int, int]) -> list[dict[str, Any]]:
    """Every block in the order that the state flows through them."""
    opened = {record.phase: record.finished for record in phases}
    return [
        {
            "block": block,
            "layers": spec.model.layers_of(block),
            "version": versions.get(block),
            "state": block_state(spec, block, opened, born=block in versions),
        }
        for block in range(spec.model.blocks)
    ]


def block_state(spec: RunSpec, block: int, opened: Mapping[int, bool], born: bool) -> BlockState:
    """`opened` says of every phase that was opened whether it is finished. A block that is trained along, and has a
    phase of its own to come, is a scaffold."""
    if not born:
        return "unborn"
    unfinished = [phase for phase in spec.phases if block in phase.blocks and not opened.get(phase.index, False)]
    at_work = [phase for phase in unfinished if phase.index in opened]
    if not unfinished:
        return "frozen"
    if not at_work:
        return "waiting"
    return "training" if len(at_work) == len(unfinished) or any(x.block == block for x in at_work) else "scaffold"


def newest_leases(records: Iterable[RoundRecord]) -> Held:
    held: dict[str, tuple[Lease, RoundRecord]] = {}
    for record in records:
        for lease in record.round.leases:
            if lease.worker not in held or held[lease.worker][0].granted_s <= lease.granted_s:
                held[lease.worker] = lease, record
    return held


def worker_state(worker: Worker, held: Held, measuring: EvaluationLease | None, now_s: float) -> tuple[str, str]:
    """What a worker is doing, and more about it."""
    if measuring and measuring.worker == worker.id and not measuring.reported and now_s < measuring.deadline_s:
        return "measuring", "held-out text"
    if worker.id in held:
        lease, record = held[worker.id]
        where = f"phase {record.round.phase}, round {record.round.number}"
        if record.closed_s is None and lease.reported_s is None:
            why = lateness(lease, record.round, now_s)
            return ("late", f"{where}: {why}") if why else ("at work", where)
        if lease.reported_s is None and worker.last_seen_s <= lease.granted_s:
            return "late", f"{where}: it closed without"
    return ("waiting", "for work") if now_s - worker.last_seen_s < PRESENT_S else ("away", "")
