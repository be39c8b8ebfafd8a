"""ProbeClient: the coordinator examined without a trace: its clock, what a token may do, how fast bytes go there and
back. Nothing here changes a fact of the run. Next: cli/commands/swarm/doctor.py, which asks; capacity.py, what
follows from it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from io import BytesIO

from blocktrain.errors import RequestRefused
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.wire.messages import Blob

NO_LEASE = "/v1/leases/none/uploads/" + "0" * 64
DOWNLOAD_PROBE_BYTES = 4 * 2**20
UPLOAD_PROBE_BYTES = 2**19  # half of what a message may have
LEAST_S = 1e-3  # shorter times say more of the clock than of the line


class ProbeClient(CoordinatorClient):
    def clock_s(self) -> float | None:
        """The coordinator's time by its Date header, whole seconds; None where something on the way removed it."""
        date = self._send("GET", "/healthz").headers.get("Date")
        return parsedate_to_datetime(date).timestamp() if date else None

    def may_work(self) -> bool:
        """Whether the token is a worker's or an admin's: asks after an upload that only they may ask after. There is
        no such lease, and being told so means that asking was allowed."""
        try:
            self._received(NO_LEASE)
        except RequestRefused as refused:
            if refused.code == "role":
                return False
            if refused.code != "lease":
                raise
        return True

    def download_rate(self, blob: Blob) -> tuple[float, bytes]:
        """Bytes a second, measured on the first part of a blob; and those bytes."""
        part = Blob(sha256=blob.sha256, num_bytes=min(DOWNLOAD_PROBE_BYTES, blob.num_bytes))
        data = BytesIO()
        seconds = _seconds(lambda: self._fetch_rest(part, data, hashlib.sha256()))
        return data.tell() / max(seconds - self._round_trip_s(), LEAST_S), data.getvalue()

    def upload_rate(self) -> float:
        """Bytes a second. The protocol has no upload that leaves nothing behind, so blanks are sent where a message
        belongs: the coordinator reads them to the end and refuses them as malformed, which changes nothing."""
        seconds = _seconds(lambda: self._send_blanks(UPLOAD_PROBE_BYTES))
        return UPLOAD_PROBE_BYTES / max(seconds - _seconds(lambda: self._send_blanks(1)), LEAST_S)

    def _round_trip_s(self) -> float:
        return _seconds(lambda: self._once("GET", "/healthz"))

    def _send_blanks(self, num_bytes: int) -> None:
        try:
            self._once("POST", "/v1/leases", content=b" " * num_bytes, headers={"Content-Type": "application/json"})
        except RequestRefused as refused:
            if refused.code != "malformed":
                raise


def _seconds(action: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s
