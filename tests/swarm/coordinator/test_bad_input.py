"""Bad input, one row each: it gets its own status and code and a sentence with the remedy, and changes nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import numpy as np
import pytest

from blocktrain.swarm.signatures import sign
from blocktrain.wire.codecs.table import make_codec
from blocktrain.wire.messages import (
    PROTOCOL_VERSION,
    EvaluationNotice,
    LeaseRequest,
    Problem,
    TrainLease,
    UpdateNotice,
)
from blocktrain.wire.safetensors import Array, decode, encode
from blocktrain.wire.updates import encode_update

NOBODY = "0" * 64
Attempt = Callable[[Any, Any, TrainLease], httpx.Response]  # house, member, its lease


def ask(method: str, path: str, **options) -> Attempt:
    return lambda house, member, lease: house.ask(method, path, **options)


def ask_for_work(role: str = "worker", **changes) -> Attempt:
    return lambda house, member, lease: house.ask("POST", "/v1/leases", role, json=member.request(**changes))


def upload(lease_id: str | None = None, num_bytes: int = 10, **params: int) -> Attempt:
    return lambda house, member, lease: member.upload(lease_id or lease.lease, bytes(num_bytes), **params)


def announce(**changes) -> Attempt:
    def attempt(house, member, lease) -> httpx.Response:
        return member.send(lease, member.payload(lease), **changes)

    return attempt


def announce_unsigned(**changes) -> Attempt:
    def attempt(house, member, lease) -> httpx.Response:
        data = member.payload(lease)
        member.upload(lease.lease, data)
        return member.submit(member.notice(lease, data), **changes)

    return attempt


def send_bytes(meddle: Callable[[bytes], bytes]) -> Attempt:
    return lambda house, member, lease: member.send(lease, meddle(member.payload(lease)))


def send_tensors(meddle: Callable[[dict], dict]) -> Attempt:
    """A well-formed update of other tensors than the block's, announced as what it is."""

    def attempt(house, member, lease) -> httpx.Response:
        other = meddle(member.tensors(lease))
        shapes = {name: tuple(tensor.shape) for name, tensor in other.items()}
        return member.send(lease, encode_update(other, other, make_codec("fp32")), tensors=shapes)

    return attempt


def announce_before_upload(tensors: Callable[[dict], dict]) -> Attempt:
    """What is refused for its tensors is refused without its bytes."""

    def attempt(house, member, lease) -> httpx.Response:
        shapes = {name: tuple(tensor.shape) for name, tensor in member.tensors(lease).items()}
        return member.submit(member.notice(lease, b"never sent", tensors=tensors(shapes)))

    return attempt


def send_unlike_announced(meddle: Callable[[dict], dict]) -> Attempt:
    def attempt(house, member, lease) -> httpx.Response:
        other = meddle(member.tensors(lease))
        return member.send(lease, encode_update(other, other, make_codec("fp32")))

    return attempt


def ask_with_what_was_signed(**changes) -> Attempt:
    """Changed after it was signed."""

    def attempt(house, member, lease) -> httpx.Response:
        return house.ask("POST", "/v1/leases", json={**member.request(), **changes})

    return attempt


def ask_again_with_an_old_number(house, member, lease) -> httpx.Response:
    return house.ask("POST", "/v1/leases", json=member.request(nonce=1))


def ask_for_another_run(house, member, lease) -> httpx.Response:
    request = LeaseRequest.model_validate(member.request())
    return house.ask("POST", "/v1/leases", json=sign(request, member.key, "e" * 64).model_dump(mode="json"))


def announce_for_another_run(house, member, lease) -> httpx.Response:
    data = member.payload(lease)
    assert member.upload(lease.lease, data).status_code == 200
    notice = UpdateNotice.model_validate(member.notice(lease, data))
    return member.submit(sign(notice, member.key, "e" * 64).model_dump(mode="json"))


def values(change: Callable[[Array], Array]) -> Callable[[bytes], bytes]:
    def meddle(data: bytes) -> bytes:
        parts, metadata = decode(data)
        return encode({"values": change(parts["values"])}, metadata)

    return meddle


def shaped(shape: list[int]) -> Callable[[bytes], bytes]:
    """An update whose header declares this shape of its values."""

    def meddle(data: bytes) -> bytes:
        (header_bytes,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + header_bytes])
        header["values"]["shape"] = shape
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + bytes(max(0, len(data) - 8 - len(text)))

    return meddle


