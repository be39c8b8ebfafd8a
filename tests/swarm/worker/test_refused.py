"""A worker that is refused tells its user the coordinator's sentence, and goes on if it can."""

from __future__ import annotations

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.errors import RequestRefused
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import Worker
from blocktrain.wire.invite import Invite


def worker_whose_first_update_gets(code: str, house, home, reports: list[str]) -> Worker:
    """Runs until it has submitted one update. Its requests reach the service, except its first update: that gets
    `code`."""
    planned = [httpx.Response(409, json={"code": code, "message": "as planned", "retry": False})]

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/updates" and planned:
            return planned.pop()
        kept = {name: value for name, value in request.headers.items() if name in ("range", "content-type")}
        answer = house.ask(request.method, request.url.raw_path.decode(), content=request.content, headers=kept)
        return httpx.Response(answer.status_code, content=answer.content)

    client = CoordinatorClient(Invite("coordinator.test", 80, "x" * 20), transport=httpx.MockTransport(answer))
    return Worker(
        client,
        home,
        key=Ed25519PrivateKey.generate(),
        memory_bytes=2**33,
        report=lambda event: reports.append(f"{event.kind}: {event.text}"),
        stop=lambda: any(text.startswith("submitted") for text in reports),
        sleep=lambda _: None,
    )


@pytest.mark.parametrize("code", ["stale", "lease", "norm", "reported"])
def test_a_worker_goes_on_after_a_refused_update(new_house, tmp_path, code):
    reports: list[str] = []
    worker_whose_first_update_gets(code, new_house(**{"swarm.update": "int8"}), tmp_path, reports).run()
    kinds = [text.partition(":")[0] for text in reports if not text.startswith("step")]
    assert kinds == ["lease", "refused", "lease", "submitted"]
    assert "refused: as planned" in reports


@pytest.mark.parametrize("code", ["token", "role", "protocol", "signature"])
def test_a_worker_that_is_refused_itself_ends_with_the_reason(new_house, tmp_path, code):
    worker = worker_whose_first_update_gets(code, new_house(), tmp_path, [])
    with pytest.raises(RequestRefused, match="as planned"):
        worker.run()


def test_what_a_refused_update_held_back_is_not_forgotten(new_house, tmp_path):
    reports: list[str] = []
    worker = worker_whose_first_update_gets("token", new_house(**{"swarm.update": "int8"}), tmp_path, reports)
    with pytest.raises(RequestRefused):
        worker.run()
    assert worker._feedback.unsent == {}  # as before the update: nothing counts as sent
