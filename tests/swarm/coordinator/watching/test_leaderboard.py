"""The public leaderboard: off unless it is switched on, for everybody, without secrets, cheap however many look."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.coordinator.routes import build_service
from blocktrain.swarm.coordinator.watching.leaderboard import KEPT_S, MOST_ENTRIES, PUBLIC_RATE, Leaderboard, ranked
from blocktrain.swarm.ledger.records import WorkerRecord


@pytest.fixture
def public(house) -> TestClient:
    """A visitor without an access token."""
    board = Leaderboard(house.spec, house.ledger, lambda: house.now_s)
    return TestClient(build_service(house.coordinator, house.ledger, clock=lambda: house.now_s, leaderboard=board))


def worker(number: int, tokens: int, last_seen_s: float = 0.0) -> WorkerRecord:
    return WorkerRecord(
        id=f"{number:064x}", name="the host", device="cpu", memory_bytes=0, steps_per_s=1.0, first_seen_s=0.0,
        last_seen_s=last_seen_s, updates=1, tokens=tokens,
    )  # fmt: skip


def test_it_does_not_exist_unless_it_is_switched_on(house):
    client = TestClient(build_service(house.coordinator, house.ledger))
    assert [client.get(path).status_code for path in ("/leaderboard", "/v1/leaderboard")] == [404, 404]


def test_everybody_sees_who_contributed_and_nothing_that_could_be_used(house, member, public):
    member.work()
    answer = public.get("/v1/leaderboard")
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == f"public, max-age={KEPT_S:.0f}"
    (entry,) = answer.json()["entries"]
    assert (entry["rank"], entry["alias"], entry["updates"], entry["active"]) == (1, alias_of(member.id), 1, True)
    [known] = house.ledger.workers()
    assert entry["tokens"] == answer.json()["tokens"] == known.tokens
    assert not any(secret in answer.text for secret in (member.id, known.device, house.run))
    assert set(json.loads(answer.text)["entries"][0]) == {"rank", "alias", "updates", "tokens", "active"}
    assert "leaderboard.js" in public.get("/leaderboard").text


def test_who_is_banned_or_sent_nothing_is_not_listed(house, member, public):
    member.work()
    house.member().lease()
    house.ledger.exclude(member.id, "banned", "broken device", house.now_s)
    assert public.get("/v1/leaderboard").json()["entries"] == []


def test_the_ledger_is_read_once_in_a_while_however_many_look(house, member, public):
    statements = []
    house.ledger.database.watch(statements.append)
    first = public.get("/v1/leaderboard").text
    asked = len(statements)
    member.work()
    asked_by_the_worker = len(statements) - asked
    assert public.get("/v1/leaderboard").text == first
    assert len(statements) == asked + asked_by_the_worker
    house.now_s += KEPT_S
    assert len(public.get("/v1/leaderboard").json()["entries"]) == 1


def test_a_visitor_who_asks_too_often_is_told_to_wait_and_workers_are_not(house, public):
    statuses = [public.get("/v1/leaderboard").status_code for _ in range(int(PUBLIC_RATE.requests) + 1)]
    assert (set(statuses[:-1]), statuses[-1]) == ({200}, 429)
    assert public.get("/healthz").status_code == 200


def test_equal_contributions_share_a_rank_and_the_list_is_short():
    entries = ranked([worker(1, 5), worker(2, 9, last_seen_s=99.0), worker(3, 5), worker(4, 1)], now_s=399.0)
    assert [(entry.rank, entry.tokens) for entry in entries] == [(1, 9), (2, 5), (2, 5), (4, 1)]
    assert [entry.active for entry in entries] == [False] * 4
    assert len(ranked([worker(number, number) for number in range(MOST_ENTRIES + 5)], 0.0)) == MOST_ENTRIES