def wider(tensors: dict) -> dict:
    name = next(iter(tensors))
    return {**tensors, name: np.zeros((*tensors[name].shape, 2), np.float32)}


def part_of_it(house, member, lease) -> httpx.Response:
    data = member.payload(lease)
    member.upload(lease.lease, data[:100], hashlib.sha256(data).hexdigest(), size=len(data))
    return member.submit(member.notice(lease, data))


def other_bytes(house, member, lease) -> httpx.Response:
    data = member.payload(lease)
    member.upload(lease.lease, bytes(len(data)), hashlib.sha256(data).hexdigest())
    return member.submit(member.notice(lease, data))


def signed_by_another(house, member, lease) -> httpx.Response:
    data = member.payload(lease)
    member.upload(lease.lease, data)
    return member.submit(member.notice(lease, data), signature="00" * 64)


def in_coded_with(codec: str) -> Attempt:
    def attempt(house, member, lease) -> httpx.Response:
        before = member.tensors(lease)
        return member.send(lease, encode_update(before, before, make_codec(codec)))

    return attempt


def evaluation_of(lease_id: str) -> Attempt:
    def attempt(house, member, lease) -> httpx.Response:
        notice = EvaluationNotice(lease=lease_id, worker=member.id, scores=(), combine={})
        return house.ask("POST", "/v1/evaluations", json=sign(notice, member.key, house.run).model_dump(mode="json"))

    return attempt


def blob_bytes(range: str) -> Attempt:
    def attempt(house, member, lease) -> httpx.Response:
        return house.ask("GET", f"/v1/blobs/{lease.trained[0].tensors.sha256}", headers={"Range": range})

    return attempt


