"""Bad input, one row each: it gets its own status and code and a sentence with the remedy, and changes nothing. Then
other faults: a process that dies at any write of a merge, and two processes that merge at once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import threading
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from blocktrain.errors import RequestRefused
from blocktrain.swarm.ledger.ledger import Ledger
from blocktrain.swarm.signatures import sign
from blocktrain.swarm.worker.client import CoordinatorClient
from blocktrain.swarm.worker.worker import Worker
from blocktrain.wire.codecs.table import make_codec
from blocktrain.wire.invite import Invite
from blocktrain.wire.messages import (
    PROTOCOL_VERSION,
    EvaluationNotice,
    LeaseRequest,
    Problem,
    TrainLease,
    UpdateNotice,
    UpdateReceipt,
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
    "bottomless JSON": (ask("POST", "/v1/leases", content=b"[" * 10**5, headers=JSON), 422, "malformed", "correct"),
    "a name that is no text": (
        ask("POST", "/v1/leases", content=b'{"\\ud800": 1}', headers=JSON), 422, "malformed", "correct the request",
    ),
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


def test_the_lease_of_another_worker_is_not_reported(house, member, another_member):
    lease = member.lease()
    data = another_member.payload(lease)
    another_member.upload(lease.lease, data)
    before = house.facts()
    refused(another_member.submit(another_member.notice(lease, data)), 403, "owner", "ask for one of your own")
    assert house.facts() == before
    assert house.refusals() == ["owner"]


def test_an_absurd_norm_is_refused_when_the_usual_one_is_known(house, member):
    for _ in range(3):
        member.work(1e-3)
    lease, before = member.lease(), house.facts()
    refused(member.send(lease, member.payload(lease, 0.2)), 422, "norm", "times the recent median")
    assert house.facts() == before


def test_an_update_sent_twice_is_merged_once_and_the_receipt_says_so(house, member):
    lease = member.lease()
    data = member.payload(lease)
    first = UpdateReceipt.model_validate(member.send(lease, data).json())
    before = house.facts()
    again = UpdateReceipt.model_validate(member.submit(member.notice(lease, data)).json())
    assert (first.duplicate, again.duplicate) == (False, True)
    assert again.update == first.update
    assert house.facts() == before


def test_an_update_copied_from_another_worker_is_refused(house, member, another_member):
    lease, own = member.lease(), another_member.lease()
    data = member.payload(lease)
    assert member.send(lease, data).status_code == 200
    before = house.facts()
    refused(another_member.send(own, data), 409, "copied", "send this lease's update")
    assert house.facts() == before


def test_a_second_update_for_one_lease_is_refused(house, member, another_member):
    lease = member.lease()
    another_member.lease()  # keeps the round open
    assert member.send(lease, member.payload(lease)).status_code == 200
    before = house.facts()
    refused(member.send(lease, member.payload(lease, 2e-3)), 409, "reported", "ask for a new lease")
    assert house.facts() == before


def test_an_update_too_far_behind_is_refused_with_the_remedy(house, member, another_member):
    late = another_member.lease()
    data = another_member.payload(late, 2e-3)
    house.now_s += 5000
    for _ in range(2):
        member.work()
    another_member.upload(late.lease, data)
    before = house.facts()
    refused(another_member.submit(another_member.notice(late, data)), 409, "stale", "fetch the block again")
    assert house.facts() == before
    assert house.refusals() == ["stale"]


def test_an_update_one_version_behind_is_merged_with_less_weight(house, member, another_member):
    late = another_member.lease()
    data = another_member.payload(late, 2e-3)
    house.now_s += 5000
    member.work()
    receipt = another_member.send(late, data).json()
    assert receipt["lag"] == 1
    assert receipt["weight"] < late.steps * house.spec.step_bytes


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
        ("POST", "/v1/updates", {"content-length": "-1"}, 411, "length"),
        ("POST", "/v1/updates", {"transfer-encoding": "chunked"}, 411, "length"),
    ],
)  # fmt: skip
def test_a_body_that_is_not_wanted_is_refused_before_it_is_read(house, member, method, path, headers, status, code):
    target, _, query = path.format(lease=member.lease().lease, sha256=NOBODY).partition("?")
    said = {"authorization": "Bearer the-token-of-the-worker", **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": target,
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode()) for name, value in said.items()],
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(house.service(scope, receive, send))
    assert sent[0]["status"] == status
    assert json.loads(sent[1]["body"])["code"] == code


# Faults: the process dies, others go on


class Died(BaseException):
    """Like kill -9, but for one thread: nothing handles it."""


class Plan:
    """Dies at the n-th write that it watches, before or after the write. With n = 0 it only counts."""

    def __init__(self, dies_at: int, after: bool) -> None:
        self.dies_at, self.after, self.writes = dies_at, after, 0

    def watch(self, monkeypatch: pytest.MonkeyPatch, owner: object, *names: str) -> None:
        for name in names:
            monkeypatch.setattr(owner, name, self.planned(getattr(owner, name)))

    def planned(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            self.writes += 1
            dies = self.writes == self.dies_at
            if dies and not self.after:
                raise Died
            result = real(*args, **kwargs)
            if dies:
                raise Died
            return result

        return write


def meet_fate(house, plan: Plan, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The action, in a process that dies as planned."""
    with monkeypatch.context() as planned:
        plan.watch(planned, house.blobs, "put", "keep", "discard_uploads")
        plan.watch(planned, Ledger, "add_initial_blocks", "open_phase", "record_update", "merge", "add_event")
        try:
            action()
        except Died:
            assert plan.dies_at
        else:
            assert plan.dies_at == 0


