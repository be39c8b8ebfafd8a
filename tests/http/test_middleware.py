"""The middleware around all routes: what it refuses, what it adds, what it reports."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from blocktrain.http.middleware import BodyLimit, CheckFailed, Middleware, limit_rate, require_host
from blocktrain.http.rate_limit import Rate


async def size(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())), headers={"X-Common": "of the route"})


async def fail(request: Request) -> Response:
    raise ZeroDivisionError


def render(error: Exception) -> Response | None:
    return JSONResponse([error.code, str(error)], error.status) if isinstance(error, CheckFailed) else None


def client_of(body: BodyLimit | None = None, checks=(), **options) -> TestClient:
    routes = [Route("/size", size, methods=["GET", "POST", "PUT"]), Route("/fail", fail)]
    app = Starlette(routes=routes)
    app.add_middleware(Middleware, body=body or BodyLimit(100), checks=checks, render=render, **options)
    return TestClient(app, raise_server_exceptions=False)


def chunks() -> Iterator[bytes]:
    return itertools.repeat(b" " * 30, 4)


@pytest.mark.parametrize("content, status", [(b" " * 100, 200), (b" " * 101, 413), (chunks(), 413)])
def test_a_body_over_the_limit_is_refused_whether_its_length_is_announced_or_not(content, status):
    answer = client_of().post("/size", content=content)
    assert answer.status_code == status
    assert status == 200 or answer.json() == ["oversized", "the body has more than 100 bytes: send less"]


@pytest.mark.parametrize("length", ["-1", "1e3", "9" * 16, "x"])
def test_a_length_that_is_no_number_is_refused(length):
    assert client_of().post("/size", headers={"Content-Length": length}).status_code == 413


def test_where_a_length_is_required_a_body_without_one_is_refused():
    client = client_of(BodyLimit(100, max_upload_bytes=1000, length_required=True))
    assert client.post("/size", content=chunks()).json()[0] == "length"
    assert client.put("/size", content=b" " * 1000).text == "1000"
    assert client.put("/size", content=b" " * 1001).status_code == 413
    assert client.post("/size", content=b" " * 101).status_code == 413


def test_other_hosts_than_ours_are_refused_with_the_reason():
    client = client_of(checks=[require_host({"localhost"}, "set a key")])
    assert client.get("/size", headers={"Host": "LOCALHOST:80"}).status_code == 200
    answer = client.get("/size", headers={"Host": "evil.example"})
    assert answer.json() == ["host", 'requests for Host "evil.example" are not answered: set a key']


def test_each_access_token_has_its_rate_and_so_has_the_address():
    client = client_of(checks=[limit_rate(Rate(1, 1.0), clock=lambda: 0.0)])
    statuses = [client.get("/size", headers={"Authorization": f"Bearer {token}"}).status_code for token in "aabcde"]
    assert statuses == [200, 429, 200, 200, 429, 429]  # of all six, the address may send four


def test_headers_are_added_where_the_answer_has_none_of_that_name():
    answer = client_of(headers={"X-Common": "ours", "X-Other": "ours"}).get("/size")
    assert (answer.headers["x-common"], answer.headers["x-other"]) == ("of the route", "ours")


def test_every_answer_is_counted_and_reported_with_its_status_and_time():
    counted, reported, clock = [], [], itertools.count()
    client = client_of(
        checks=[require_host({"testserver"}, "")],
        count=counted.append,
        report=lambda scope, status, seconds: reported.append((scope["path"], status, seconds)),
        clock=lambda: next(clock),
    )
    client.get("/size")
    client.get("/size", headers={"Host": "other"})
    assert client.get("/fail").status_code == 500  # not rendered here: the server's own answer
    assert counted == [200, 421]
    assert reported == [("/size", 200, 1), ("/size", 421, 1), ("/fail", 0, 1)]