JSON = {"Content-Type": "application/json"}
ROWS: dict[str, tuple[Attempt, int, str, str]] = {
    "a wrong token": (ask("GET", "/v1/run", role="nobody"), 401, "token", "ask the operator of the swarm"),
    "no token": (ask("GET", "/v1/run", headers={"Authorization": ""}), 401, "token", "ask the operator of the swarm"),
    "a viewer who works": (ask_for_work("viewer"), 403, "role", "ask for one of role worker"),
    "a protocol of the future": (
        ask_for_work(protocol=PROTOCOL_VERSION + 1), 426, "protocol", "install the coordinator's version",
    ),
    "a phase that is none": (ask_for_work(phase=99), 422, "phase", "the run has phases 0 to 2: ask without"),
    "a request that nobody signed": (
        ask_with_what_was_signed(signature="00" * 64), 403, "signature", "sign with the key that asked",
    ),
    "a request that was signed for another run": (
        ask_for_another_run, 403, "signature", "sign with the key that asked, and with the run's id",
    ),
    "an update that was signed for another run": (announce_for_another_run, 403, "signature", "with the run's id"),
    "another's key": (ask_with_what_was_signed(worker="ab" * 32), 403, "signature", "sign with the key that asked"),
    "another memory than was signed": (ask_with_what_was_signed(memory_bytes=1), 403, "signature", "sign with the key"),
    "a request overheard": (ask_again_with_an_old_number, 409, "replayed", "ask with a larger number"),
    "a key that is none": (ask_for_work(worker="ab"), 422, "malformed", "body.worker"),
    "a speed beyond belief": (ask_for_work(steps_per_s=1e308), 422, "malformed", "body.steps_per_s"),
    "a field too many": (ask_for_work(more=1), 422, "malformed", "body.more: Extra inputs are not permitted"),
    "broken JSON": (
        ask("POST", "/v1/leases", content=b'{"protocol": 1,', headers=JSON), 422, "malformed", "correct the request",
    ),
    "bottomless JSON": (ask("POST", "/v1/leases", content=b"[" * 10**4, headers=JSON), 422, "malformed", "correct"),
    "a name that is no text": (
        ask("POST", "/v1/leases", content=b'{"\\ud800": 1}', headers=JSON), 422, "malformed", "correct the request",
    ),
    "a name with NUL": (ask_for_work(name="a\0b"), 422, "malformed", "body.name"),
    "a device with NUL": (ask_for_work(device="\0"), 422, "malformed", "body.device"),
    "a path with NUL": (upload("0-0-%00"), 422, "malformed", "path.lease_id"),
    "an upload without a lease": (upload("1-1-nobody"), 404, "lease", "ask for one"),
    "an upload larger than updates are": (upload(size=2**40), 413, "oversized", "takes at most"),
    "a part beyond its upload": (upload(num_bytes=20, size=10), 413, "oversized", "send no more than that"),
    "a part somewhere else": (upload(offset=5, size=100), 409, "offset", "continue at offset 0"),
    "an upload of no blob": (ask("PUT", "/v1/leases/x/uploads/y?offset=0&size=1"), 422, "malformed", "sha256"),
    "a lease that is none": (announce_unsigned(lease="9-9-nobody"), 404, "lease", "ask for one"),
    "another's signature": (signed_by_another, 403, "signature", "sign with the key that asked"),
    "another loss than was signed": (announce_unsigned(loss=0.1), 403, "signature", "sign with the key that asked"),
    "more steps than leased": (announce(steps=9, tokens=9), 422, "steps", "report what was done"),
    "other tokens than steps": (announce(tokens=1), 422, "steps", "report what was done"),
    "part of an upload": (part_of_it, 409, "truncated", "100 bytes of the update have arrived"),
    "bytes with another hash": (other_bytes, 422, "hash", "they were discarded, upload them again"),
    "bytes that are no tensors": (send_bytes(lambda data: bytes(len(data))), 422, "tensors", "get them again"),
    "tensors cut short": (send_bytes(lambda data: data[:-4]), 422, "tensors", "get them again"),
    "a tensor of 65 axes": (send_bytes(shaped([1] * 65)), 422, "tensors", "65 axes and at most 8 are accepted"),
    "a shape as long as the update": (
        send_bytes(shaped([2**31 - 1] * 1000)), 422, "tensors", "at most 2048 are accepted",
    ),
    "a codec of its own": (in_coded_with("int8"), 422, "tensors", "code it with the settings of the run"),
    "wrong shapes": (send_tensors(lambda x: {k: v.flatten() for k, v in x.items()}), 422, "shapes", "is expected: tra"),
    "a tensor missing": (send_tensors(lambda x: dict(list(x.items())[1:])), 422, "missing", "is missing: train the"),
    "a tensor too many": (
        send_tensors(lambda x: {**x, "0.more": np.zeros(1, np.float32)}),
        422, "extra", '"0.more" is not part of the phase: tra',
    ),
    "another block's names": (
        send_tensors(lambda x: {f"9{k}": v for k, v in x.items()}), 422, "missing", "more): train the blocks",
    ),
    "wrong shapes announced": (
        announce_before_upload(lambda x: {k: (*v, 2) for k, v in x.items()}), 422, "shapes", "is expected: train the",
    ),
    "a missing tensor announced": (
        announce_before_upload(lambda x: dict(list(x.items())[:-1])), 422, "missing", "is missing: train the blocks",
    ),
    "an extra tensor announced": (
        announce_before_upload(lambda x: {**x, "more": (9,)}), 422, "extra", "is not part of the phase: train",
    ),
    "other tensors than announced": (
        send_unlike_announced(lambda x: {k: v.flatten() for k, v in x.items()}), 422, "shapes", "train the block",
    ),
    "too few values": (send_bytes(values(lambda x: x[1:])), 422, "tensors", "make it again"),
    "NaN": (send_bytes(values(lambda x: x * float("nan"))), 422, "finite", "holds NaN, Inf or more"),
    "Inf": (send_bytes(values(lambda x: x + float("inf"))), 422, "finite", "holds NaN, Inf or more"),
    "1e38 everywhere": (send_bytes(values(lambda x: x * 0 + 1e38)), 422, "finite", "holds NaN, Inf or more"),
    "1e37 everywhere": (send_bytes(values(lambda x: x * 0 + 1e37)), 422, "norm", "of the weights it was built on"),
    "1e37 once": (
        send_bytes(values(lambda x: np.append(x[:-1], np.float32(1e37)))), 422, "norm", "of the weights",
    ),
    "an evaluation of nobody's": (evaluation_of("77"), 404, "lease", "ask for a lease"),
    "an evaluation with an endless number": (evaluation_of("7" * 99), 404, "lease", "ask for a lease"),
    "a blob that is none": (ask("GET", f"/v1/blobs/{NOBODY}"), 404, "blob", "is not in"),
    "bytes beyond a blob": (blob_bytes("bytes=999999999-"), 416, "range", "ask for bytes=a-b in it"),
    "a Range backwards": (blob_bytes("bytes=5-4"), 416, "range", "ask for bytes=a-b in it"),
    "a Range of lines": (blob_bytes("lines=1-2"), 416, "range", "ask for bytes=a-b in it"),
    "a page that is none": (ask("GET", "/v2"), 404, "unknown", "see /openapi.json"),
    "a method that is none": (ask("DELETE", "/v1/run"), 405, "method", "see /openapi.json"),
}  # fmt: skip
FORGIVEN = ("a part somewhere else", "another's signature", "part of an upload", "bytes with another hash", "NaN")
FOR_ITS_TENSORS = {"tensors", "shapes", "missing", "extra", "finite", "norm"}
AN_UPDATE_REFUSED = {"lease", "signature", "steps", "truncated", "hash"} | FOR_ITS_TENSORS