def notice_of(member, step: float = 1e-3) -> UpdateNotice:
    """The notice of an uploaded update of the open round."""
    lease = member.lease()
    data = member.payload(lease, step)
    assert member.upload(lease.lease, data).status_code == 200
    return UpdateNotice.model_validate(member.notice(lease, data))


MOMENTUM = {"swarm.outer": "nesterov"}
MERGE_WRITES = 10  # the update's blob and row, difference, weights and momentum of two blocks, the merge, what follows
OPENING_WRITES = 4  # two initial blocks, their versions, the phase


@pytest.fixture(scope="module")
def calm_weights(new_house) -> dict[tuple[int, int], str]:
    """After one update in a run without faults."""
    calm = new_house(**MOMENTUM)
    calm.coordinator.update(notice_of(calm.member()))
    calm.settle()
    return calm.weights()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dies_at", range(MERGE_WRITES + 1))
def test_a_death_at_any_write_of_a_merge_changes_no_weight(new_house, calm_weights, monkeypatch, dies_at, after):
    house, plan = new_house(**MOMENTUM), Plan(dies_at, after)
    member = house.member()
    notice = notice_of(member)

    def update_and_merge() -> None:
        house.coordinator.update(notice)
        house.settle()

    meet_fate(house, plan, update_and_merge, monkeypatch)
    assert plan.writes == (dies_at or MERGE_WRITES)
    recorded = house.ledger.update(notice.payload.sha256) is not None
    house.restart()
    house.settle()
    assert house.coordinator.update(notice).duplicate == recorded
    house.settle()
    assert house.weights() == calm_weights
    member.work()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("dies_at", range(OPENING_WRITES + 1))
def test_a_death_at_any_write_of_an_opening_changes_no_weight(new_house, calm_weights, monkeypatch, dies_at, after):
    house, plan = new_house(**MOMENTUM), Plan(dies_at, after)
    meet_fate(house, plan, house.coordinator.loop.tick, monkeypatch)
    assert plan.writes == (dies_at or OPENING_WRITES)
    house.restart()
    house.coordinator.loop.tick()
    assert house.weights() == {key: sha256 for key, sha256 in calm_weights.items() if key[1] == 0}
    house.member().work()


def all_at_once(*actions: Callable[[], object]) -> list[BaseException]:
    """What they raised."""
    start, raised = threading.Barrier(len(actions)), list[BaseException]()

    def run(action: Callable[[], object]) -> None:
        start.wait()
        try:
            action()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.mark.parametrize("num_coordinators", [1, 2, 4])
def test_coordinators_that_tick_at_once_merge_once(house, member, another_member, num_coordinators):
    another_member.lease()  # and is never heard of again
    house.coordinator.update(notice_of(member))
    ledgers = [Ledger(house.folder / "ledger.db") for _ in range(num_coordinators)]
    coordinators = [house.another_coordinator(ledger) for ledger in ledgers]
    house.now_s += 5000
    assert all_at_once(*(coordinators[i % num_coordinators].loop.tick for i in range(4))) == []
    assert {version for _, version in house.weights()} == {0, 1}
    assert [event.kind for event in house.ledger.events()] == ["joined", "joined", "late", "merged"]
    for ledger in ledgers:
        ledger.close()


