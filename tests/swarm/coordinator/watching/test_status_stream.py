"""The stream of a run's status: over HTTP from a real server, and what decides what is sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from blocktrain.http.server import RunningServer, served_in_thread
from blocktrain.swarm.aliases import alias_of
from blocktrain.swarm.coordinator.routes import build_service
from blocktrain.swarm.coordinator.watching import status_stream as streaming
from blocktrain.swarm.coordinator.watching.status import block_state
from blocktrain.swarm.coordinator.watching.status_stream import Listeners, StatusFeed, curves_after
from blocktrain.swarm.policy.rounds import Lease, Round, lateness
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import WORKER_HEADER, TrainLease
from blocktrain.wire.people_messages import Curves

PATIENCE_S = 60
NEVER_S = 600  # longer than a test may take


@contextmanager
def served(house) -> Iterator[tuple[str, RunningServer, Listeners]]:
    service = build_service(house.coordinator, house.ledger)
    with served_in_thread(service, grace_s=NEVER_S) as server:
        yield server.url, server, service.state.listeners


def events_of(lines: Iterator[str]) -> Iterator[tuple[str, dict]]:
    for line in lines:
        if line.startswith("event: "):
            yield line.removeprefix("event: "), json.loads(next(lines).removeprefix("data: "))


@contextmanager
def listening(url: str, role: str = "viewer") -> Iterator[Iterator[str]]:
    headers = {"Authorization": f"Bearer the-token-of-the-{role}"}
    with httpx.stream("GET", f"{url}/v1/stream", headers=headers, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield answer.iter_lines()


def test_a_listener_is_told_all_at_first_and_then_what_is_new(house, member):
    member.work()
    with served(house) as (url, *_), listening(url) as lines:
        told = events_of(lines)
        (status, first), (curves, drawn) = next(told), next(told)
        assert (status, curves) == ("status", "curves")
        assert first["versions"] == {"0": 1, "1": 1}
        assert [point["round"] for point in drawn["training"][0]["points"]] == [0]
        house.ledger.add_event("refused", "news", house.now_s)
        assert next(told)[1]["events"][-1]["text"] == "news"


def test_a_server_that_is_told_to_stop_ends_its_streams_at_once(house, monkeypatch):
    monkeypatch.setattr(streaming, "PAUSE_S", NEVER_S)  # so only the shutdown can wake the stream
    with served(house) as (url, server, _), listening(url) as lines:
        next(lines)
        server.stop()
        assert "" in list(lines)  # it ends, and ends whole


def test_who_leaves_makes_room(house, monkeypatch):
    left, leave = threading.Event(), Listeners.leave

    def watched(listeners: Listeners) -> None:
        leave(listeners)
        left.set()

    monkeypatch.setattr(Listeners, "leave", watched)
    monkeypatch.setattr(streaming, "PAUSE_S", NEVER_S)
    with served(house) as (url, _, listeners):
        with listening(url) as lines:
            next(lines)
            assert listeners.count == 1
        assert left.wait(PATIENCE_S)
        assert listeners.count == 0


def test_more_listeners_than_may_are_told_when_to_ask_again(house):
    house.service.state.listeners.count = streaming.MAX_LISTENERS
    answer = house.ask("GET", "/v1/stream", "viewer")
    assert (answer.status_code, answer.json()["code"], answer.json()["retry"]) == (503, "listeners", True)
    assert answer.headers["retry-after"] == "10"


def test_a_stranger_may_not_listen(house):
    assert house.ask("GET", "/v1/stream", "stranger").status_code == 401


def test_hearts_beat_while_nothing_happens_and_a_revoked_token_hears_no_more(house, monkeypatch):
    monkeypatch.setattr(streaming, "PAUSE_S", 0.02)
    monkeypatch.setattr(streaming, "HEARTBEAT_S", 0.02)
    with served(house) as (url, *_), listening(url) as lines:
        assert ": still here" in (next(lines) for _ in range(20))
        house.ledger.revoke_access_token("viewer", 1.0)
        assert "" in list(lines)  # it ends


# What is sent


def test_time_alone_is_no_news(house, member):
    member.lease()
    clock = iter(range(0, 100, 10))
    news = StatusFeed(house.coordinator.watching, lambda: next(clock))
    first = news.newest()
    house.now_s += 1
    second = news.newest()
    assert second.number == first.number
    assert second.status["now_s"] == first.status["now_s"] + 1
    house.now_s += 10_000  # now somebody is late
    assert news.newest().number == first.number + 1


def test_the_ledger_is_read_once_a_second_however_many_ask(house):
    news = StatusFeed(house.coordinator.watching, lambda: 5.0)
    first = news.newest()
    house.ledger.add_event("refused", "news", 1.0)
    assert news.newest() is first


def curves(rounds: int, scores: int) -> Curves:
    point = {"step": 0, "at_s": 0.0, "nats_per_byte": 1.0, "updates": 1, "tokens": 1}
    held_out = {"versions": {}, "path": "stack", "reading": "last", "nats_per_byte": 1.0}
    training = [{"phase": 0, "blocks": (0,), "points": [{"round": n, **point} for n in range(rounds)]}]
    return Curves(max_points=9, training=training, held_out=[{"at_s": float(n), **held_out} for n in range(scores)])


def test_of_the_curves_only_what_a_page_lacks_is_sent():
    assert curves_after(curves(2, 1), None) == curves(2, 1)
    assert curves_after(curves(2, 1), curves(2, 1)) is None
    more = curves_after(curves(3, 2), curves(2, 1))
    assert [point.round for curve in more.training for point in curve.points] == [2]
    assert [point.at_s for point in more.held_out] == [1.0]


# What the status tells of blocks, workers and bytes


@pytest.mark.parametrize(
    "block, opened, state",
    [
        (0, {0: False}, "training"),
        (1, {0: False}, "scaffold"),
        (1, {0: True}, "waiting"),
        (0, {0: True, 1: False}, "frozen"),
        (1, {0: True, 1: False}, "training"),
        (3, {0: True, 1: True, 2: False}, "training"),  # the last has no phase of its own to come
        (3, {0: True, 1: True, 2: True}, "frozen"),
    ],
)
def test_a_block_is_trained_along_then_trained_then_frozen(tiny_run, block, opened, state):
    assert block_state(tiny_run, block, opened, exists=True) == state
    assert block_state(tiny_run, block, opened, exists=False) == "planned"


@pytest.mark.parametrize(
    "now_s, words", [(14, None), (16, "slower than"), (25, "missed its deadline"), (45, "taken for dead")]
)
def test_a_lease_is_late_by_degrees(now_s, words):
    lease = Lease(shard=0, worker="w", steps=1, granted_s=0, due_s=10, deadline_at_s=20)
    round = Round(0, 0, {0: 0}, 0, 1, 0.0, limit_s=20.0, deadline_at_s=20.0, leases=(lease,))
    why = lateness(lease, round, now_s)
    assert why is None if words is None else words in why


def test_the_status_counts_bytes_up_and_down_by_worker(house, member):
    lease = member.lease()
    payload = member.payload(lease)
    member.send(lease, payload)
    blob = lease.trained[0].tensors
    for headers in ({WORKER_HEADER: member.id}, {WORKER_HEADER: "no key"}, {"Range": "bytes=0-9"}):
        house.ask("GET", f"/v1/blobs/{blob.sha256}", headers=headers)
    facts = house.ask("GET", "/v1/status", "viewer").json()
    assert facts["traffic"]["up_bytes"] == facts["workers"][0]["update_bytes"] == len(payload)
    assert facts["workers"][0]["down_bytes"] == blob.num_bytes
    assert facts["traffic"]["down_bytes"] == 2 * blob.num_bytes + 10


def test_a_deadline_is_told_with_its_reason(house, member):
    for _ in range(4):
        member.work()
    round = house.ask("GET", "/v1/status", "viewer").json()["phases"][0]["round"]
    assert round["limit_s"] == house.spec.swarm.deadline_ceiling_s
    assert round["limit_reason"] == "the longest allowed, until 3 rounds are timed"  # the clock stood still


def test_an_alias_is_the_same_everywhere_and_not_the_name(house, member):
    member.lease()
    assert house.ask("GET", "/v1/status").json()["workers"][0]["alias"] == alias_of(member.id)
    assert alias_of("00" * 32) == alias_of("00" * 32) != alias_of("01" * 32)


@pytest.mark.parametrize("role, name", [("admin", "ada's laptop"), ("worker", None), ("viewer", None)])
def test_only_admins_are_told_what_workers_call_themselves(house, member, another_member, role, name):
    lease, _ = [
        TrainLease.model_validate(house.ask("POST", "/v1/leases", json=each.request(name="ada's laptop")).json())
        for each in (member, another_member)
    ]
    member.send(lease, member.payload(lease))
    house.now_s += 5000
    house.coordinator.loop.tick()
    assert [event.kind for event in house.ledger.events()] == ["joined", "joined", "late", "merged"]
    workers = house.ask("GET", "/v1/status", role).json()["workers"]
    assert [worker["name"] for worker in workers] == [name or alias_of(worker["id"]) for worker in workers]
    (contribution,) = house.ask("GET", "/v1/contributions", role).json()
    assert contribution["worker_name"] == (name or alias_of(member.id))
    paths = ("/v1/run", "/v1/status", "/v1/events", "/v1/curves", "/v1/contributions", "/v1/manifest", "/metrics")
    assert name or not any("laptop" in house.ask("GET", path, role).text for path in paths)


def test_a_listener_is_told_names_as_its_role_allows(house, member):
    house.ask("POST", "/v1/leases", json=member.request(name="ada's laptop"))
    with served(house) as (url, *_):
        for role, shown in (("viewer", alias_of(member.id)), ("admin", "ada's laptop")):
            with listening(url, role) as lines:
                assert next(events_of(lines))[1]["workers"][0]["name"] == shown


# Who asks


@pytest.mark.parametrize("role", ["admin", "worker", "viewer"])
def test_a_token_learns_its_role(house, role):
    assert house.ask("GET", "/v1/role", role).json() == {"role": role}


def test_only_an_admin_is_shown_the_invite_and_only_while_it_is_good(house):
    invite = Invite("here", 80, "the-token-of-the-worker")
    house.service = build_service(house.coordinator, house.ledger, invite=invite)
    assert house.ask("GET", "/v1/invite", "admin").json() == {"invite": str(invite)}
    assert house.ask("GET", "/v1/invite", "worker").json()["code"] == "role"
    house.ledger.revoke_access_token("worker", 1.0)
    assert house.ask("GET", "/v1/invite", "admin").json()["code"] == "invite"


def test_a_full_house_has_no_place():
    listeners = Listeners(most=1)
    listeners.enter()
    with pytest.raises(streaming.Overloaded, match="1 pages listen already"):
        listeners.enter()