def refused(answer: httpx.Response, status: int, code: str, words: str) -> None:
    problem = Problem.model_validate_json(answer.content)
    assert (answer.status_code, problem.code, problem.retry) == (status, code, False), problem
    assert words in problem.message


@pytest.mark.parametrize("attempt, status, code, words", ROWS.values(), ids=ROWS)
def test_bad_input_gets_its_own_answer_and_changes_nothing(house, member, attempt, status, code, words):
    lease, before = member.lease(), house.facts()
    answer = attempt(house, member, lease)
    refused(answer, status, code, words)
    assert house.facts() == before
    if answer.request.url.path == "/v1/updates":
        assert house.refusals() == [code]
        assert code in AN_UPDATE_REFUSED


@pytest.mark.parametrize("attempt", [ROWS[name][0] for name in FORGIVEN], ids=FORGIVEN)
def test_after_bad_input_the_same_worker_goes_on(house, member, attempt):
    lease = member.lease()
    attempt(house, member, lease)
    assert member.send(lease, member.payload(lease)).status_code == 200


@pytest.mark.parametrize(
    "method, path, headers, status, code",
    [
        ("PUT", "/v1/leases/{lease}/uploads/{sha256}?offset=0&size=9", {"content-length": "9999999"}, 413, "oversized"),
        ("PUT", "/v1/leases/{lease}/uploads/{sha256}?offset=0&size=10", {"content-length": "9" * 99}, 413, "oversized"),
        ("PUT", "/v1/leases/{lease}/uploads/{sha256}?offset=0&size=10", {"content-length": "11"}, 413, "oversized"),
        ("PUT", "/v1/leases/{lease}/uploads/{sha256}?offset=0&size=9999999", {"content-length": "9"}, 413, "oversized"),
        ("PUT", "/v1/leases/nobodys/uploads/{sha256}?offset=0&size=10", {"content-length": "10"}, 404, "lease"),
        ("PUT", "/v1/leases/{lease}/uploads/{sha256}?offset=0&size=10", {"transfer-encoding": "gzip"}, 411, "length"),
        ("POST", "/v1/updates", {"content-length": str(2**21)}, 413, "oversized"),
        ("POST", "/v1/leases", {"content-length": str(2**15)}, 413, "oversized"),
        ("POST", "/v1/vettings", {"content-length": str(2**15)}, 413, "oversized"),
        ("POST", "/v1/updates", {"content-length": "-1"}, 411, "length"),
        ("POST", "/v1/updates", {"transfer-encoding": "chunked"}, 411, "length"),
    ],
)  # fmt: skip
def test_a_body_that_is_not_wanted_is_refused_before_it_is_read(house, member, method, path, headers, status, code):
    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    target = path.format(lease=member.lease().lease, sha256=NOBODY)
    start, body = answered(house, method, target, headers, receive)
    assert start["status"] == status
    assert json.loads(body["body"])["code"] == code


def test_a_worker_that_announces_a_request_and_leaves_is_no_error_of_the_coordinator(house):
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    start, _ = answered(house, "POST", "/v1/leases", {"content-length": "900"}, receive)
    assert start["status"] == 400


def answered(
    house: Any, method: str, target: str, headers: dict[str, str], receive: Callable[[], Awaitable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What the service sends to a request whose body is received like this."""
    path, _, query = target.partition("?")
    said = {"authorization": "Bearer the-token-of-the-worker", **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in said.items()],
    }
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(house.service(scope, receive, send))
    return sent