@pytest.mark.parametrize("dies_at", [0, 1], ids=["it goes on", "it dies before it merges"])
def test_an_update_that_another_coordinator_takes_in_while_a_phase_ends_is_merged(new_house, monkeypatch, dies_at):
    house = new_house(**{"train.steps": 2})
    first, second = notice_of(house.member()), notice_of(house.member(), 2e-3)
    house.coordinator.update(first)
    here, there = (Ledger(house.folder / "ledger.db") for _ in range(2))
    merging, other = house.another_coordinator(here), house.another_coordinator(there)
    Plan(dies_at, after=False).watch(monkeypatch, there, "merge")
    real, raised = here.merge, list[BaseException]()

    def acknowledged_and_merged() -> None:
        other.update(second)
        other.loop.settle()

    def late(*args: Any) -> bool:
        """The merge is computed. Before it is recorded, the other coordinator, whose clock is behind, acknowledges one
        more update."""
        house.now_s -= 5000
        raised.extend([] if there.update(second.payload.sha256) else all_at_once(acknowledged_and_merged))
        house.now_s += 5000
        return real(*args)

    monkeypatch.setattr(here, "merge", late)
    house.now_s += 5000  # the deadline is over: the first update alone may close the round
    for _ in range(2):
        merging.loop.tick()
    assert len(raised) == dies_at
    merged = {x.update.id: x.update.merged_round for x in house.ledger.contributions()}
    assert merged == {first.payload.sha256: 0, second.payload.sha256: 0}
    assert house.ledger.phases()[0].finished
    for ledger in (here, there):
        ledger.close()


def test_one_update_from_many_threads_is_merged_once(house, member):
    notice, receipts = notice_of(member), list[UpdateReceipt]()
    assert all_at_once(*[lambda: receipts.append(house.coordinator.update(notice))] * 6) == []
    house.settle()
    assert sorted(receipt.duplicate for receipt in receipts) == [False] + [True] * 5
    assert {version for _, version in house.weights()} == {0, 1}


def test_workers_that_ask_at_once_get_a_shard_each(house):
    crew, leases = [house.member() for _ in range(6)], list[TrainLease]()
    requests = [LeaseRequest.model_validate(one.request()) for one in crew]
    house.coordinator.loop.tick()
    asked = [lambda request=request: leases.append(house.coordinator.lease(request)) for request in requests]
    assert all_at_once(*asked) == []
    assert sorted(lease.shard for lease in leases) == list(range(6))


def test_a_blob_that_the_coordinator_lost_is_waited_for(house, member):
    lease = member.lease()
    (house.folder / "blobs" / "blobs" / lease.trained[0].tensors.sha256).unlink()
    answer = house.ask("POST", "/v1/leases", json=member.request())
    assert answer.status_code == 503
    assert Problem.model_validate_json(answer.content).retry


# The worker's side: it reports the same sentence to its user, and continues if it can


def worker_whose_first_update_gets(code: str, house, home, reports: list[str]) -> Worker:
    """Runs until it has submitted one update. Its requests reach the service, except its first update: that gets
    `code`."""
    planned = [httpx.Response(409, json={"code": code, "message": "as planned", "retry": False})]

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/updates" and planned:
            return planned.pop()
        kept = {name: value for name, value in request.headers.items() if name in ("range", "content-type")}
        answer = house.ask(request.method, request.url.raw_path.decode(), content=request.content, headers=kept)
        return httpx.Response(answer.status_code, content=answer.content)

    client = CoordinatorClient(Invite("coordinator.test", 80, "x" * 20), transport=httpx.MockTransport(answer))
    return Worker(
        client,
        home,
        key=Ed25519PrivateKey.generate(),
        memory_bytes=2**33,
        report=lambda event: reports.append(f"{event.kind}: {event.text}"),
        stop=lambda: any(text.startswith("submitted") for text in reports),
        sleep=lambda _: None,
    )


@pytest.mark.parametrize("code", ["stale", "lease", "norm", "reported"])
def test_a_worker_goes_on_after_a_refused_update(new_house, tmp_path, code):
    reports: list[str] = []
    worker_whose_first_update_gets(code, new_house(**{"swarm.update": "int8"}), tmp_path, reports).run()
    kinds = [text.partition(":")[0] for text in reports if not text.startswith("step")]
    assert kinds == ["lease", "refused", "lease", "submitted"]
    assert "refused: as planned" in reports


@pytest.mark.parametrize("code", ["token", "role", "protocol", "signature"])
def test_a_worker_that_is_refused_itself_ends_with_the_reason(new_house, tmp_path, code):
    worker = worker_whose_first_update_gets(code, new_house(), tmp_path, [])
    with pytest.raises(RequestRefused, match="as planned"):
        worker.run()


def test_what_a_refused_update_held_back_is_not_forgotten(new_house, tmp_path):
    reports: list[str] = []
    worker = worker_whose_first_update_gets("token", new_house(**{"swarm.update": "int8"}), tmp_path, reports)
    with pytest.raises(RequestRefused):
        worker.run()
    assert worker._feedback.unsent == {}  # as before the update: nothing counts as sent
