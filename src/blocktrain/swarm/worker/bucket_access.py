"""Reads and writes a coordinator's bucket by the presigned URLs that the coordinator gives. Whatever goes wrong here,
the coordinator is the other way: nothing is retried, and for a while no URL is asked for. It sends the bucket no access
token. Next: client.py, which asks for the URLs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import httpx

from blocktrain.logs import visible

TIMEOUT_S, CONNECT_S = 30.0, 5.0  # a bucket that cannot be reached is found out soon
PAUSE_S = 600.0  # without the bucket after it has failed
SEND_BYTES = 2**20
PREFER = {"Prefer": "redirect"}


class BucketAccess:
    """`tls`: the invite asks for it, so URLs must have it too. `say` gets a line when the bucket fails."""

    def __init__(
        self,
        transport: httpx.BaseTransport | None,
        clock: Callable[[], float],
        say: Callable[[str], None],
        tls: bool,
    ) -> None:
        self._http = httpx.Client(timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_S), transport=transport)
        self._clock, self._say, self._tls = clock, say, tls
        self._not_before_s, self.is_used = -math.inf, False

    def close(self) -> None:
        self._http.close()

    def preference(self) -> Mapping[str, str]:
        """The header that asks for a URL, unless the bucket failed just now."""
        return PREFER if self._clock() >= self._not_before_s else {}

    def get(self, url: str, headers: Mapping[str, str], keep: Callable[[httpx.Response], None]) -> bool:
        """Whether something was kept; a broken connection may have left a part of it."""
        return self._attempt(url, lambda: self._get(url, headers, keep))

    def put(self, url: str, payload: bytes) -> bool:
        """Whether all of it is there."""
        return self._attempt(url, lambda: self._put(url, payload))

    def _get(self, url: str, headers: Mapping[str, str], keep: Callable[[httpx.Response], None]) -> str | None:
        with self._http.stream("GET", url, headers=headers) as response:
            if response.status_code != 206:
                return _refusal(response)
            keep(response)
        return None

    def _put(self, url: str, payload: bytes) -> str | None:
        chunks = (payload[start : start + SEND_BYTES] for start in range(0, len(payload), SEND_BYTES))
        headers = {"Content-Length": str(len(payload)), "x-ms-blob-type": "BlockBlob"}  # Azure asks for the second
        with self._http.stream("PUT", url, content=chunks, headers=headers) as response:
            return None if response.is_success else _refusal(response)

    def _attempt(self, url: str, attempt: Callable[[], str | None]) -> bool:
        scheme, where = urlsplit(url).scheme, urlsplit(url).netloc
        if scheme != "https" and (self._tls or scheme != "http"):
            fault: str | None = "its URL is not https"
        else:
            try:
                fault = attempt()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                fault = str(error) or type(error).__name__
        self.is_used = fault is None
        if fault is not None:
            self._not_before_s = self._clock() + PAUSE_S
            line = f"the coordinator's bucket at {where} fails ({fault}): bytes go through the coordinator for now"
            self._say(visible(line))
        return fault is None


def _refusal(response: httpx.Response) -> str:
    """The status, and the message that the bucket's XML holds."""
    text = next(response.iter_text(4000), "")  # no more of it, whatever it is
    message = re.search("<Message>(.{1,200}?)</Message>", text, re.DOTALL)
    return f"{response.status_code} {message[1].rstrip('.') if message else response.reason_phrase}"
