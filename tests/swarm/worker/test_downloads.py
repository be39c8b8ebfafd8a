"""Downloads of the client, over a transport that fails as planned."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from blocktrain.errors import CoordinatorUnreachable

sys.path.insert(0, str(Path(__file__).parent))
from planned_answers import BLOB, DATA, Answerer, Broken, client_of, one_after_the_other, silence


def ranged(request: httpx.Request) -> httpx.Response:
    first, last = map(int, request.headers["range"].removeprefix("bytes=").split("-"))
    return httpx.Response(206, content=DATA[first : last + 1])


def broken_after(num_bytes: int) -> Answerer:
    def answer(request: httpx.Request) -> httpx.Response:
        whole = ranged(request).content
        return httpx.Response(206, stream=Broken(whole[:num_bytes]))

    return answer


def ranges(asked: list[httpx.Request]) -> list[str]:
    return [request.headers["range"].removeprefix("bytes=") for request in asked]


def test_a_broken_download_goes_on_at_the_byte_where_it_broke(tmp_path):
    answer, asked = one_after_the_other(broken_after(1000), broken_after(300), silence, ranged)
    with client_of(answer) as client:
        assert client.download(BLOB, tmp_path / "cache") == DATA
    assert ranges(asked) == ["0-2559", "1000-2559", "1300-2559", "1300-2559"]
    assert (tmp_path / "cache" / BLOB.sha256).read_bytes() == DATA


@pytest.mark.parametrize(
    "wrong",
    [
        httpx.Response(206, content=b"?" * len(DATA)),
        httpx.Response(206, content=b"?" * (len(DATA) + 99)),
        httpx.Response(206, content=b""),
        httpx.Response(200, content=DATA),
    ],
    ids=["other bytes", "too many bytes", "no bytes", "not the Range"],
)
def test_bytes_that_are_not_the_blob_are_fetched_again(tmp_path, wrong):
    answer, asked = one_after_the_other(wrong, ranged)
    with client_of(answer) as client:
        assert client.download(BLOB, tmp_path) == DATA
    assert ranges(asked) == ["0-2559", "0-2559"]


def test_a_blob_that_always_arrives_damaged_is_never_kept(tmp_path):
    damaged = httpx.Response(206, content=b"?" * len(DATA))
    with (
        client_of(lambda _: damaged) as client,
        pytest.raises(CoordinatorUnreachable, match="arrived damaged") as raised,
    ):
        client.download(BLOB, tmp_path)
    assert raised.value.answered  # so that nobody is told that the coordinator is silent
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept, requests", [(DATA, 0), (DATA[:-1], 1), (b"?" + DATA[1:], 1)])
def test_a_damaged_blob_in_the_cache_is_fetched_again(tmp_path, kept, requests):
    (tmp_path / BLOB.sha256).write_bytes(kept)
    answer, asked = one_after_the_other(ranged)
    with client_of(answer) as client:
        assert client.download(BLOB, tmp_path) == DATA
    assert len(asked) == requests
    assert (tmp_path / BLOB.sha256).read_bytes() == DATA
