"""ProbeClient: measures the coordinator's clock, what the access token allows, and the speed of downloads and uploads.
Changes nothing in the run. Next: cli/commands/swarm/doctor.py, which uses it; capacity.py, which computes what follows
from the speeds."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from io import BytesIO

from blocktrain.errors import RequestRefused
from blocktrain.swarm.worker.client import JSON, CoordinatorClient
from blocktrain.wire.messages import Blob

NO_LEASE = "/v1/leases/none/uploads/" + "0" * 64
DOWNLOAD_PROBE_BYTES = 4 * 2**20
UPLOAD_PROBE_BYTES = 2**19  # half of the largest message
LEAST_S = 1e-3  # shorter times measure the clock, not the connection


class ProbeClient(CoordinatorClient):
    def clock_s(self) -> float | None:
        """The coordinator's time from its Date header, in whole seconds. None if a proxy removed the header."""
        date = self._send("GET", "/healthz").headers.get("Date")
        return parsedate_to_datetime(date).timestamp() if date else None

    def may_work(self) -> bool:
        """Whether the access token is a worker's or an admin's. Asks for the state of an upload, which only they may
        do. The lease does not exist: the refusal that says so means that the question was allowed."""
        try:
            self._send("GET", NO_LEASE)
        except RequestRefused as refused:
            if refused.code == "role":
                return False
            if refused.code != "lease":
                raise
        return True

    def download_rate(self, blob: Blob) -> tuple[float, bytes]:
        """Bytes per second, measured on the first part of a blob; and those bytes."""
        part = Blob(sha256=blob.sha256, num_bytes=min(DOWNLOAD_PROBE_BYTES, blob.num_bytes))
        data = BytesIO()
        seconds = _seconds(lambda: self._fetch_rest(part, data, hashlib.sha256()))
        round_trip_s = _seconds(lambda: self._once("GET", "/healthz"))
        return data.tell() / max(seconds - round_trip_s, LEAST_S), data.getvalue()

    def upload_rate(self) -> float | None:
        """Bytes per second; None if the access token may not upload, since its body is not read. Every upload of the
        protocol leaves something behind, so this sends blanks in place of a message: the coordinator reads all of them
        and refuses them as malformed, which changes nothing."""
        try:
            seconds = _seconds(lambda: self._send_blanks(UPLOAD_PROBE_BYTES))
        except RequestRefused as refused:
            if refused.code == "role":
                return None
            raise
        return UPLOAD_PROBE_BYTES / max(seconds - _seconds(lambda: self._send_blanks(1)), LEAST_S)

    def _send_blanks(self, num_bytes: int) -> None:
        try:
            self._once("POST", "/v1/updates", content=b" " * num_bytes, headers=JSON)
        except RequestRefused as refused:
            if refused.code != "malformed":
                raise


def _seconds(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s
