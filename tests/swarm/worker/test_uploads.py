"""Uploads of the client, to a coordinator that breaks off as planned."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from blocktrain.errors import CoordinatorUnreachable, RequestRefused
from blocktrain.swarm.worker import client as client_module

sys.path.insert(0, str(Path(__file__).parent))
from planned_answers import BLOB, DATA, Answerer, client_of, problem


class Uploads:
    """The coordinator's side of one upload; `fault` may do something else for the n-th PUT."""

    def __init__(self, already: int = 0, **faults: Answerer) -> None:
        self.data, self.offsets, self.faults = DATA[:already], list[int](), faults

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            offset = int(request.url.params["offset"])
            self.offsets.append(offset)
            if fault := self.faults.get(f"put{len(self.offsets)}"):
                return fault(request)
            return self.keep(request)
        return httpx.Response(200, json={"received": len(self.data)})

    def keep(self, request: httpx.Request) -> httpx.Response:
        if int(request.url.params["offset"]) != len(self.data):
            return problem(409, "offset")
        self.data += request.content
        return httpx.Response(200, json={"received": len(self.data)})

    def keep_some(self, num_bytes: int) -> Answerer:
        """What has come stays, and the connection breaks."""

        def keep(request: httpx.Request) -> httpx.Response:
            self.data += request.content[:num_bytes]
            raise httpx.WriteError("broken pipe")

        return keep


@pytest.fixture
def many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that it is asked first what has come of them."""
    monkeypatch.setattr(client_module, "FEW_BYTES", 1000)


@pytest.mark.usefixtures("many_bytes")
@pytest.mark.parametrize("already, offsets", [(0, [0]), (1000, [1000]), (len(DATA), [])])
def test_an_upload_continues_where_the_coordinator_has_it(already, offsets):
    uploads = Uploads(already)
    with client_of(uploads) as client:
        assert client.upload(DATA, "lease") == BLOB
    assert uploads.data == DATA
    assert uploads.offsets == offsets


def test_a_broken_upload_goes_on_at_the_byte_where_it_broke():
    uploads = Uploads()
    uploads.faults |= {"put1": uploads.keep_some(700), "put2": uploads.keep_some(0), "put3": uploads.keep_some(99)}
    with client_of(uploads) as client:
        client.upload(DATA, "lease")
    assert uploads.data == DATA
    assert uploads.offsets == [0, 700, 700, 799]


def test_an_upload_whose_answer_was_lost_is_not_stored_twice():
    uploads = Uploads()
    uploads.faults["put1"] = uploads.keep_some(len(DATA))
    with client_of(uploads) as client:
        client.upload(DATA, "lease")
    assert uploads.data == DATA
    assert uploads.offsets == [0]


@pytest.mark.usefixtures("many_bytes")
def test_the_coordinators_offset_is_followed_backwards_too():
    uploads = Uploads(1000)

    def forget(request: httpx.Request) -> httpx.Response:
        uploads.data = b""
        return uploads.keep(request)

    uploads.faults["put1"] = forget
    with client_of(uploads) as client:
        client.upload(DATA, "lease")
    assert uploads.data == DATA
    assert uploads.offsets == [1000, 0]


@pytest.mark.parametrize("code", ["offset", "oversized"])
def test_an_upload_that_is_refused_ends(code):
    uploads = Uploads(put1=lambda _: problem(409, code))
    with client_of(uploads) as client, pytest.raises(RequestRefused):
        client.upload(DATA, "lease")
    assert uploads.offsets == [0]


def test_an_upload_that_gets_nowhere_ends_with_patience():
    nowhere = httpx.Response(200, json={"received": 0})
    with client_of(lambda _: nowhere) as client, pytest.raises(CoordinatorUnreachable, match="took none of the bytes"):
        client.upload(DATA, "lease")
