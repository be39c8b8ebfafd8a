"""The files of the dashboard and the playground: types, caching, compression, security headers."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from blocktrain.http.pages import DASHBOARD, PLAYGROUND, WebPage, add_page


def client_of(page: WebPage) -> TestClient:
    app = FastAPI()
    add_page(app, page)
    return TestClient(app)


@pytest.mark.parametrize("page", [DASHBOARD, PLAYGROUND])
def test_every_file_is_answered_with_its_type(page):
    client, types = client_of(page), {".js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    for path in page.files():
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].partition(";")[0] == types.get(path[-3:], "text/html")


@pytest.mark.parametrize("page", [DASHBOARD, PLAYGROUND])
def test_a_browser_that_has_the_newest_version_gets_nothing_again(page):
    client = client_of(page)
    answer = client.get("/", headers={"Accept-Encoding": "gzip"})
    assert (answer.headers["content-encoding"], answer.headers["cache-control"]) == ("gzip", "no-cache")
    again = client.get("/", headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = client.get("/", headers={"Accept-Encoding": "identity"})
    assert (plain.text, plain.headers.get("content-encoding")) == (answer.text, None)


def test_only_the_page_with_plotly_may_use_inline_styles():
    policies = [client_of(page).get("/").headers["content-security-policy"] for page in (DASHBOARD, PLAYGROUND)]
    assert ["'unsafe-inline'" in policy for policy in policies] == [True, False]
    assert all("default-src 'none'" in policy for policy in policies)
