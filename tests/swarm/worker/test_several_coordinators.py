"""A client with the addresses of several coordinators, or of a bucket: whom it asks, and whom it does not."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import httpx
import pytest

from blocktrain.errors import CoordinatorUnreachable, RequestRefused
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import Blob

sys.path.insert(0, str(Path(__file__).parent))
from planned_answers import TOKEN, Answerer, Time, client_of, problem, silence

SEVERAL = Invite("a", 1, TOKEN, others=(Invite("b", 2, TOKEN), Invite("c", 3, TOKEN)))


def several(answers: dict[str, Answerer], time: Time, patience_s: float = 60.0) -> tuple[CoordinatorClient, list[str]]:
    """A client of three coordinators that answer so, and whom it asked."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return answers[request.url.host](request)

    transport = httpx.MockTransport(answer)
    client = CoordinatorClient(SEVERAL, patience_s=patience_s, transport=transport, clock=time.clock, sleep=time.sleep)
    return client, asked


def fine(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={})


@pytest.mark.parametrize("fault", [silence, lambda _: problem(503, retry=True)])
def test_who_loses_a_coordinator_goes_on_with_the_next_at_once_and_stays_there(fault):
    client, asked = several({"a": fault, "b": fine, "c": fine}, time := Time())
    for _ in range(2):
        client.status()
    assert (asked, time.pauses_s) == (["a", "b", "b"], [])


def test_there_is_a_pause_once_all_coordinators_were_asked():
    client, asked = several({"a": silence, "b": silence, "c": silence}, time := Time(), patience_s=2.0)
    with pytest.raises(CoordinatorUnreachable):
        client.status()
    assert asked == [*"abc"] * (len(time.pauses_s) + 1)
    assert len(time.pauses_s) > 0


def test_a_coordinator_that_asks_for_patience_gets_it():
    busy = iter([httpx.Response(429, headers={"Retry-After": "3"}), httpx.Response(200, json={})])
    client, asked = several({"a": lambda _: next(busy)}, time := Time())
    client.status()
    assert (asked, time.pauses_s[0] >= 3.0) == (["a", "a"], True)


def test_a_redirect_that_was_not_asked_for_is_not_followed(tmp_path):
    """After its bucket failed, a coordinator that goes on to redirect gets no further."""
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if request.url.host == "bucket.test":
            return httpx.Response(403, text="<Error><Message>Request has expired</Message></Error>")
        return httpx.Response(307, headers={"Location": "http://bucket.test/blob"})

    with pytest.raises(RequestRefused, match="answered 307"):
        client_of(answer).download(Blob(sha256="0" * 64, num_bytes=4), tmp_path)
    assert asked == ["coordinator.test", "bucket.test", "coordinator.test"]


def test_with_tls_in_the_invite_no_bucket_without_it_is_used(tmp_path):
    said: list[str] = []
    data = b"some bytes"

    def answer(request: httpx.Request) -> httpx.Response:
        if "prefer" in request.headers:
            return httpx.Response(307, headers={"Location": "http://bucket.test/blob"})
        assert request.url.host == "coordinator.test"
        return httpx.Response(206, content=data)

    invite = Invite("coordinator.test", 443, TOKEN, tls=True)
    client = CoordinatorClient(invite, transport=httpx.MockTransport(answer), say=said.append)
    blob = Blob(sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data))
    assert client.download(blob, tmp_path) == data
    assert said == [
        "the coordinator's bucket at bucket.test fails (its URL is not https): bytes go through the coordinator for now"
    ]
