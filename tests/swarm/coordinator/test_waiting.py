"""Requests that wait, and the bell: a worker that waits is answered when there is work, and not before."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from blocktrain.swarm.coordinator.bell import Bell

PATIENT = {"Prefer": "wait=10"}  # of the house's clock, which stands still
PATIENCE_S = 60.0


def test_who_waits_hears_the_bell_from_another_thread():
    bell = Bell()

    async def waited() -> int:
        waiting = asyncio.create_task(bell.after(0, longest_s=600.0))
        await asyncio.sleep(0)
        await asyncio.to_thread(bell.ring)
        await waiting
        return bell.rung

    assert asyncio.run(waited()) == 1


@pytest.mark.parametrize("act", [Bell.ring, Bell.end])
def test_a_bell_that_was_rung_before_is_not_waited_for(act):
    bell = Bell()
    act(bell)
    asyncio.run(asyncio.wait_for(bell.after(0, longest_s=600.0), timeout=PATIENCE_S))


def test_who_has_waited_long_enough_waits_no_more():
    bell = Bell()
    asyncio.run(bell.after(0, longest_s=0.0))
    assert not bell._waiting


@pytest.fixture
def waiting(house, monkeypatch):
    """Set as soon as a request waits."""
    begun, after = threading.Event(), house.coordinator.bell.after

    async def watched(rung: int, longest_s: float) -> None:
        begun.set()
        await after(rung, longest_s)

    monkeypatch.setattr(house.coordinator.bell, "after", watched)
    return begun


def test_a_worker_that_waits_is_given_the_next_round_when_it_is_there(house, member, another_member, waiting):
    leases = member.lease(), another_member.lease()
    member.send(leases[0], member.payload(leases[0]))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(house.ask, "POST", "/v1/leases", json=member.request(), headers=PATIENT)
        assert waiting.wait(PATIENCE_S)
        assert not asked.done()
        another_member.send(leases[1], another_member.payload(leases[1], step=2e-3))
        answer = asked.result(PATIENCE_S).json()
    assert answer["kind"] == "train"
    assert answer["trained"][0]["version"] == leases[0].trained[0].version + 1


def test_a_worker_that_waits_is_given_work_when_a_pause_ends(house, member, waiting):
    house.coordinator.pause(True)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(house.ask, "POST", "/v1/leases", json=member.request(), headers=PATIENT)
        assert waiting.wait(PATIENCE_S)
        house.coordinator.pause(False)
        assert asked.result(PATIENCE_S).json()["kind"] == "train"


def test_a_coordinator_that_ends_lets_nobody_wait(house, member, waiting):
    house.coordinator.pause(True)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(house.ask, "POST", "/v1/leases", json=member.request(), headers=PATIENT)
        assert waiting.wait(PATIENCE_S)
        house.coordinator.bell.end()
        answer = asked.result(PATIENCE_S).json()
    assert (answer["kind"], answer["seconds"]) == ("wait", 0.0)


@pytest.mark.parametrize("headers", [{}, {"Prefer": "respond-async"}, {"Prefer": "wait=soon"}, {"Prefer": "wait=0"}])
def test_who_does_not_want_to_wait_is_told_at_once_how_long_it_will_take(house, member, headers):
    house.coordinator.pause(True)
    answer = house.ask("POST", "/v1/leases", json=member.request(), headers=headers).json()
    assert answer["kind"] == "wait"
    assert answer["seconds"] > 0


def test_a_request_that_was_answered_is_refused_the_second_time(house, member):
    house.coordinator.pause(True)
    request = member.request()
    house.coordinator.bell.end()
    assert house.ask("POST", "/v1/leases", json=request, headers=PATIENT).status_code == 200
    assert house.ask("POST", "/v1/leases", json=request, headers=PATIENT).status_code == 409


def test_a_worker_that_has_gone_meanwhile_is_given_nothing(house, member, waiting):
    house.coordinator.pause(True)
    body = json.dumps(member.request()).encode()
    messages = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])
    headers = {
        "authorization": "Bearer the-token-of-the-worker",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "prefer": "wait=10",
    }
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/leases",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    answers: list[dict] = []

    async def receive() -> dict:
        return next(messages)

    async def send(message: dict) -> None:
        answers.append(message)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(asyncio.run, house.service(scope, receive, send))
        assert waiting.wait(PATIENCE_S)
        house.coordinator.pause(False)
        asked.result(PATIENCE_S)
    assert answers[0]["status"] == 200
    assert house.facts()["leases"] == []
