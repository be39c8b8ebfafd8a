"""Rounds as tests of the policy need them."""

from __future__ import annotations

from dataclasses import replace

from blocktrain.spec import Phase, SwarmSpec
from blocktrain.swarm.policy.leases import (
    NoWork,
    OpenPhase,
    WorkerFacts,
    choose_work,
)
from blocktrain.swarm.policy.rounds import (
    Grant,
    LateUpdate,
    Lease,
    Round,
    open_round,
)

SPEC = SwarmSpec(round_steps=10, min_updates=2, deadline_floor_s=1.0, deadline_ceiling_s=60.0)
PHASE = Phase(0, blocks=(0, 1), below=(), ahead=(), steps=95)
OTHER = Phase(1, blocks=(2,), below=(), ahead=(), steps=95)
BIG = 1 << 30


def a_round(reported: int = 0, silent: int = 0, late: int = 0, phase: Phase = PHASE) -> Round:
    """Opened at 0 with a limit of 60 s; the leases were granted at once."""
    leases = [
        Lease(k, f"w{k}", 10, 0.0, 40.0, 60.0, 30.0 if k < reported else None, 10) for k in range(reported + silent)
    ]
    opened = open_round(phase, 5, dict.fromkeys(phase.blocks, 5), 20, 60.0, 0.0, SPEC)
    return replace(opened, leases=tuple(leases), late=tuple(LateUpdate("late", 4, k) for k in range(late)))


def worker(name: str = "new", speed: float | None = 0.25, blocks: tuple[int, ...] = ()) -> WorkerFacts:
    return WorkerFacts(name, BIG, speed, frozenset(blocks))


def ask(facts: WorkerFacts, *rounds: Round, now_s: float = 0.0) -> Grant | NoWork:
    phases = {0: PHASE, 1: OTHER}
    opened = [OpenPhase(phases[r.phase], 1000) for r in rounds]
    return choose_work(facts, opened, {r.phase: r for r in rounds}, now_s, SPEC)
