"""Blobs in a bucket of a real S3 server: several runs in one, and what is said when it refuses."""

from __future__ import annotations

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from blocktrain.errors import ConfigError, StorageError
from blocktrain.swarm.coordinator.blobs import Blobs

DATA = bytes(range(256)) * 40


@pytest.mark.parametrize("url", ["nonsense://x", "s3://", "az://container"])
def test_a_url_that_cannot_hold_blobs_is_refused_with_an_example(url, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match=f"{re.escape(url)} cannot hold blobs .*: give a folder or a URL like s3://"):
        Blobs(url)


def test_one_bucket_holds_several_runs_each_in_a_folder_of_its_own(bucket):
    one, other = Blobs(f"{bucket}/a"), Blobs(f"{bucket}/b")
    sha256 = one.put(DATA)
    assert not other.exists(sha256)
    assert (list(other.iterate()), other.used_bytes()) == ([], 0)
    other.delete(sha256)
    assert one.get(sha256) == DATA


@pytest.mark.parametrize("change", [{"AWS_SECRET_ACCESS_KEY": "wrong"}, {"AWS_ACCESS_KEY_ID": "nobody"}])
def test_a_bucket_that_refuses_says_why(bucket, monkeypatch, change):
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match=r"s3://.*(signature|access key).*: give credentials that may read"):
        Blobs(bucket).put(DATA)


def test_a_bucket_without_credentials_asks_for_them(bucket, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StorageError, match=r"s3://.* give credentials that may read"):
        Blobs(bucket).put(DATA)


SKEWED = (
    b"<?xml version='1.0'?><Error><Code>RequestTimeTooSkewed</Code><Message>The difference between the request time "
    b"and the server's time is too large.</Message></Error>"
)


class AnotherTime(BaseHTTPRequestHandler):
    """Answers as S3 does to a machine whose clock is wrong."""

    def do_PUT(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(403)
        self.send_header("Content-Length", str(len(SKEWED)))
        self.end_headers()
        self.wfile.write(SKEWED)

    def log_message(self, *_):
        pass


def test_a_bucket_that_refuses_a_wrong_clock_says_to_set_it(bucket, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), AnotherTime) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(StorageError, match=r"server's time is too large: set the clock of this machine"):
            Blobs(bucket).put(DATA)
        server.shutdown()
