"""A ledger's life in steps: a run of two blocks and three workers that starts, leases, reports and merges."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

from blocktrain.spec import Phase, SwarmSpec
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import MergeWeight, NewUpdate, NewVersion, Run
from blocktrain.swarm.policy.rounds import Grant, Round, next_round, open_round

ADA, BOB, EVE = (name * 64 for name in "abe")
SPEC = SwarmSpec(round_steps=10)
PHASE = Phase(0, blocks=(0, 1), below=(), ahead=(), steps=25)
FIRST = open_round(PHASE, 0, {0: 0, 1: 0}, step_start=0, limit_s=60.0, now_s=100.0, spec=SPEC)
RUN = Run(spec="name = 'r'", spec_digest="5" * 64, corpus_sha256="c" * 64, protocol=1, created_s=1.0)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def start(ledger: Ledger, first: Round = FIRST) -> None:
    ledger.add_initial_blocks({block: sha256(f"initial {block}") for block in PHASE.blocks}, now_s=99.0)
    for worker in (ADA, BOB, EVE):
        ledger.see_worker(worker, worker[:1], "cpu", 10**12, 2.5, now_s=100.0, nonce=1)
    ledger.open_phase(first)


def lease(ledger: Ledger, worker: str, now_s: float = 101.0) -> str:
    """A lease in the open round, on the shard after those that are taken."""
    round = ledger.open_rounds()[0]
    shard = len(round.leases)
    grant = Grant(worker, 0, round.number, round.base, shard, round.step_start, round.steps, now_s + 4, now_s + 60, "")
    granted = ledger.grant(grant, round, now_s)
    assert granted is not None
    return granted.id


def an_update(lease_id: str, worker: str = ADA, text: str = "", **changes: Any) -> NewUpdate:
    facts = NewUpdate(
        id=sha256(f"{lease_id}{text}"),
        lease=lease_id,
        worker=worker,
        phase=0,
        base={0: 0, 1: 0},
        tokens=5 * 10**9,
        steps=10,
        codec="int8",
        num_bytes=3 * 10**9,
        norm=0.5,
        lag=0,
        weight=1.0,
        loss=2.25,
        received_s=110.0,
        signature="00" * 64,
    )
    return replace(facts, **changes)


def report(ledger: Ledger, worker: str) -> str:
    """An update of a new lease, recorded."""
    return ledger.record_update(an_update(lease(ledger, worker), worker))[0].id


def versions_after(round: Round, name: str = "") -> list[NewVersion]:
    return [
        NewVersion(block=block, version=version + 1, sha256=sha256(f"{block} {version + 1} {name}"))
        for block, version in round.base.items()
    ]


def merge(ledger: Ledger, closed: Round, update_ids: list[str], name: str = "") -> bool:
    following = next_round(closed, PHASE, 60.0, 200.0, SPEC)
    weights = [MergeWeight(update, 1.0, 1.0) for update in update_ids]
    return ledger.merge(closed, versions_after(closed, name), weights, following, 200.0, "all in")


def newest(ledger: Ledger) -> dict[int, int]:
    return ledger.consistent_manifest().versions
