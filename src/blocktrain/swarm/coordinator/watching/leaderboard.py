"""The leaderboard: who contributed most, for everybody, without an access token. It exists only if the operator
switched it on. Workers appear under their aliases; it has no keys, addresses, devices or names of machines. However
many people look, the ledger is read once per KEPT_S. Next: http/static/leaderboard/, the page that shows it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from fastapi import FastAPI, Response
from starlette.datastructures import Headers
from starlette.types import Scope

from blocktrain.http.middleware import Check, limit_rate
from blocktrain.http.pages import LEADERBOARD, add_page
from blocktrain.http.rate_limit import Rate
from blocktrain.spec import RunSpec
from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.coordinator.refusals import problems_without_token
from blocktrain.swarm.coordinator.watching.curves import answer_of
from blocktrain.swarm.coordinator.watching.status import PRESENT_S
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.ledger.records import WorkerRecord
from blocktrain.swarm.policy.evaluations import those_that_count
from blocktrain.wire.people_messages import LeaderboardEntry, LeaderboardReply

MOST_ENTRIES = 100
KEPT_S = 30.0  # a reply is sent again for this long, by us and by caches on the way
PUBLIC_RATE = Rate.per_second(10)  # of one address
PUBLIC_PATHS = (LEADERBOARD.at, "/v1/leaderboard")


class Leaderboard:
    """Thread-safe. `clock` is the run's."""

    def __init__(self, spec: RunSpec, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._spec, self._ledger, self._clock = spec, ledger, clock
        self._kept: tuple[float, str] | None = None  # when it was made, and the reply as JSON
        self._turn = threading.Lock()

    def reply_json(self) -> str:
        with self._turn:
            now_s = self._clock()
            if self._kept is None or not 0 <= now_s - self._kept[0] < KEPT_S:
                self._kept = now_s, self._reply(now_s).model_dump_json()
            return self._kept[1]

    def _reply(self, now_s: float) -> LeaderboardReply:
        standings, phases = self._ledger.key_standings(), self._ledger.phases()
        workers = [
            worker
            for worker in self._ledger.workers()
            if worker.updates and not ((known := standings.get(worker.id)) and known.excluded)
        ]
        evaluations = [evaluation for evaluation, _ in those_that_count(self._ledger.evaluations())]
        answer = answer_of(evaluations[-1].scores) if evaluations else None
        steps, planned = sum(phase.step for phase in phases), sum(phase.steps for phase in self._spec.phases)
        return LeaderboardReply(
            run=self._spec.name,
            at_s=now_s,
            progress=min(1.0, steps / planned),
            nats_per_byte=None if answer is None else float(answer["nats_per_byte"]),
            unit="bytes" if self._spec.corpus.tokenizer_sha256 is None else "tokens",
            num_workers=len(workers),
            tokens=sum(worker.tokens for worker in workers),
            entries=ranked(workers, now_s),
        )


def ranked(workers: Sequence[WorkerRecord], now_s: float) -> tuple[LeaderboardEntry, ...]:
    """Those first that trained on most text. Equal ones share a rank."""
    by_text = sorted(workers, key=lambda worker: (-worker.tokens, worker.id))[:MOST_ENTRIES]
    return tuple(
        LeaderboardEntry(
            rank=1 + sum(other.tokens > worker.tokens for other in by_text),
            alias=alias_of(worker.id),
            updates=worker.updates,
            tokens=worker.tokens,
            active=now_s - worker.last_seen_s < PRESENT_S,
        )
        for worker in by_text
    )


def add_leaderboard(service: FastAPI, leaderboard: Leaderboard) -> None:
    headers = {"Cache-Control": f"public, max-age={KEPT_S:.0f}"}

    @service.get("/v1/leaderboard", response_model=LeaderboardReply, responses=problems_without_token())
    def entries() -> Response:
        return Response(leaderboard.reply_json(), headers=headers, media_type="application/json")

    add_page(service, LEADERBOARD)


def limit_public(clock: Callable[[], float]) -> Check:
    """A lower rate for what needs no access token."""
    limit = limit_rate(PUBLIC_RATE, clock)

    def check(scope: Scope, headers: Headers) -> None:
        if scope["path"] in PUBLIC_PATHS:
            limit(scope, headers)

    return check
