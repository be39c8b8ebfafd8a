"""Routes for the run and its newest model: what anybody with an access token may read, and the bytes of blobs.
Next: ../routes.py, all routes; ../blobs.py, the bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Header, Path, Request, Response
from starlette.responses import StreamingResponse

from blocktrain.errors import RequestRefused
from blocktrain.swarm.coordinator.blobs import Blobs
from blocktrain.swarm.coordinator.blocks import own_blobs
from blocktrain.swarm.coordinator.coordinator import Coordinator
from blocktrain.swarm.coordinator.refusals import (
    problems,
)
from blocktrain.wire.messages import (
    WORKER_HEADER,
    ModelManifest,
    RunInfo,
)

PREFER_REDIRECT = re.compile(r"\bredirect\b")
RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{0,15})")
Digest = Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
BYTES: dict[str, Any] = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
BLOB_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The whole blob", **BYTES},
    206: {"description": "The bytes of the Range", **BYTES},
    307: {"description": "The same bytes in a bucket, for a while; only with Prefer: redirect"},
}


def add_model_routes(service: FastAPI, coordinator: Coordinator, role: Sequence[Any]) -> None:
    """The run and its newest model."""

    @service.get("/v1/run", dependencies=role, responses=problems())
    def run() -> RunInfo:
        return coordinator.info()

    @service.get("/v1/manifest", dependencies=role, responses=problems())
    def manifest() -> ModelManifest:
        return coordinator.manifest()

    @service.get(
        "/v1/blobs/{sha256}",
        dependencies=role,
        response_class=Response,
        responses={**BLOB_ANSWERS, **problems(404, 416, 422)},
    )
    def blob(
        request: Request,
        sha256: Digest,
        range: Annotated[str | None, Header()] = None,
        prefer: Annotated[str, Header()] = "",
    ) -> Response:
        """With `Prefer: redirect` the answer may be the URL of the same bytes in the coordinator's bucket."""
        if PREFER_REDIRECT.search(prefer) and (url := coordinator.blobs.download_url(sha256)) is not None:
            coordinator.blobs.size(sha256)  # 404 if it is not there
            return Response(status_code=307, headers={"Location": url, "Cache-Control": "no-store"})
        named = request.headers.get(WORKER_HEADER, "")
        worker = named if re.fullmatch("[0-9a-f]{64}", named) else None
        return _blob_response(
            coordinator.blobs, sha256, range, partial(coordinator.watching.traffic.sent, worker=worker)
        )


def _blob_response(blobs: Blobs, sha256: str, range: str | None, sent: Callable[[int], None]) -> Response:
    """The whole blob or one Range of it. A blob never changes, so its hash is its ETag. `sent` counts the bytes."""
    size = blobs.size(sha256)
    headers = {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes", "Cache-Control": "immutable, max-age=31536000"}
    first, last, status = 0, size - 1, 200
    if range is not None:
        match = RANGE.fullmatch(range)
        first, last = (int(match[1]), min(int(match[2] or size), size - 1)) if match else (size, 0)
        status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{size}"
        if first > last:
            raise RequestRefused(
                f"Range {range[:40]} does not fit a blob of {size} bytes: ask for bytes=a-b in it", "range"
            )
    headers["Content-Length"] = str(last + 1 - first)
    with own_blobs():  # it is there: that it is damaged is not the caller's fault
        data = blobs.stream(sha256, first, last + 1)

    def chunks() -> Iterator[bytes]:
        for chunk in data:
            sent(len(chunk))
            yield chunk

    return StreamingResponse(chunks(), status, headers, "application/octet-stream")
