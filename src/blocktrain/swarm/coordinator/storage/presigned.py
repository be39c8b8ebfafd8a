"""Presigned URLs: whoever has one may read, or write, one object of a bucket for a while. One for an upload holds for
the announced number of bytes only, where the bucket is S3 and checks it. Next: ../blobs.py, which gives them."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from datetime import timedelta
from urllib.parse import parse_qsl, quote, urlsplit

import httpx
import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, ObjectStore, S3Store

from blocktrain.errors import ConfigError

GOOD_FOR = timedelta(minutes=15)
LARGEST_PUT_BYTES = 5 * 2**30  # that S3 takes in one request
SECRET = "AWS_SECRET_ACCESS_KEY"
PROBE, PROBE_LIMIT_S = "uploads/probe", 10.0
SIGNATURE = "X-Amz-Signature"
Signing = S3Store | GCSStore | AzureStore


class PresignedUrls:
    """Those of one bucket. `limits_size`: an upload's URL can be made to hold for so many bytes only."""

    def __init__(self, store: Signing, limits_size: bool) -> None:
        self._store, self.limits_size = store, limits_size

    def download(self, key: str) -> str:
        return obstore.sign(self._store, "GET", key, GOOD_FOR)

    def upload(self, key: str, num_bytes: int) -> str | None:
        """None for more than a bucket takes at once."""
        if num_bytes > LARGEST_PUT_BYTES:
            return None
        url = obstore.sign(self._store, "PUT", key, GOOD_FOR)
        return _signed_again(url, {"content-length": str(num_bytes)}) if self.limits_size else url


def presigned_urls(store: ObjectStore, where: str, wanted: bool | None, tls: bool) -> PresignedUrls | None:
    """`wanted` None: if they limit the size of what is uploaded, and workers use them: with `tls` in their invite, they
    want it here too."""
    signing = store if isinstance(store, Signing) else None
    if wanted and signing is None:
        raise ConfigError(
            f"{where} makes no presigned URLs: give --blobs s3://…, gs://… or az://…, or leave out --presigned"
        )
    if signing is None or wanted is False:
        return None
    probe = _probe(signing)
    urls = PresignedUrls(signing, limits_size=bool(probe) and _checks_size(signing, probe))
    is_useful = urls.limits_size and (probe.startswith("https:") or not tls)
    return urls if wanted or is_useful else None


def _probe(store: Signing) -> str:
    """A URL for an upload that we can sign again. Empty if the bucket is not S3, or its secret not in the
    environment."""
    if not isinstance(store, S3Store) or not os.environ.get(SECRET):
        return ""
    url = obstore.sign(store, "PUT", PROBE, GOOD_FOR)
    return url if _signed_again(url, {}) == url else ""


def _checks_size(store: Signing, probe: str) -> bool:
    """Whether the bucket takes the announced number of bytes and refuses one more."""
    try:
        limited = _signed_again(probe, {"content-length": "1"})
        answers = [httpx.put(limited, content=bytes(size), timeout=PROBE_LIMIT_S).status_code for size in (1, 2)]
        obstore.delete(store, PROBE)
    except (httpx.HTTPError, BaseError):
        return False
    return answers[0] == httpx.codes.OK and answers[1] in (httpx.codes.BAD_REQUEST, httpx.codes.FORBIDDEN)


def _signed_again(url: str, headers: Mapping[str, str]) -> str:
    """A presigned URL for a PUT to S3 that also holds for these headers only, by AWS Signature Version 4:
    "Authenticating requests: using query parameters"."""
    parts = urlsplit(url)
    query = {name: value for name, value in parse_qsl(parts.query) if name != SIGNATURE}
    signed = {"host": parts.netloc, **headers}
    names = query["X-Amz-SignedHeaders"] = ";".join(sorted(signed))
    asked = "&".join(f"{quote(name, safe='')}={quote(query[name], safe='')}" for name in sorted(query))
    lines = [f"{name}:{signed[name]}" for name in sorted(signed)]
    request = "\n".join(["PUT", parts.path, asked, *lines, "", names, "UNSIGNED-PAYLOAD"])
    digest = hashlib.sha256(request.encode()).hexdigest()
    _, *scope = query["X-Amz-Credential"].split("/")
    key = f"AWS4{os.environ[SECRET]}".encode()
    for part in (*scope, "\n".join([query["X-Amz-Algorithm"], query["X-Amz-Date"], "/".join(scope), digest])):
        key = hmac.digest(key, part.encode(), "sha256")
    return f"{parts.scheme}://{parts.netloc}{parts.path}?{asked}&{SIGNATURE}={key.hex()}"
